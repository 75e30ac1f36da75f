"""Draws tokens from logits by the rule that makes a seed a token. All rows at once, and no sort of the vocabulary.

The rule, for one row. The weight of a token is exp(logit / temperature - the greatest of these). Of all tokens, top-k
keeps the k of highest weight, top-p of those the first, in the order of falling weight, before which less than p of
their sum lies, and min-p those whose weight is at least p of the highest. Equal weights count in order of the token.
Then the kept weights are summed up **in order of the token**, and the one is chosen at which the sum passes u times the
whole sum; u in [0, 1) belongs to the seed and the output position (`moonpool.model.sampler.uniform`).

Weights are float32, sums float64. This is the reference of the native sampler (`kernels/native/sample.cpp`), which
gives the same weights and sums to the bit: an exponential is a few products and sums, each rounded, and a sum has one
order. It also runs where there is no native code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moonpool.model.likely import RUN, in_runs, runs_of
from moonpool.sampling import SamplingParams

_SHIFT = 16
_BUCKETS = (0x3F800000 >> _SHIFT) + 1
"""Weights lie in [0, 1], and the bits of such floats have their order: a bucket is a range of upper bits."""
_LOG2_E = 1.4426950408889634
_LEAST_POWER = -126.0
"""Of two: what is less is 0."""
_ROUNDING = 12582912.0
"""1.5 * 2^23: a float of some size that this is added to loses its fraction."""
_POWER_OF_2 = (1.537070260e-4, 1.339984826e-3, 9.618373259e-3, 5.550329035e-2, 2.402264846e-1, 6.931472056e-1, 1.0)
"""A polynomial for 2^x in [-0.5, 0.5], highest power first; 1e-7 relative."""
_ROWS = 4
"""Rows that are weighed together on a CPU: what is between the first and the last operation stays in its caches."""
_LANES = 16
"""A run's weights are summed up in so many sums, one for each token modulo this, which are then halved down to one."""


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]) -> list[list[int]]:
    """Choose tokens of each row of `logits` [R, vocab] float32: one for each of the row's `numbers` in [0, 1).

    Every row has a finite highest logit.
    """
    vocab, device = logits.shape[1], logits.device
    weights = weights_of(logits, torch.tensor([scale_of(it) for it in params], device=device))
    top_k = {row: it.top_k for row, it in enumerate(params) if 0 < it.top_k < vocab}
    top_p = {row: it.top_p for row, it in enumerate(params) if it.top_p < 1}
    if top_k:
        counts = torch.tensor(list(top_k.values()), device=device)
        _on_rows(weights, list(top_k), partial(_keep_top_k, counts=counts))
    if top_p:
        shares = torch.tensor(list(top_p.values()), dtype=torch.float64, device=device)
        _on_rows(weights, list(top_p), partial(_keep_top_p, shares=shares))
    if any(it.min_p for it in params):
        weights.masked_fill_(weights < torch.tensor([it.min_p for it in params], device=device)[:, None], 0)
    sizes = [len(its) for its in numbers]
    rows = torch.arange(len(params)).repeat_interleave(torch.tensor(sizes)).to(device)
    flat = torch.tensor([number for its in numbers for number in its], dtype=torch.float64, device=device)
    return [tokens.tolist() for tokens in torch.split_with_sizes(_pick(weights, rows, flat).cpu(), sizes)]


def scale_of(params: SamplingParams) -> float:
    """Return what logits are multiplied with to become powers of two."""
    return _LOG2_E / params.temperature


def weights_of(logits: Tensor, scales: Tensor) -> Tensor:
    """Return 2 ^ (scale * (logit - the row's highest)) of `logits` [R, vocab], in whole runs: 0 behind the vocabulary.

    `scales` [R] float32.
    """
    rows, vocab = logits.shape
    result = logits.new_zeros(rows, runs_of(vocab) * RUN)
    together = _ROWS if logits.device.type == "cpu" else rows
    for row in range(0, rows, together):
        part = slice(row, row + together)
        _weigh(logits[part], scales[part], result[part, :vocab])
    return result


def _weigh(logits: Tensor, scales: Tensor, result: Tensor) -> None:
    """Write the weights of some rows into `result`, which is 0."""
    powers = (logits - logits.amax(-1, keepdim=True)).mul_(scales[:, None])
    dead = ~(powers >= _LEAST_POWER)  # also of minus infinity times 0
    powers.masked_fill_(dead, 0)
    whole = (powers + _ROUNDING).sub_(_ROUNDING)
    powers -= whole
    result += _POWER_OF_2[0]
    for factor in _POWER_OF_2[1:]:
        result.mul_(powers).add_(factor)
    result.view(torch.int32).add_(whole.to(torch.int32) << 23)
    result.masked_fill_(dead, 0)


def _sums_of_runs(runs: Tensor) -> Tensor:
    """Return the sums of `runs` [..., RUN] in float64, in the order that is the same everywhere."""
    sums = runs[..., :_LANES].double()
    for begin in range(_LANES, RUN, _LANES):
        sums += runs[..., begin : begin + _LANES]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _on_rows(weights: Tensor, rows: list[int], keep: Callable[[Tensor], None]) -> None:
    """Let `keep` change some rows in place; without a copy when these are all."""
    part = weights if len(rows) == weights.shape[0] else weights[rows]
    keep(part)
    if part is not weights:
        weights[rows] = part


def _keep_top_k(weights: Tensor, counts: Tensor) -> None:
    """Set all but the highest `counts` [R] weights of each row to 0."""
    highest = in_runs(weights, int(counts.max())).topk(int(counts.max())).values
    least = highest.gather(1, counts[:, None] - 1)
    lower = weights < least
    kept = weights.shape[1] - lower.sum(-1)
    weights.masked_fill_(lower, 0)
    for row in ((kept > counts) & (least[:, 0] > 0)).nonzero().flatten().tolist():  # the last ones are equal
        equal = (weights[row] == least[row]).nonzero().flatten()
        weights[row, equal[len(equal) - int(kept[row] - counts[row]) :]] = 0


def _keep_top_p(weights: Tensor, shares: Tensor) -> None:
    """Set all but the highest weights of each row, up to its share of their sum, to 0."""
    rows = weights.shape[0]
    buckets = weights.view(torch.int32) >> _SHIFT
    places = (buckets + (torch.arange(rows, dtype=torch.int32, device=weights.device) * _BUCKETS)[:, None]).view(-1)
    masses = torch.bincount(places, weights.view(-1).double(), minlength=rows * _BUCKETS).view(rows, _BUCKETS)
    down_to = masses.flip(1).cumsum(1).flip(1)  # the sum of a bucket and those above it
    wanted = shares * down_to[:, 0]
    border = (down_to >= wanted[:, None]).sum(1) - 1  # int64, to look things up with
    level = border.to(torch.int32)[:, None]  # the buckets' type: comparing different ones copies
    above = down_to.gather(1, border[:, None])[:, 0] - masses.gather(1, border[:, None])[:, 0]
    weights.masked_fill_(buckets < level, 0)
    for row in range(rows):
        _keep_within(weights[row], (buckets[row] == level[row]).nonzero().flatten(), above[row], wanted[row])


def _keep_within(weights: Tensor, bucket: Tensor, above: Tensor, wanted: Tensor) -> None:
    """Of one row's tokens in `bucket`, set those to 0 before which, and `above` the bucket, lies what is wanted."""
    ordered = weights[bucket].sort(descending=True, stable=True)
    values = ordered.values.double()
    before = values.cumsum(0) - values + above
    beyond = before >= wanted
    beyond[0] = False  # the first one passes the border; the difference `above` is rounded
    weights[bucket[ordered.indices[beyond]]] = 0


def _pick(weights: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the token of each of `rows` [D] that belongs to its number [D], float64: [D]."""
    runs = weights.view(weights.shape[0], -1, RUN)
    sums = _sums_of_runs(runs).cumsum(-1)[rows]  # [D, runs]
    whole = sums[:, -1]
    goals = torch.minimum(numbers * whole, torch.nextafter(whole, torch.zeros_like(whole)))[:, None]
    run = torch.searchsorted(sums, goals, right=True)
    before = torch.where(run > 0, sums.gather(1, (run - 1).clamp_min(0)), 0.0)
    inside = runs[rows, run[:, 0]].double()
    at = torch.searchsorted(inside.cumsum(-1) + before, goals, right=True)
    last = RUN - 1 - (inside.flip(-1) > 0).int().argmax(-1, keepdim=True)  # rounding may lead past it
    return (run * RUN + torch.minimum(at, last))[:, 0]
