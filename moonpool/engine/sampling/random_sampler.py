"""Draws tokens from logits by seed: temperature and filters, for all rows at once, without a sort.

The rule, for one row. A token's weight is exp((logit - highest logit) / temperature). The filters
(`moonpool.engine.sampling.filters`) drop tokens. The remaining weights are summed **in token order**. The token at
which the sum passes u times the whole sum is chosen. u in [0, 1) belongs to the seed and the output position
(`uniform`).

Weights are float32, sums float64. This is the reference for the native sampler (`kernels/engine/sample.cpp`), which
gives the same weights and sums to the bit. This module never reads a tensor's contents on the host, and no shape
depends on them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.base.sampling_params import SamplingParams
from moonpool.engine.kernels.choice import replaced
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.self_check import SelfCheck
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.sampling.filters import FILTERS
from moonpool.engine.sampling.ops import RUN, keep_top_k, keep_top_p, running_sums, runs_of, triton_sampling

LEAST_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: dividing by them would overflow."""
_LOG2_E = 1.4426950408889634
_LEAST_POWER = -126.0
"""Of two: what is less is 0."""
_ROUNDING = 12582912.0
"""1.5 * 2^23: adding this number removes a moderate float's fraction."""
_POWER_OF_2 = (1.537070260e-4, 1.339984826e-3, 9.618373259e-3, 5.550329035e-2, 2.402264846e-1, 6.931472056e-1, 1.0)
"""A polynomial for 2^x in [-0.5, 0.5], highest power first; 1e-7 relative."""
_ROWS = 4
"""Rows weighed together on a CPU: everything between the first and the last operation stays in the CPU's caches."""
_LANES = 16
"""A run's weights are summed up in this many sums, one for each token modulo this number, which are then halved down to
one.
"""


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) for one output position of a seed.

    A hash over both and 0 (BLAKE2b, 53 bits): counter-based, so without state and order. The native sampler computes
    the hash too (`kernels/engine/draws.cpp`).
    """
    counter = struct.pack("<QQQ", seed & (2**64 - 1), 0, position)
    number = int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"moonpool sample").digest(), "little")
    return (number >> 11) * 2.0**-53


class DrawNumbers:
    """The numbers of some draws (`uniform`), for one output position after the other.

    Args:
        seeds: each draw's.
        positions: each draw's first output position.
    """

    def __init__(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        self._seeds, self._positions = np.array(seeds, np.uint64), np.array(positions, np.uint64)
        self._native = library.get()

    def at(self, later: int) -> NDArray[np.float64]:
        """Return each draw's number, `later` positions after the first."""
        numbers = np.empty(len(self._seeds))
        if self._native is None:
            seeds, positions = self._seeds.tolist(), self._positions.tolist()
            numbers[:] = [uniform(seed, at + later) for seed, at in zip(seeds, positions, strict=True)]
        else:
            addresses = self._seeds.ctypes.data, self._positions.ctypes.data
            self._native.uniform(*addresses, later, len(numbers), numbers.ctypes.data)
        return numbers


class RandomSampler:
    """Draws tokens for some rows. The tensors lie on the logits' device from the first step on.

    Args:
        params: each row's.
        sizes: tokens that each row draws.
        vocab: tokens of the model.
        device: the logits' device.
    """

    def __init__(
        self, params: Sequence[SamplingParams], sizes: Sequence[int], vocab: int, device: torch.device
    ) -> None:
        self._scales = send_to_device(torch.tensor([scale_of(wanted) for wanted in params]), device)
        self._rows = send_to_device(torch.arange(len(params)).repeat_interleave(torch.tensor(sizes)), device)
        filters = (kind.of(params, vocab, device) for kind in FILTERS)
        self._filters = [kept for kept in filters if kept is not None]

    def __call__(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Return each draw's token, int64 [D], from `logits` [R, vocab] float32; each row's highest is finite.

        `numbers` [D] float64: a number in [0, 1) for each draw, row after row.
        """
        weights = weights_of(logits, self._scales)
        for keep in self._filters:
            keep(logits, weights)
        return pick(weights, self._rows, numbers)


def scale_of(params: SamplingParams) -> float:
    """Return what logits are multiplied with to become powers of two."""
    return _LOG2_E / params.temperature


def weights_of(logits: Tensor, scales: Tensor) -> Tensor:
    """Return 2 ^ (scale * (logit - the row's highest)) of `logits` [R, vocab], in whole runs: 0 behind the vocabulary.

    `scales` [R] float32.
    """
    rows, vocab = logits.shape
    fused = triton_sampling(logits.device)
    if fused is not None:
        result = logits.new_empty(rows, runs_of(vocab) * RUN)
        fused.weights_of(logits, logits.amax(-1), scales, result)
        return result
    result = logits.new_zeros(rows, runs_of(vocab) * RUN)
    together = _ROWS if logits.device.type == "cpu" else rows
    for row in range(0, rows, together):
        part = slice(row, row + together)
        _weigh(logits[part], scales[part], result[part, :vocab])
    return result


def _weigh(logits: Tensor, scales: Tensor, result: Tensor) -> None:
    """Write some rows' weights into `result`, which is 0."""
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


def compare(check: SelfCheck, vocab: int) -> None:
    """Compare Triton's weights, filters and draws with torch's, on drawn logits over a vocabulary."""
    device = check.device
    if triton_sampling(device) is None:
        return
    logits = check.draws.normal(torch.empty(4, vocab, device=device), 4.0)
    scales, rows = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device), torch.arange(4, device=device).repeat(4)
    counts = torch.tensor([1.0, 5.0, 50.0, vocab], dtype=torch.float64, device=device)
    shares = torch.tensor([0.5, 0.8, 0.9, 0.99], dtype=torch.float64, device=device)
    numbers = torch.rand(len(rows), dtype=torch.float64, generator=check.draws.generator, device=device)

    def drawn() -> list[Tensor]:
        weights = weights_of(logits, scales)
        few, most = weights.clone(), weights.clone()
        keep_top_k(few, counts)
        keep_top_p(most, shares)
        return [weights, few, most, pick(weights, rows, numbers), pick(most, rows, numbers)]

    def by_torch() -> list[Tensor]:
        with replaced("sampling"):
            return drawn()

    close, equal = (1e-6, 1e-6), (1e-9, 0.0)
    check.compare("sampling", f"{vocab} tokens", drawn, by_torch, [close] * 3 + [equal] * 2)


def pick(weights: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the token for each of `rows` [D] and the row's number [D], float64: [D]."""
    fused = triton_sampling(weights.device)
    if fused is not None:
        return cast("Tensor", fused.pick(weights, rows, numbers))
    runs = weights.view(weights.shape[0], -1, RUN)
    sums = running_sums(_sums_of_runs(runs))[rows]  # [D, runs]
    whole = sums[:, -1]
    goals = torch.minimum(numbers * whole, torch.nextafter(whole, torch.zeros_like(whole)))[:, None]
    run = torch.searchsorted(sums, goals, right=True)
    before = torch.where(run > 0, sums.gather(1, (run - 1).clamp_min(0)), 0.0)
    inside = runs[rows, run[:, 0]].double()
    at = torch.searchsorted(running_sums(inside) + before, goals, right=True)
    last = RUN - 1 - (inside.flip(-1) > 0).int().argmax(-1, keepdim=True)  # rounding may lead past the end
    return (run * RUN + torch.minimum(at, last))[:, 0]
