"""Which rows of a batch the last layer is computed for: only those whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moonpool.model.batch import PackedBatch


@dataclass(slots=True)
class Trim:
    """The wanted rows, and what attention is given for them; see `kernels.plan.AttentionPlan`."""

    rows: Tensor  # [R] int64, rising
    single: Tensor  # [n, 4] int32: place in `rows`, 1, sequence, context; of sequences with one wanted row
    several: Tensor  # [n, 4] int32: first place in `rows`, how many, sequence, context; of the others


def trim(batch: PackedBatch, tails: Sequence[int] | None) -> Trim | None:
    """Return what the last layer computes; None where it is all rows.

    `tails`: for each sequence, how many of its last rows are wanted; None: all of all.
    """
    if tails is None or sum(tails) == batch.num_tokens:
        return None
    rows: list[int] = []
    items: list[tuple[int, int, int, int]] = []
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    for index, ((begin, end), count) in enumerate(zip(pairwise(starts), tails, strict=True)):
        assert 0 <= count <= end - begin
        if count:
            items.append((len(rows), count, index, contexts[index]))
            rows += range(end - count, end)
    return Trim(
        torch.tensor(rows, dtype=torch.int64),
        _table([item for item in items if item[1] == 1]),
        _table([item for item in items if item[1] > 1]),
    )


def _table(items: Sequence[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(items, dtype=torch.int32).view(-1, 4)
