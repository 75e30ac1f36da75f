"""Drawn arguments for the operations of `moonpool.engine.kernels.reference`, in shapes and types of given ones.

For comparisons (`moonpool.engine.kernels.self_check`): numbers, lengths and places are such that results show a key,
row or head that is left out or taken for another. Blocks of the pool that the given arguments name are overwritten.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.kernels import reference

Arguments = dict[str, Any]

LAST = 4.0
"""Factor of values of a sequence's last token, so that a kernel without the token is far off."""
_SEED = 1
_MOST_SCORES = 1 << 27
"""Query heads times keys of a batch that is drawn: more take time and memory."""
_MOST_NUMBERS = 1 << 26
"""Of an argument that is drawn; smaller batches take the same kernels."""
_CHOSEN_ROWS, _COPIED = 256, 8
_NUMBERS = frozenset({"x", "residual", "q", "k", "v", "qk", "gate_up", "results", "cos", "sin"})


class SeededDraws:
    """Random numbers, the same each time.

    Args:
        device: of what is drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.random = random.Random(_SEED)
        self.generator = torch.Generator(device).manual_seed(_SEED)

    def normal(self, like: Tensor, size: float = 1.0) -> Tensor:
        """Return normal numbers in the shape, strides and type of `like`, with this standard deviation."""
        drawn = torch.empty(like.shape, device=self.device).normal_(generator=self.generator).mul_(size)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device).copy_(drawn)

    def integers(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return whole numbers on the device."""
        return torch.tensor(values, dtype=dtype).to(self.device)


def drawn(draws: SeededDraws, name: str, given: Mapping[str, Any]) -> Arguments | None:
    """Return arguments for the operation `name` as those `given`; None: the batch is too large."""
    if any(value.numel() > _MOST_NUMBERS for key, value in given.items() if key in _NUMBERS and value is not None):
        return None
    found = {
        key: draws.normal(value) if key in _NUMBERS and value is not None else value for key, value in given.items()
    }
    prepare = _PREPARED.get(name)
    return found if prepare is None or prepare(draws, found) else None


def attention_arguments(draws: SeededDraws, given: Arguments) -> bool:
    """Draw queries, lengths, tables and the pool's blocks."""
    q, kv, scales, lengths = given["q"], given["kv"], given["scales"], given["context_lens"].tolist()
    counts = [end - begin for begin, end in pairwise(given["query_start"].tolist())]
    if sum(count * length for count, length in zip(counts, lengths, strict=True)) * q.shape[1] > _MOST_SCORES:
        return False
    given["q"] = draws.normal(q, _of_queries(given))
    size = kv.shape[3]
    width = max(1, -(-max(lengths) // size))
    tables = given["block_tables"].tolist()
    blocks = sorted({block for table in tables for block in table[:width]})
    if len(blocks) >= width:
        tables = [draws.random.sample(blocks, width) + table[width:] for table in tables]
    lengths[1:] = [
        draws.random.randint(max(count, 1), max(count, length, 1))
        for count, length in zip(counts[1:], lengths[1:], strict=True)
    ]
    given["block_tables"] = draws.integers(tables, torch.int32)
    given["context_lens"] = draws.integers(lengths, torch.int32)
    _fill(draws, kv, scales, draws.integers(blocks))
    last = {(tables[s][(length - 1) // size], (length - 1) % size) for s, length in enumerate(lengths) if length}
    block, slot = draws.integers(sorted(last)).unbind(1)
    values = kv if scales is None else scales
    values[block, :, -1, slot] = (values[block, :, -1, slot].float() * LAST).to(values.dtype)
    if given["kind"].window is not None:  # which kernels take when they run: shorter than the contexts
        given["kind"] = replace(given["kind"], window=max(1, min(given["kind"].window, max(lengths) * 2 // 3)))
    return True


def _of_queries(given: Arguments) -> float:
    """Return the size of queries whose scores have a standard deviation of 1."""
    return float(1 / (given["scale"] * math.sqrt(given["q"].shape[2])))


def _chosen_arguments(draws: SeededDraws, given: Arguments) -> bool:
    """Draw queries, and places anywhere in the pool's first blocks."""
    for key in ("q", "places", "numbers", "out"):
        given[key] = given[key][:_CHOSEN_ROWS]
    given["q"] = draws.normal(given["q"], _of_queries(given))
    (rows, most), kv = given["places"].shape, given["kv"]
    blocks = min(len(kv), -(-2 * most // kv.shape[3]))
    slots = blocks * kv.shape[3]
    most = min(most, slots)
    _fill(draws, kv, given["scales"], torch.arange(blocks, device=draws.device))
    given["places"] = given["places"].clone()
    given["places"][:, :most] = draws.integers([draws.random.sample(range(slots), most) for _ in range(rows)])
    numbers = [most, *(draws.random.randint(1, most) for _ in range(rows - 1))]
    given["numbers"] = draws.integers(numbers, torch.int32)
    return True


def _fill(draws: SeededDraws, kv: Tensor, scales: Tensor | None, blocks: Tensor) -> None:
    """Write normal numbers to blocks of the pool."""
    numbers = draws.normal(torch.empty((len(blocks), *kv.shape[1:]), device=kv.device))
    if scales is None:
        kv[blocks] = numbers.to(kv.dtype)
        return
    uneven = torch.rand((len(blocks), *scales.shape[1:]), generator=draws.generator, device=kv.device) + 0.5
    factors = uneven * 4 / reference.QUANTIZED_MAX[kv.dtype]
    kv[blocks] = reference.to_stored(numbers / factors[..., None], kv.dtype)
    scales[blocks] = factors


def _written_arguments(draws: SeededDraws, given: Arguments) -> bool:
    """Give each row a slot of its own in the blocks that rows are written to; rows beyond have none."""
    if given.get("angles") is not None:
        turns = [draws.normal(each) for each in given["angles"]]
        given["angles"] = turns[0].cos(), turns[1].sin()
    if (norms := given.get("norms")) is not None:  # beside a far larger weight, rounding would look like an error
        weights = norms.q_weight, norms.k_weight
        near_1 = [None if weight is None else draws.normal(weight, 0.25) + 1 for weight in weights]
        given["norms"] = replace(norms, q_weight=near_1[0], k_weight=near_1[1])
    kv, ids = given["kv"], given["block_ids"]
    if kv is None:
        return True
    slots = (int(ids.max()) + 1) * kv.shape[3] if len(ids) else 0
    taken = draws.random.sample(range(slots), min(len(ids), slots))
    rest = len(ids) - len(taken)
    given["block_ids"] = draws.integers([slot // kv.shape[3] for slot in taken] + [-1] * rest)
    given["offsets"] = draws.integers([slot % kv.shape[3] for slot in taken] + [0] * rest)
    return True


def _copied_arguments(draws: SeededDraws, given: Arguments) -> bool:
    given["source"], given["target"] = given["source"][:_COPIED], given["target"][:_COPIED]
    pool = given["pool"]
    numbers = pool[:, given["source"]].view(torch.uint8)
    pool[:, given["source"]] = torch.randint_like(numbers, 0, 100).view(pool.dtype)  # no number is NaN
    return True


def _rows_of_experts(draws: SeededDraws, given: Arguments) -> bool:
    """Give experts any number of rows."""
    rows = len(given["out"])
    cuts = sorted(draws.random.randint(0, rows) for _ in range(len(given["weights"].matrices) - 1))
    given["starts"] = draws.integers([0, *cuts, rows])
    if given["tokens"] is not None:
        given["tokens"] = draws.integers([draws.random.randrange(len(given["x"])) for _ in range(rows)])
    return True


def _places_of_rows(draws: SeededDraws, given: Arguments) -> bool:
    places = given["places"]
    taken = draws.random.sample(range(len(given["results"])), places.numel())
    given["places"] = draws.integers(taken).view(places.shape)
    return True


_PREPARED: dict[str, Callable[[SeededDraws, Arguments], bool]] = {
    "add_weighted": _places_of_rows,
    "chosen_attention": _chosen_arguments,
    "copy_blocks": _copied_arguments,
    "expert_linear": _rows_of_experts,
    "norm_rope_write": _written_arguments,
    "prefill_attention": attention_arguments,
    "write_kv": _written_arguments,
}
