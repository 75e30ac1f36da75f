"""Checked tables and lengths of one batch: what attention needs once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.division import Division, divide


@dataclass(slots=True)
class AttentionPlan:
    """Checked lengths of one batch, and what implementations derive from them. Make it with `make_plan`."""

    kv_shape: torch.Size
    num_rows: int
    query_start: list[int]
    context_lens: list[int]
    deterministic: bool
    tables: list[list[int]]  # per sequence the blocks of its context
    decode: Tensor  # [n, 4] int32: query row, 1, sequence, context; sequences with one query row
    prefill: Tensor  # [n, 4] int32: first query row, rows, sequence, context; sequences with several
    _division: Division | None = field(default=None, repr=False)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.context_lens, default=0)

    def go_on(self, block_tables: NDArray[np.int32]) -> None:
        """Make it the plan of the next step: one query row for each sequence, as before, and one token of context more.

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
        """Return how plain torch divides the batch, computed once; see `kernels.division.divide`."""
        if self._division is None:
            self._division = divide(
                kv,
                self.tables,
                self.query_start,
                self.context_lens,
                alone=self.deterministic,
                gather_bytes=gather_bytes,
            )
        return self._division


def make_plan(
    kv: Tensor, block_tables: Tensor, query_start: Tensor, context_lens: Tensor, *, deterministic: bool = False
) -> AttentionPlan:
    """Check the arguments of `paged_attention` that do not change between layers, and list the batch.

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
    _check_lengths(starts, lengths)
    blocks, block_tokens = kv.shape[0], kv.shape[3]
    used = [-(-length // block_tokens) for length in lengths]
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
        decode=_items([row for row in rows if row[1] == 1]),
        prefill=_items([row for row in rows if row[1] > 1]),
    )


def _outside(blocks: int) -> ValueError:
    return ValueError(f"block_tables: an entry is outside the pool's {blocks} blocks")


def plan_of_shapes(kv: Tensor, rows: int, most_context: int, *, deterministic: bool = False) -> AttentionPlan:
    """Return a plan of `rows` sequences with one query row and at most `most_context` tokens each, whatever they hold.

    Nothing is looked at, so nothing is checked. For implementations that need no tables and lengths on the host.
    """
    rows_of = [(row, 1, row, most_context) for row in range(rows)]
    starts, lengths = list(range(rows + 1)), [most_context] * rows
    return AttentionPlan(kv.shape, rows, starts, lengths, deterministic, [], _items(rows_of), _items([]))


def _check_lengths(starts: Sequence[int], lengths: Sequence[int]) -> None:
    counts = [end - begin for begin, end in pairwise(starts)]
    if starts[:1] != [0] or min(counts, default=0) < 0:
        raise ValueError(f"query_start: must rise from 0, not {list(starts)}")
    if any(length < count for length, count in zip(lengths, counts, strict=True)):
        raise ValueError("context_lens: a sequence has fewer tokens than query rows")


def _items(rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4)
