"""Drawn arguments for the operations of `moonpool.engine.kernels.reference`, in shapes and types of given ones.

For comparisons (`moonpool.engine.kernels.self_check`): numbers, lengths and places are such that results show a key,
row or head that is left out or taken for another. Blocks of the pool that the given arguments name are overwritten.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
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
"""Query heads times keys of a batch that is drawn: more take time, and fewer rows tell as much."""
_MOST_NUMBERS = 1 << 26
"""Of an argument that is drawn; smaller batches take the same kernels."""
_AT_A_TIME = 1 << 24
"""Numbers of the pool that are drawn at a time."""
_DISTINCT, _FAR_HIGHER = 16, 16.0
"""Of an indexer's keys: how many are unlike, so that many sums are equal; and the element that lets a sum be chosen."""
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
        return _alike(torch.empty(like.shape, device=self.device).normal_(generator=self.generator).mul_(size), like)

    def whole(self, like: Tensor, most: int) -> Tensor:
        """Return whole numbers from -`most` to `most` in the shape, strides and type of `like`."""
        drawn = torch.empty(like.shape, device=self.device).random_(-most, most + 1, generator=self.generator)
        return _alike(drawn, like)

    def integers(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return whole numbers on the device."""
        return torch.tensor(values, dtype=dtype).to(self.device)


def _alike(numbers: Tensor, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=numbers.device).copy_(numbers)


def drawn(draws: SeededDraws, name: str, given: Mapping[str, Any]) -> Arguments | None:
    """Return arguments for the operation `name` as those `given`; None: the batch is too large."""
    found = _of_fewer_rows(given) if "query_start" in given else dict(given)
    numbers = {key: value for key, value in found.items() if key in _NUMBERS and value is not None}
    if any(value.numel() > _MOST_NUMBERS for value in numbers.values()):
        return None
    found |= {key: draws.normal(value) for key, value in numbers.items()}
    if (prepare := _PREPARED.get(name)) is not None:
        prepare(draws, found)
    return found


def _of_fewer_rows(given: Mapping[str, Any]) -> Arguments:
    """Return arguments for the first rows, as many as `_MOST_SCORES` lets there be, at least one."""
    starts, lengths, left = given["query_start"].tolist(), given["context_lens"].tolist(), _MOST_SCORES
    rows = 0
    for count, length in zip((end - begin for begin, end in pairwise(starts)), lengths, strict=True):
        scores = max(length, 1) * given["q"].shape[1]
        fitting = min(count, left // scores)
        rows, left = rows + fitting, left - fitting * scores
        if fitting < count:
            break
    if rows == starts[-1]:
        return dict(given)
    rows = max(rows, 1)
    own = {key: given[key][:rows] for key in ("q", "weights", "places", "numbers", "out") if key in given}
    counted = {"singles": None} if "singles" in given else {}
    return {**given, **own, **counted, "query_start": given["query_start"].clamp_max(rows)}


def attention_arguments(draws: SeededDraws, given: Arguments) -> None:
    """Draw queries, lengths, tables and the pool's blocks."""
    kv, scales = given["kv"], given["scales"]
    given["q"] = draws.normal(given["q"], _of_queries(given))
    last = _sequences(draws, given, partial(_fill, draws, kv, scales))
    block, slot = draws.integers(last).unbind(1)
    values = kv if scales is None else scales
    values[block, :, -1, slot] = (values[block, :, -1, slot].float() * LAST).to(values.dtype)
    if given["kind"].window is not None:  # which kernels take when they run: shorter than the contexts
        longest = int(given["context_lens"].max())
        given["kind"] = replace(given["kind"], window=max(1, min(given["kind"].window, longest * 2 // 3)))


def _sequences(
    draws: SeededDraws, given: Arguments, fill: Callable[[Tensor], None], behind: int = 0
) -> list[tuple[int, int]]:
    """Draw lengths and tables, and fill the blocks that tables name.

    Returns:
        Block and slot of each sequence's last token, and of so many tokens behind where the blocks go on.
    """
    counts = [end - begin for begin, end in pairwise(given["query_start"].tolist())]
    size, lengths = given["kv"].shape[3], given["context_lens"].tolist()
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
    for some in torch.split(draws.integers(blocks), max(1, _AT_A_TIME // given["kv"][0].numel())):
        fill(some)
    ends = [(s, token) for s, length in enumerate(lengths) if length for token in range(length - 1, length + behind)]
    return sorted({(tables[s][token // size], token % size) for s, token in ends if token < width * size})


def _of_queries(given: Arguments) -> float:
    """Return the size of queries whose scores have a standard deviation of 1."""
    return float(1 / (given["scale"] * math.sqrt(given["q"].shape[2])))


def _choice_arguments(draws: SeededDraws, given: Arguments) -> None:
    """Draw small whole numbers: sums are exact, and many are equal.

    Where a context ends, the last key and the one behind have sums far above others: a row that loses the last, or sees
    the next, chooses otherwise.
    """
    q, kv, scales = given["q"], given["kv"], given["scales"]
    unlike = draws.whole(torch.empty((_DISTINCT, kv.shape[4]), device=kv.device), 3)
    unlike[:, 0] = 0.0

    def fill(blocks: Tensor) -> None:
        which = draws.whole(torch.empty((len(blocks), *kv.shape[1:4]), device=kv.device), _DISTINCT).long()
        kv[blocks] = unlike[which % _DISTINCT].to(kv.dtype)
        if scales is not None:
            scales[blocks] = torch.exp2(draws.whole(scales[blocks], 1))

    given["scale"], given["q"] = 0.25, draws.whole(q, 3)
    given["weights"] = draws.whole(given["weights"], 2)
    given["q"][..., 0], given["weights"][:, 0] = _FAR_HIGHER, 4.0 * q.shape[1]
    block, slot = draws.integers(_sequences(draws, given, fill, behind=1)).unbind(1)
    highest = torch.zeros(kv.shape[4], device=kv.device)
    highest[0] = _FAR_HIGHER
    kv[block, 0, 0, slot] = highest.to(kv.dtype)


def _chosen_arguments(draws: SeededDraws, given: Arguments) -> None:
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


def _written_arguments(draws: SeededDraws, given: Arguments) -> None:
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
        return
    slots = (int(ids.max()) + 1) * kv.shape[3] if len(ids) else 0
    taken = draws.random.sample(range(slots), min(len(ids), slots))
    rest = len(ids) - len(taken)
    given["block_ids"] = draws.integers([slot // kv.shape[3] for slot in taken] + [-1] * rest)
    given["offsets"] = draws.integers([slot % kv.shape[3] for slot in taken] + [0] * rest)


def _copied_arguments(draws: SeededDraws, given: Arguments) -> None:
    given["source"], given["target"] = given["source"][:_COPIED], given["target"][:_COPIED]
    pool = given["pool"]
    numbers = pool[:, given["source"]].view(torch.uint8)
    pool[:, given["source"]] = torch.randint_like(numbers, 0, 100).view(pool.dtype)  # no number is NaN


def _rows_of_experts(draws: SeededDraws, given: Arguments) -> None:
    """Give experts any number of rows."""
    rows = len(given["out"])
    cuts = sorted(draws.random.randint(0, rows) for _ in range(len(given["weights"].matrices) - 1))
    given["starts"] = draws.integers([0, *cuts, rows])
    if given["tokens"] is not None:
        given["tokens"] = draws.integers([draws.random.randrange(len(given["x"])) for _ in range(rows)])


def _places_of_rows(draws: SeededDraws, given: Arguments) -> None:
    places = given["places"]
    taken = draws.random.sample(range(len(given["results"])), places.numel())
    given["places"] = draws.integers(taken).view(places.shape)
    if given["weights"] is not None:
        given["weights"] = draws.normal(given["weights"])


_PREPARED: dict[str, Callable[[SeededDraws, Arguments], None]] = {
    "add_weighted": _places_of_rows,
    "choose_keys": _choice_arguments,
    "chosen_attention": _chosen_arguments,
    "copy_blocks": _copied_arguments,
    "expert_linear": _rows_of_experts,
    "norm_rope_write": _written_arguments,
    "prefill_attention": attention_arguments,
    "write_kv": _written_arguments,
}
