"""One batch's checked tables and lengths, needed once for all layers, and how plain torch divides the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.engine.kernels.kind import first_seen


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one query row each and similar lengths, computed together, padded to the longest.

    Rows in the gathered copy belong to one token in one head each: [planes, G, kv_heads, blocks * block_size].
    """

    rows: Tensor | None  # [G] int64: query rows; None: all rows of the batch, in order
    members: int  # G
    gather: Tensor  # [planes * G * kv_heads * blocks] int64: pool rows, each for one plane, block and head
    stale: Tensor | None  # [n] int64: gathered rows that belong to no token of their sequence
    mask: Tensor | None  # [G * kv_heads, 1, blocks * block_size]: 0 or -inf; None: all slots are seen


@dataclass(slots=True)
class PrefillItem:
    """One sequence with several query rows."""

    begin: int  # first query row
    end: int  # one past the last
    context: int  # tokens seen by the last row, less the skipped ones
    skipped: int  # leading tokens that no row sees and that are not gathered
    gather: Tensor  # [planes * kv_heads * blocks] int64


@dataclass(slots=True)
class Division:
    """A batch in parts, and memory for gathered copies that is reused from layer to layer."""

    planes: int  # 2 (K, V), or 1 of latent vectors
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
    window: int | None = None,
    chunked: bool = False,
) -> Division:
    """Return the batch in parts.

    Args:
        kv: one layer in the pool.
        tables: blocks of each sequence.
        starts: each sequence's first query row, and one past the last.
        lengths: context of each sequence.
        alone: every sequence by itself, so that the result does not depend on others.
        gather_bytes: most bytes of gathered keys and values for a group with several sequences.
        window: tokens that a query row sees; blocks that no row sees are not gathered.
        chunked: whether the window begins anew every `window` tokens.
    """
    skipped = [0] * len(tables)
    if window is not None:
        firsts = [
            first_seen(length - (end - begin), window, chunked=chunked)
            for length, (begin, end) in zip(lengths, pairwise(starts), strict=True)
        ]
        skipped = [max(0, first) // kv.shape[3] * kv.shape[3] for first in firsts]
        tables = [table[count // kv.shape[3] :] for table, count in zip(tables, skipped, strict=True)]
        lengths = [length - count for length, count in zip(lengths, skipped, strict=True)]
    kv_heads, planes = kv.shape[1:3]
    division = Division(planes)
    singles = []
    for s, (begin, end) in enumerate(pairwise(starts)):
        count = end - begin
        if count > 1:
            gather = _gather_index(torch.tensor([tables[s]]), kv_heads, planes)
            division.prefill.append(PrefillItem(begin, end, lengths[s], skipped[s], gather))
        elif count == 1:
            singles.append(s)
    singles.sort(key=lambda s: len(tables[s]))
    block_bytes = kv[0].numel() * kv.element_size() if kv.shape[0] else 0
    groups: list[list[int]] = []
    group: list[int] = []
    for s in singles:
        # Padding at most doubles the work; groups are no larger than the cache can hold.
        widest = len(tables[s])
        if group and (
            alone or widest > 2 * len(tables[group[0]]) or (len(group) + 1) * widest * block_bytes > gather_bytes
        ):
            groups.append(group)
            group = []
        group.append(s)
    if group:
        groups.append(group)
    for group in groups:
        unseen = [0] * len(group)
        if window is not None:
            unseen = [first_seen(lengths[s] + skipped[s] - 1, window, chunked=chunked) - skipped[s] for s in group]
        division.decode.append(_decode_group(kv, tables, starts, lengths, group, unseen))
    return division


def _decode_group(
    kv: Tensor,
    tables: Sequence[list[int]],
    starts: Sequence[int],
    contexts: Sequence[int],
    group: list[int],
    unseen: Sequence[int],
) -> DecodeGroup:
    """Return one group's indices; padding reads the sequence's own first block, which is masked.

    `unseen`: for each sequence in the group, leading gathered tokens that the row does not see.
    """
    _, kv_heads, planes, block_size, _ = kv.shape
    width = max(len(tables[s]) for s in group)
    padded = torch.tensor([tables[s] + tables[s][:1] * (width - len(tables[s])) for s in group])
    lengths = [contexts[s] for s in group]
    rows = [starts[s] for s in group]
    index = None if rows == list(range(starts[-1])) else torch.tensor(rows)
    gather = _gather_index(padded, kv_heads, planes)
    tokens = width * block_size
    if min(lengths) == tokens and max(unseen) <= 0:
        return DecodeGroup(index, len(group), gather, None, None)
    position = torch.arange(tokens)
    length = torch.tensor(lengths)[:, None]
    hidden = (position >= length) | (position < torch.tensor(unseen)[:, None])
    mask = torch.zeros((len(group), tokens)).masked_fill_(hidden, -torch.inf)
    # Only the slots after a sequence's last token: padding beyond the last block repeats a valid block, unless that
    # first block is the last block.
    single = torch.tensor([len(tables[s]) == 1 for s in group])[:, None]
    unwritten = torch.where(single, position % block_size, position) >= length
    own = position < torch.tensor([len(tables[s]) * block_size for s in group])[:, None]
    where = (unwritten & (own | single)).flatten().nonzero().flatten()  # index into [G * tokens]
    member, slot = where // tokens, where % tokens
    each = torch.arange(planes)[:, None, None] * len(group)
    heads = torch.arange(kv_heads)[None, :, None]
    stale = (((each + member[None, None]) * kv_heads + heads) * tokens + slot[None, None]).flatten()
    return DecodeGroup(index, len(group), gather, stale, mask.repeat_interleave(kv_heads, 0)[:, None])


def _gather_index(tables: Tensor, kv_heads: int, planes: int) -> Tensor:
    """Return where [planes, G, kv_heads, n] lie in the pool seen as [blocks * kv_heads * planes, ...].

    `tables` is [G, n].
    """
    heads = torch.arange(kv_heads)[:, None]
    keys = (tables[:, None, :] * kv_heads + heads) * planes  # [G, kv_heads, blocks]
    return torch.stack([keys + plane for plane in range(planes)]).flatten()


@dataclass(slots=True)
class AttentionPlan:
    """One batch's checked lengths, and what implementations derive from them. Made by `make_plan`."""

    kv_shape: torch.Size
    num_rows: int
    query_start: list[int]
    context_lens: list[int]
    deterministic: bool
    tables: list[list[int]]  # per sequence the context's blocks
    window: int | None  # tokens that a query row sees, the row's own included; None: all
    chunked: bool  # whether the window begins anew every `window` tokens
    decode: Tensor  # [n, 4] int32: query row, 1, sequence, context; sequences with one query row
    prefill: Tensor  # [n, 4] int32: first query row, rows, sequence, context; sequences with several
    singles: int | None  # sequences with one query row; None: any number
    _division: Division | None = field(default=None, repr=False)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.context_lens, default=0)

    def go_on(self, block_tables: NDArray[np.int32]) -> None:
        """Turn this plan into the next step's: one query row for each sequence, as before, and one context token more.

        Raises:
            ValueError: a block that is reached is not in the pool; the message begins with "block_tables".
        """
        assert self.num_rows == len(self.context_lens) == len(self.decode), "one row of each sequence"
        blocks, size = self.kv_shape[0], self.kv_shape[3]
        for sequence, length in enumerate(self.context_lens):
            self.context_lens[sequence] = length + 1
            if length % size == 0:
                block = int(block_tables[sequence, length // size])
                if not 0 <= block < blocks:
                    raise _outside(blocks)
                self.tables[sequence].append(block)
        self.decode.numpy()[:, 3] += 1
        self._division = None

    def division(self, kv: Tensor, gather_bytes: int) -> Division:
        """Return how plain torch divides the batch, computed once; see `moonpool.engine.kernels.plan.divide`."""
        if self._division is None:
            self._division = divide(
                kv,
                self.tables,
                self.query_start,
                self.context_lens,
                alone=self.deterministic,
                gather_bytes=gather_bytes,
                window=self.window,
                chunked=self.chunked,
            )
        return self._division


def make_plan(
    kv: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    deterministic: bool = False,
    window: int | None = None,
    chunked: bool = False,
) -> AttentionPlan:
    """Check the arguments of `paged_attention` that do not change between layers, and list the batch.

    `window`: tokens that a query row sees, the row's own included; None: all earlier tokens. `chunked`: whether the
    window begins anew every `window` tokens.

    Raises:
        ValueError: an argument has a wrong shape, type or value; the message begins with the argument's name.
    """
    if kv.dim() != 5 or kv.shape[2] not in (1, 2):
        raise ValueError(f"kv: must be [blocks, kv_heads, 1 or 2, block_size, head_dim], not {list(kv.shape)}")
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
    _check_lengths(starts, lengths)
    blocks, block_size = kv.shape[0], kv.shape[3]
    used = [-(-length // block_size) for length in lengths]
    if max(used, default=0) > block_tables.shape[1]:
        raise ValueError(f"block_tables: {block_tables.shape[1]} columns do not hold {max(lengths)} tokens")
    tables: list[list[int]] = [row[:n] for row, n in zip(block_tables.tolist(), used, strict=True)]
    if any(min(row) < 0 or max(row) >= blocks for row in tables if row):
        raise _outside(blocks)
    rows = [(begin, end - begin, s, lengths[s]) for s, (begin, end) in enumerate(pairwise(starts))]
    return AttentionPlan(
        kv.shape,
        starts[-1],
        starts,
        lengths,
        deterministic,
        tables,
        window,
        chunked,
        decode=(decode := _items([row for row in rows if row[1] == 1])),
        prefill=_items([row for row in rows if row[1] > 1]),
        singles=len(decode),
    )


def _outside(blocks: int) -> ValueError:
    return ValueError(f"block_tables: an entry is outside the pool's {blocks} blocks")


def plan_of_shapes(
    kv: Tensor,
    rows: int,
    sequences: int,
    most_context: int,
    *,
    deterministic: bool = False,
    window: int | None = None,
    chunked: bool = False,
) -> AttentionPlan:
    """Return a plan for `rows` query rows of `sequences` with at most `most_context` tokens each, whatever they hold.

    As many rows as sequences: each sequence has one. Else the rows may be any sequences'.

    Contents are neither read nor checked. For implementations that need no tables and lengths on the host.
    """
    singles, none = sequences if rows == sequences else None, _items([])
    lengths = [most_context] * sequences
    return AttentionPlan(kv.shape, rows, [], lengths, deterministic, [], window, chunked, none, none, singles)


def _check_lengths(starts: Sequence[int], lengths: Sequence[int]) -> None:
    counts = [end - begin for begin, end in pairwise(starts)]
    if starts[:1] != [0] or min(counts, default=0) < 0:
        raise ValueError(f"query_start: must rise from 0, not {list(starts)}")
    if any(length < count for length, count in zip(lengths, counts, strict=True)):
        raise ValueError("context_lens: a sequence has fewer tokens than query rows")


def _items(rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4)
