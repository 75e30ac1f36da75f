"""What attention over one batch needs besides numbers that change from layer to layer: checked arguments and indices.

Owns the checks of tables and lengths and how the CPU kernel divides a batch. It must not know queries or values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

# A group's gathered keys and values should stay in the cache between being gathered and being read.
GATHER_BYTES = 8 << 20


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
class AttentionPlan:
    """Checked lengths of one batch and, for the CPU kernel, how it is divided. Make it with `make_plan`."""

    kv_shape: torch.Size
    num_rows: int
    query_start: list[int]
    context_lens: list[int]
    decode: list[DecodeGroup] = field(default_factory=list)
    prefill: list[PrefillItem] = field(default_factory=list)
    buffers: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)  # reused from layer to layer


def make_plan(kv: Tensor, block_tables: Tensor, query_start: Tensor, context_lens: Tensor) -> AttentionPlan:
    """Check the arguments of `paged_attention` that do not change between layers, and divide the batch.

    Raises:
        ValueError: an argument has a wrong shape, type or value; the message begins with its name.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: must be [blocks, kv_heads, 2, block_tokens, head_dim], not {list(kv.shape)}")
    for name, tensor, dims in (("block_tables", block_tables, 2), ("query_start", query_start, 1)):
        if tensor.dim() != dims or tensor.dtype != torch.int32:
            raise ValueError(f"{name}: must be {dims}-dimensional int32, not {list(tensor.shape)} {tensor.dtype}")
    sequences = query_start.shape[0] - 1
    if context_lens.shape != (sequences,) or context_lens.dtype != torch.int32:
        raise ValueError(f"context_lens: must be [{sequences}] int32, not {list(context_lens.shape)}")
    if block_tables.shape[0] != sequences:
        raise ValueError(f"block_tables: must be [{sequences}, max_blocks], not {list(block_tables.shape)}")
    starts: list[int] = query_start.tolist()
    lengths: list[int] = context_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    if starts[:1] != [0] or min(counts, default=0) < 0:
        raise ValueError(f"query_start: must rise from 0, not {starts}")
    if any(length < count for length, count in zip(lengths, counts, strict=True)):
        raise ValueError("context_lens: a sequence has fewer tokens than query rows")
    blocks, _, _, block_tokens, _ = kv.shape
    used = [-(-length // block_tokens) for length in lengths]
    if max(used, default=0) > block_tables.shape[1]:
        raise ValueError(f"block_tables: {block_tables.shape[1]} columns do not hold {max(lengths)} tokens")
    tables: list[list[int]] = [row[:n] for row, n in zip(block_tables.tolist(), used, strict=True)]
    if any(min(row) < 0 or max(row) >= blocks for row in tables if row):
        raise ValueError(f"block_tables: an entry is outside the pool's {blocks} blocks")
    plan = AttentionPlan(kv.shape, starts[-1], starts, lengths)
    if kv.device.type == "cpu":
        _divide(plan, kv, tables, counts)
    return plan


def _divide(plan: AttentionPlan, kv: Tensor, tables: Sequence[list[int]], counts: Sequence[int]) -> None:
    """Fill in the plan's prefill items and decode groups."""
    kv_heads = kv.shape[1]
    singles = []
    for s, count in enumerate(counts):
        if count > 1:
            gather = _gather_index(torch.tensor([tables[s]]), kv_heads)
            begin, end = plan.query_start[s], plan.query_start[s + 1]
            plan.prefill.append(PrefillItem(begin, end, plan.context_lens[s], gather))
        elif count == 1:
            singles.append(s)
    singles.sort(key=lambda s: len(tables[s]))
    block_bytes = kv[0].numel() * kv.element_size() if kv.shape[0] else 0
    group: list[int] = []
    for s in singles:
        # Padding at most doubles the work; groups are no larger than the cache can hold.
        widest = len(tables[s])
        if group and (widest > 2 * len(tables[group[0]]) or (len(group) + 1) * widest * block_bytes > GATHER_BYTES):
            plan.decode.append(_decode_group(plan, kv, tables, group))
            group = []
        group.append(s)
    if group:
        plan.decode.append(_decode_group(plan, kv, tables, group))


def _decode_group(plan: AttentionPlan, kv: Tensor, tables: Sequence[list[int]], group: list[int]) -> DecodeGroup:
    """Return the indices of one group; padding reads the sequence's own first block, which is masked."""
    _, kv_heads, _, block_tokens, _ = kv.shape
    width = max(len(tables[s]) for s in group)
    padded = torch.tensor([tables[s] + tables[s][:1] * (width - len(tables[s])) for s in group])
    lengths = [plan.context_lens[s] for s in group]
    rows = [plan.query_start[s] for s in group]
    index = None if rows == list(range(plan.num_rows)) else torch.tensor(rows)
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
