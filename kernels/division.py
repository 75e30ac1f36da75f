"""How attention in plain torch divides a batch: which sequences are gathered together, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one query row each and similar lengths, computed together, padded to the longest.

    Rows of the gathered copy are of one token of one head each: [2 (K, V), G, kv_heads, blocks * block_tokens].
    """

    rows: Tensor | None  # [G] int64: query rows; None: all rows of the batch, in order
    members: int  # G
    gather: Tensor  # [2 * G * kv_heads * blocks] int64: pool as [blocks * kv_heads * 2, block_tokens * head_dim]
    stale: Tensor | None  # [n] int64: gathered rows that belong to no token of their sequence
    mask: Tensor | None  # [G * kv_heads, 1, blocks * block_tokens]: 0 or -inf; None: all slots are seen


@dataclass(slots=True)
class PrefillItem:
    """One sequence with several query rows."""

    begin: int  # first query row
    end: int  # one past the last
    context: int  # tokens seen by the last row
    gather: Tensor  # [2 * kv_heads * blocks] int64


@dataclass(slots=True)
class Division:
    """A batch in parts, and memory for gathered copies that is reused from layer to layer."""

    decode: list[DecodeGroup] = field(default_factory=list)
    prefill: list[PrefillItem] = field(default_factory=list)
    buffers: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)


def divide(
    kv: Tensor,
    tables: Sequence[list[int]],
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    alone: bool,
    gather_bytes: int,
) -> Division:
    """Return the batch in parts.

    Args:
        kv: one layer of the pool.
        tables: blocks of each sequence.
        starts: first query row of each sequence, and one past the last.
        lengths: context of each sequence.
        alone: every sequence by itself, so that its result does not depend on others.
        gather_bytes: most bytes of gathered keys and values of a group of several sequences.
    """
    division = Division()
    kv_heads = kv.shape[1]
    singles = []
    for s, (begin, end) in enumerate(pairwise(starts)):
        count = end - begin
        if count > 1:
            gather = _gather_index(torch.tensor([tables[s]]), kv_heads)
            division.prefill.append(PrefillItem(begin, end, lengths[s], gather))
        elif count == 1:
            singles.append(s)
    singles.sort(key=lambda s: len(tables[s]))
    block_bytes = kv[0].numel() * kv.element_size() if kv.shape[0] else 0
    group: list[int] = []
    for s in singles:
        # Padding at most doubles the work; groups are no larger than the cache can hold.
        widest = len(tables[s])
        if group and (
            alone or widest > 2 * len(tables[group[0]]) or (len(group) + 1) * widest * block_bytes > gather_bytes
        ):
            division.decode.append(_decode_group(kv, tables, starts, lengths, group))
            group = []
        group.append(s)
    if group:
        division.decode.append(_decode_group(kv, tables, starts, lengths, group))
    return division


def _decode_group(
    kv: Tensor, tables: Sequence[list[int]], starts: Sequence[int], contexts: Sequence[int], group: list[int]
) -> DecodeGroup:
    """Return the indices of one group; padding reads the sequence's own first block, which is masked."""
    _, kv_heads, _, block_tokens, _ = kv.shape
    width = max(len(tables[s]) for s in group)
    padded = torch.tensor([tables[s] + tables[s][:1] * (width - len(tables[s])) for s in group])
    lengths = [contexts[s] for s in group]
    rows = [starts[s] for s in group]
    index = None if rows == list(range(starts[-1])) else torch.tensor(rows)
    gather = _gather_index(padded, kv_heads)
    tokens = width * block_tokens
    if min(lengths) == tokens:
        return DecodeGroup(index, len(group), gather, None, None)
    position = torch.arange(tokens)
    length = torch.tensor(lengths)[:, None]
    mask = torch.zeros((len(group), tokens), dtype=kv.dtype).masked_fill_(position >= length, -torch.inf)
    # Only the slots after a sequence's last token: padding beyond its last block repeats a block that is valid, unless
    # that first block is itself the last one.
    single = torch.tensor([len(tables[s]) == 1 for s in group])[:, None]
    unwritten = torch.where(single, position % block_tokens, position) >= length
    own = position < torch.tensor([len(tables[s]) * block_tokens for s in group])[:, None]
    where = (unwritten & (own | single)).flatten().nonzero().flatten()  # index into [G * tokens]
    member, slot = where // tokens, where % tokens
    planes = torch.arange(2)[:, None, None] * len(group)
    heads = torch.arange(kv_heads)[None, :, None]
    stale = (((planes + member[None, None]) * kv_heads + heads) * tokens + slot[None, None]).flatten()
    return DecodeGroup(index, len(group), gather, stale, mask.repeat_interleave(kv_heads, 0)[:, None])


def _gather_index(tables: Tensor, kv_heads: int) -> Tensor:
    """Return where [2, G, kv_heads, n] lie in the pool seen as [blocks * kv_heads * 2, ...]; `tables` is [G, n]."""
    heads = torch.arange(kv_heads)[:, None]
    keys = (tables[:, None, :] * kv_heads + heads) * 2  # [G, kv_heads, blocks]
    return torch.stack((keys, keys + 1)).flatten()
