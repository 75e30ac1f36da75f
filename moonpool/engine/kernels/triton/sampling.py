# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sampler's operations over a whole vocabulary: weights, the leading tokens of a row, and a draw.

`moonpool.engine.sampling.random_sampler` and `moonpool.engine.sampling.ops` have the contracts. Weights and sums are
theirs to the
bit: no operations are fused into one rounding, and running sums are added in order. Only the masses by which top-k and
top-p find their threshold are added in another order, in float64.

In torch the same takes about a hundred launches, each of which reads or writes all logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton.tiles import padded

#: Weights that are summed up first, in LANES sums that are then halved down to one.
RUN, _LANES = 128, 16
_RUNS = 32  # that one program sums up
_WEIGHED = 2048  # tokens per program
_SEARCHED = 4096  # tokens that a program that searches a row looks at together


def weights_of(
    logits: Tensor,  # [R, vocab] float32, contiguous
    peaks: Tensor,  # [R] float32: the highest logit of each row
    scales: Tensor,  # [R] float32
    weights: Tensor,  # [R, n] float32, contiguous, n >= vocab
) -> None:
    """Write 2 ^ (scale * (logit - peak)); 0 behind the vocabulary, and where that is below 2 ^ -126."""
    rows, width = weights.shape
    if rows:
        _weigh[rows, -(-width // _WEIGHED)](
            logits, peaks, scales, weights, logits.shape[1], width, BLOCK=_WEIGHED, enable_fp_fusion=False
        )


def keep_leading(
    weights: Tensor,  # [R, n] float32 in [0, 1], contiguous
    goals: Tensor,  # [R] float64, contiguous
    *,
    by_weight: bool,
) -> None:
    """Set all but each row's highest weights to 0: `goals` tokens, or as many as reach that share of the sum.

    Of equal weights the first are kept; at least one weight is.
    """
    rows, size = weights.shape
    if rows:
        block = min(_SEARCHED, padded(size))
        _keep_leading[(rows,)](
            weights, goals, size, BY_WEIGHT=by_weight, BLOCK=block, enable_fp_fusion=False, num_warps=8
        )


def pick(
    weights: Tensor,  # [R, n] float32, contiguous, n a multiple of RUN
    rows: Tensor,  # [D] int64: the row of each draw
    numbers: Tensor,  # [D] float64 in [0, 1)
) -> Tensor:
    """Return each draw's token, int64 [D]: the first at which the running sum passes number times the whole sum."""
    count, runs = weights.shape[0], weights.shape[1] // RUN
    tokens = torch.empty_like(rows)
    if len(rows):
        sums = torch.empty((count, runs), dtype=torch.float64, device=weights.device)
        _sum_runs[count, -(-runs // _RUNS)](
            weights, sums, runs, RUN=RUN, LANES=_LANES, RUNS=_RUNS, enable_fp_fusion=False
        )
        _pick[(len(rows),)](weights, sums, rows, numbers, tokens, runs, RUN=RUN, enable_fp_fusion=False, num_warps=1)
    return tokens


@triton.jit(do_not_specialize=("vocab", "width"))
def _weigh(logits, peaks, scales, weights, vocab, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    power = (logit - tl.load(peaks + row)) * tl.load(scales + row)
    alive = power >= -126.0  # not so of minus infinity times 0
    power = tl.where(alive, power, 0.0)
    whole = (power + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum loses the fraction
    power -= whole
    # 2 ^ power in [-0.5, 0.5]; each product and each sum is rounded.
    value = power * 1.537070260e-4 + 1.339984826e-3
    value = value * power + 9.618373259e-3
    value = value * power + 5.550329035e-2
    value = value * power + 2.402264846e-1
    value = value * power + 6.931472056e-1
    value = value * power + 1.0
    bits = value.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)
    value = tl.where(alive, bits.to(tl.float32, bitcast=True), 0.0)
    tl.store(weights + row * width + at, value, mask=at < width)


@triton.jit(do_not_specialize=("runs",))
def _sum_runs(weights, sums, runs, RUN: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    at = weights + (row * runs + run)[:, None] * RUN + tl.arange(0, LANES)[None, :]
    mask = (run < runs)[:, None]
    total = tl.zeros((RUNS, LANES), tl.float64)
    for begin in tl.static_range(0, RUN, LANES):
        total += tl.load(at + begin, mask=mask, other=0.0).to(tl.float64)
    total = tl.sum(tl.reshape(total, (RUNS, 2, 8)), 1)  # halves are added, then their halves
    total = tl.sum(tl.reshape(total, (RUNS, 2, 4)), 1)
    total = tl.sum(tl.reshape(total, (RUNS, 2, 2)), 1)
    total = tl.sum(total, 1)
    tl.store(sums + row * runs + run, total, mask=run < runs)


@triton.jit(do_not_specialize=("runs",))
def _pick(weights, sums, rows, numbers, tokens, runs, RUN: tl.constexpr):
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    sums += row * runs
    whole = tl.full((), 0.0, tl.float64)
    for run in range(runs):
        whole += tl.load(sums + run)
    less = (whole.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    goal = tl.minimum(tl.load(numbers + draw) * whole, tl.where(whole > 0, less, whole))
    total = tl.full((), 0.0, tl.float64)
    before = total
    passed = 0
    for run in range(runs):
        total += tl.load(sums + run)
        below = total <= goal
        passed += below.to(tl.int32)
        before = tl.where(below, total, before)
    passed = tl.minimum(passed, runs - 1)
    weights += (row * runs + passed) * RUN
    total = tl.full((), 0.0, tl.float64)
    place = 0
    last = RUN - 1  # rounding may lead past the last weight
    for at in range(RUN):
        weight = tl.load(weights + at).to(tl.float64)
        total += weight
        place += (total + before <= goal).to(tl.int32)
        last = tl.where(weight > 0, at, last)
    tl.store(tokens + draw, (passed * RUN + tl.minimum(place, last)).to(tl.int64))


@triton.jit
def _amounts(bits, BY_WEIGHT: tl.constexpr):
    """What each weight counts for."""
    return bits.to(tl.float32, bitcast=True).to(tl.float64) if BY_WEIGHT else tl.full(bits.shape, 1.0, tl.float64)


@triton.jit(do_not_specialize=("size",))
def _keep_leading(weights, goals, size, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the least kept weight, two bits at a time: these floats have the same order as their bits."""
    row = tl.program_id(0).to(tl.int64)
    words = (weights + row * size).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, BLOCK)
    goal = tl.load(goals + row)
    if BY_WEIGHT:
        whole = tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, size, BLOCK):
            bits = tl.load(words + begin + lanes, mask=begin + lanes < size, other=0)
            whole += _amounts(bits, BY_WEIGHT)
        goal *= tl.sum(whole, 0)
    least = 0
    for digit in range(15):  # weights are at most 1: the two highest bits are 0
        shift = 28 - 2 * digit
        one, two, three = least + (1 << shift), least + (2 << shift), least + (3 << shift)
        from_one = tl.zeros((BLOCK,), tl.float64)
        from_two = tl.zeros((BLOCK,), tl.float64)
        from_three = tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, size, BLOCK):
            bits = tl.load(words + begin + lanes, mask=begin + lanes < size, other=-1)
            amounts = _amounts(bits, BY_WEIGHT)
            from_one += tl.where(bits >= one, amounts, 0.0)
            from_two += tl.where(bits >= two, amounts, 0.0)
            from_three += tl.where(bits >= three, amounts, 0.0)
        if tl.sum(from_three, 0) >= goal:
            least = three
        elif tl.sum(from_two, 0) >= goal:
            least = two
        elif tl.sum(from_one, 0) >= goal:
            least = one
    higher = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, size, BLOCK):
        bits = tl.load(words + begin + lanes, mask=begin + lanes < size, other=-1)
        higher += tl.where(bits > least, _amounts(bits, BY_WEIGHT), 0.0)
    above = tl.sum(higher, 0)
    each = tl.full((), 1.0, tl.float64)
    if BY_WEIGHT:
        each = tl.cast(least, tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    # As many equal ones as there are before which, with what is above, less than the goal lies.
    count = tl.ceil((goal - above) / each)
    count -= (above + (count - 1.0) * each >= goal).to(tl.float64)
    count += (above + count * each < goal).to(tl.float64)
    kept = tl.minimum(tl.maximum(count, 1.0), size).to(tl.int32)
    seen = 0
    for begin in range(0, size, BLOCK):
        inside = begin + lanes < size
        bits = tl.load(words + begin + lanes, mask=inside, other=-1)
        equal = (bits == least).to(tl.int32)
        late = (equal == 1) & (seen + tl.cumsum(equal, 0) > kept)
        tl.store(words + begin + lanes, 0, mask=inside & ((bits < least) | late))
        seen += tl.sum(equal, 0)
