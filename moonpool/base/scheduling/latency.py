"""Latency prediction: seconds of prefill, decode, loading and sending, corrected by measurements.

The prefill formula is the Mooncake paper's polynomial (FAST'25, section 5.2). Seconds grow with computed tokens and
with attended pairs, plus a fixed cost per prompt and a cost per cached prefix token. A robust Kalman filter corrects
each coefficient. No torch, no clock, no transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, log
from operator import mul
from typing import NamedTuple

from moonpool.base.frozen import frozen

DEFAULT_BYTES_PER_S = 1e9
"""Rate assumed for loading or sending KV before any measurement, bytes per second."""


@frozen
class Speeds:
    """One instance's speeds, measured or given by a profile; field for field the contract's `SpeedReport`.

    `moonpool.base.cluster.proto_conversion` translates. All times are seconds, all rates bytes per second. A rate of 0
    means
    "not measured"; then `DEFAULT_BYTES_PER_S` is assumed, and for `peer_bytes_per_s` the rate for loading from stores.
    `prefill_base_s` is counted per engine step, `prefill_per_prompt_s` per prompt, `prefill_per_cached_token_s` per
    prompt and cached prefix token.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    decode_base_s: float = 0.0
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0
    load_bytes_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    prefill_per_prompt_s: float = 0.0
    prefill_per_cached_token_s: float = 0.0
    peer_bytes_per_s: float = 0.0

    def loading_from_peers(self) -> Speeds:
        """Return these speeds with the peers' read rate as the rate for loading, if that rate is known."""
        return replace(self, load_bytes_per_s=self.peer_bytes_per_s) if self.peer_bytes_per_s else self

    def slowed_prefill(self, factor: float, *, fixed_factor: float | None = None) -> Speeds:
        """Return these speeds with all prefill seconds multiplied by `factor`.

        `fixed_factor` multiplies a step's fixed seconds instead; None = as for the others.
        """
        return Speeds(  # several times as quick as `replace`, and done for each report
            self.prefill_base_s * (factor if fixed_factor is None else fixed_factor),
            self.prefill_per_token_s * factor,
            self.prefill_per_pair_s * factor,
            self.decode_base_s,
            self.decode_per_sequence_s,
            self.decode_per_context_token_s,
            self.load_bytes_per_s,
            self.transfer_bytes_per_s,
            self.prefill_per_prompt_s * factor,
            self.prefill_per_cached_token_s * factor,
            self.peer_bytes_per_s,
        )

    def slowed_decode(self, factor: float) -> Speeds:
        """Return these speeds with all decode seconds multiplied by `factor`."""
        return replace(
            self,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
            decode_per_context_token_s=self.decode_per_context_token_s * factor,
        )


class PrefillWork(NamedTuple):
    """Work that a prompt still needs: steps, tokens, pairs (as in `attention_pairs`), prefix tokens."""

    steps: int
    new_tokens: int
    pairs: int
    prefix_tokens: int


def attention_pairs(new_tokens: int, prefix_tokens: int) -> int:
    """Number of (computed token, attended token) pairs for `new_tokens` after `prefix_tokens`, causal."""
    return new_tokens * prefix_tokens + new_tokens * (new_tokens + 1) // 2


def work_of(new_tokens: int, prefix_tokens: int, steps: int = 1) -> PrefillWork:
    """What computing `new_tokens` after `prefix_tokens` is."""
    return PrefillWork(steps, new_tokens, attention_pairs(new_tokens, prefix_tokens), prefix_tokens)


def steps_of(tokens: int, max_num_batched_tokens: int) -> int:
    """Steps that `tokens` tokens take; `max_num_batched_tokens` 0 = all in one step."""
    return -(-tokens // max_num_batched_tokens) if max_num_batched_tokens else 1


def prompt_work(tokens: int, prefix_tokens: int, max_num_batched_tokens: int) -> PrefillWork:
    """Work that a prompt needs behind a prefix, in steps of `max_num_batched_tokens` at most; 0 = one step."""
    new = tokens - prefix_tokens
    return work_of(new, prefix_tokens, steps_of(new, max_num_batched_tokens))


def prefill_seconds(
    speeds: Speeds, new_tokens: int, prefix_tokens: int, *, steps: int = 1, begins: bool = True
) -> float:
    """Predict the seconds for computing `new_tokens` after `prefix_tokens` tokens.

    Args:
        speeds: the computing instance's speeds.
        new_tokens: tokens to compute; none take no time.
        prefix_tokens: tokens before `new_tokens`, with KV already in the pool.
        steps: engine steps that the computation takes.
        begins: the prompt begins here and the prefix was cached; False for a later chunk of the same prompt.
    """
    if new_tokens <= 0:
        return 0.0
    pairs = attention_pairs(new_tokens, prefix_tokens)
    return work_seconds(speeds, steps, new_tokens, pairs, prefix_tokens, begins=begins)


def work_seconds(
    speeds: Speeds, steps: int, new_tokens: int, pairs: int, prefix_tokens: int, *, begins: bool = True
) -> float:
    """Predict the seconds for a `PrefillWork`; for callers that ask for the same work at several speeds."""
    once = speeds.prefill_per_prompt_s + speeds.prefill_per_cached_token_s * prefix_tokens if begins else 0.0
    return once + (
        steps * speeds.prefill_base_s + speeds.prefill_per_token_s * new_tokens + speeds.prefill_per_pair_s * pairs
    )


def load_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds for reading `nbytes` of KV from the store."""
    return nbytes / (speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S)


def transfer_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds for sending `nbytes` of KV to decode."""
    return nbytes / (speeds.transfer_bytes_per_s or DEFAULT_BYTES_PER_S)


def decode_step_seconds(speeds: Speeds, sequences: float, context_tokens: float) -> float:
    """Predict the seconds for one decode step over `sequences` with `context_tokens` tokens in total."""
    return (
        speeds.decode_base_s
        + speeds.decode_per_sequence_s * sequences
        + speeds.decode_per_context_token_s * context_tokens
    )


def overlapped_seconds(load_s: float, compute_s: float, layers: int) -> float:
    """Seconds for loading and computing if layer l+1 loads while layer l computes.

    The longer hides the shorter, except the shorter's share for one layer.
    """
    shorter, longer = (load_s, compute_s) if load_s < compute_s else (compute_s, load_s)
    return longer + shorter / (layers or 1)


def pipelined_seconds(compute_s: float, *, steps: int, stages: int) -> float:
    """Seconds for `steps` equal steps that take `compute_s` one after the other, if `stages` steps overlap.

    The last step ends after all stages; each other step delays the last step by a single stage. All steps together keep
    the pipeline busy for `compute_s / stages`.
    """
    steps = max(steps, 1)
    return compute_s * (steps + stages - 1) / (steps * stages)


def load_is_cheaper(speeds: Speeds, local: PrefillWork, rest: PrefillWork, *, nbytes: int, layers: int = 1) -> bool:
    """Tell whether loading a longer prefix is predicted to be quicker than computing the prefix.

    Args:
        speeds: speeds at the instance that would load or compute.
        local: the prompt's work behind the prefix in the instance's own pool.
        rest: the prompt's work behind the longer prefix.
        nbytes: bytes of KV to load.
        layers: the model's layers, for overlapping loads with computation; 1 = no overlap.
    """
    load_s = load_seconds(speeds, nbytes)
    return overlapped_seconds(load_s, work_seconds(speeds, *rest), layers) < work_seconds(speeds, *local)


FIRST_NOISE = 0.2
"""Relative noise of a measurement, assumed at first and measured later."""
LEAST_NOISE = 0.03
NOISE_WEIGHT = 0.05
ERROR_GATE = 1.5
"""A measurement counts as if at most this many standard deviations from the prediction."""
LEAST_COEFFICIENT = 0.05
"""No coefficient falls below this share of the first value."""
SHORTEST_S = 1e-9
"""What took less was not measured."""


class Regression:
    """Coefficients for `seconds = sum(coefficient * size)`, none negative, learnt from one measurement after the other.

    Errors count as log(measured / predicted): twice as long and half as long weigh alike, as times have a long tail.
    Errors beyond a gate count as if at the gate, so that the coefficients fit about the median (Huber's estimator).
    Several errors in a row beyond the gate make the filter as uncertain as at the start. If a size does not vary, the
    size's coefficient stays.

    Args:
        coefficients: first values.
        spreads: each coefficient's own uncertainty, as a standard deviation.
        common: uncertainty of a factor that all coefficients have in common. Without either, a coefficient stays.
        change: so many measurements in a row beyond the gate, on one side, are no outliers: the machine has changed.
        drift: variance that each measurement adds to a coefficient, relative to the first value: old measurements fade.
        least_s: errors of shorter predictions are relative to so many seconds, and no logarithms.
    """

    __slots__ = (
        "_change",
        "_common",
        "_covariance",
        "_drift_share",
        "_firsts",
        "_least_s",
        "_leasts",
        "_noise",
        "_spreads",
        "_squares",
        "_streak",
        "coefficients",
    )

    def __init__(
        self,
        coefficients: Sequence[float],
        spreads: Sequence[float],
        *,
        common: float = 0.0,
        change: int = 4,
        drift: float = 5e-4,
        least_s: float = 1e-6,
    ) -> None:
        self.coefficients = self._firsts = tuple(coefficients)
        self._leasts = tuple([LEAST_COEFFICIENT * first for first in self._firsts])
        self._spreads = tuple(spreads)
        self._squares = tuple([spread**2 for spread in self._spreads])
        self._common = common * common
        self._change, self._drift_share = change, drift
        self._least_s = least_s
        self._noise = FIRST_NOISE
        self._streak = 0
        self._covariance = self._fresh()

    def seconds(self, sizes: Sequence[float]) -> float:
        """The prediction."""
        total: float = sum(map(mul, self.coefficients, sizes))
        return total

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self.coefficients, self._noise, self._streak, self._covariance

    def observe(self, sizes: Sequence[float], seconds: float, known_s: float = 0.0) -> None:
        """Learns that work with these sizes took so long. Times and sizes that no measurement gives are left out.

        `known_s`: part of the seconds that other work in the step is predicted to take.
        """
        predicted = known_s + self.seconds(sizes)
        if not (SHORTEST_S <= seconds < inf and predicted < inf):  # also if a value is NaN
            return
        scale = max(predicted, self._least_s)
        shares = [size / scale for size in sizes]
        error = log(seconds / predicted) if predicted >= self._least_s else (seconds - predicted) / scale
        along, variance = self._along(shares)
        limit = ERROR_GATE * variance**0.5
        if self._changed(error, limit):
            self._covariance = self._fresh()
            along, variance = self._along(shares)
            error = (seconds - predicted) / scale  # by which the coefficients are to grow
        else:
            error = min(max(error, -limit), limit)
        noise = self._noise
        noise += NOISE_WEIGHT * (1.25 * min(abs(error), 3.0 * noise) - noise)
        self._noise = max(noise, LEAST_NOISE)
        self._correct(along, variance, error)

    def _along(self, shares: list[float]) -> tuple[list[float], float]:
        """The coefficients' covariance with the prediction, and the error's variance."""
        along = [sum(map(mul, row, shares)) for row in self._covariance]
        return along, sum(map(mul, along, shares)) + self._noise * self._noise

    def _changed(self, error: float, limit: float) -> bool:
        """Whether this error completes a run of errors on one side."""
        side = 0 if abs(error) <= limit else 1 if error > 0 else -1
        self._streak = self._streak + side if side * self._streak >= 0 and side else side
        if abs(self._streak) < self._change:
            return False
        self._streak = 0
        return True

    def _correct(self, along: list[float], variance: float, error: float) -> None:
        """Moves the coefficients. Old measurements fade, so all become a little more uncertain.

        A coefficient that no measurement reaches becomes no more uncertain than at first.
        """
        gain = [one / variance for one in along]
        moved = [one + error * by for one, by in zip(self.coefficients, gain)]  # noqa: B905 - strict ones take long
        known = self.coefficients = tuple(map(max, self._leasts, moved))
        shared, drift = self._drift_share * self._common, self._drift_share
        covariance, most = self._covariance, self._most()
        for at, by in enumerate(gain):
            fades, cells = shared * known[at], zip(covariance[at], along, known)  # noqa: B905
            covariance[at] = row = [cell - by * other + fades * one for cell, other, one in cells]
            if row[at] < most[at]:
                row[at] += drift * most[at]

    def _most(self) -> list[float]:
        """Each coefficient's largest variance: the first variance, or more for a coefficient that has grown."""
        known = zip(self._spreads, self._squares, self.coefficients, self._firsts, strict=True)
        return [(spread * (one / first)) ** 2 if one > first > 0.0 else square for spread, square, one, first in known]

    def _fresh(self) -> list[list[float]]:
        most, known = self._most(), self.coefficients
        return [
            [self._common * one * other + (most[row] if at == row else 0.0) for at, other in enumerate(known)]
            for row, one in enumerate(known)
        ]


MAX_RATIO = 20.0
"""One observation moves a rate as if at most this many times slower or faster than known."""
COMMON_SPREAD = 0.7
"""Uncertainty in the factor by which a machine is slower or quicker than the base, for all sizes alike."""
OWN_SPREAD = 0.15
"""Each coefficient's own uncertainty beside the common factor, as a share."""
FIXED_SPREAD = 0.25
"""The fixed part is less certain, as work around the engine is not in the base: a share of a typical step."""
PREFILL_DRIFT = 2e-3
"""Of prefill's coefficients: older steps fade."""
LEAST_CORE_SHARE = 0.01
"""Lowest assumed core share for an engine in a step: a thread's time may be counted in ticks, and be 0."""
TYPICAL_CHUNK = 256
TYPICAL_BATCH, TYPICAL_CONTEXT = 4, 2048


class SpeedTracker:
    """Speeds that follow measurements.

    Prefill and decode steps have a regression each (`Regression`), which begins with the base: fixed part, parts that
    grow with tokens, and the fixed cost per prompt. So what the machine does beside the engine's work goes to the fixed
    part. Rates for loading and sending are followed directly.
    """

    def __init__(self, base: Speeds, *, weight: float = 0.2) -> None:
        """Start from `base`; each observation of a rate has `weight` in (0, 1]."""
        if not 0.0 < weight <= 1.0:
            raise ValueError("weight must be in (0, 1]")
        self._weight = weight
        self._base = base
        self._load_rate, self._transfer_rate = base.load_bytes_per_s, base.transfer_bytes_per_s
        self._peer_rate = base.peer_bytes_per_s
        chunk_s = prefill_seconds(base, TYPICAL_CHUNK, 0)
        grows = base.prefill_per_token_s, base.prefill_per_pair_s
        self._prefill = Regression(
            (base.prefill_base_s, *grows, 1.0),
            (FIXED_SPREAD * chunk_s, *(OWN_SPREAD * one for one in grows), OWN_SPREAD),
            common=COMMON_SPREAD,
            drift=PREFILL_DRIFT,
        )
        batch_s = decode_step_seconds(base, TYPICAL_BATCH, TYPICAL_CONTEXT)
        grows = base.decode_per_sequence_s, base.decode_per_context_token_s
        self._decode = Regression(
            (base.decode_base_s, *grows),
            (FIXED_SPREAD * batch_s, *(OWN_SPREAD * one for one in grows)),
            common=COMMON_SPREAD,
        )
        self._speeds: Speeds | None = base  # None: computed when they are asked for

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds."""
        if self._speeds is None:
            base_s, per_token_s, per_pair_s, once = self._prefill.coefficients
            step_s, per_sequence_s, per_context_token_s = self._decode.coefficients
            self._speeds = Speeds(
                base_s,
                per_token_s,
                per_pair_s,
                step_s,
                per_sequence_s,
                per_context_token_s,
                self._load_rate,
                self._transfer_rate,
                self._base.prefill_per_prompt_s * once,
                self._base.prefill_per_cached_token_s * once,
                self._peer_rate,
            )
        return self._speeds

    def observe_prefill(
        self, chunks: Iterable[tuple[int, int, bool]], seconds: float, *, known_s: float = 0.0, share: float = 1.0
    ) -> None:
        """Learn that one prefill step took `seconds`. The speeds stand for all the engine's cores.

        Args:
            chunks: for each chunk in the step: tokens computed, tokens before them, and whether the prompt begins here.
            seconds: measured.
            known_s: part that something else in the step is predicted to take, seconds.
            share: core share that the engine had: growing parts took so much longer.
        """
        base, tokens, pairs, once_s, share = self._base, 0, 0, 0.0, max(share, LEAST_CORE_SHARE)
        for new, prefix, begins in chunks:
            tokens += new
            pairs += attention_pairs(new, prefix)
            once_s += base.prefill_per_prompt_s + base.prefill_per_cached_token_s * prefix if begins else 0.0
        self._prefill.observe((1.0, tokens / share, pairs / share, once_s / share), seconds, known_s)
        self._speeds = None

    def observe_decode(self, sequences: int, context_tokens: int, seconds: float) -> None:
        """Learn that one decode step took `seconds`."""
        self._decode.observe((1.0, sequences, context_tokens), seconds)
        self._speeds = None

    def observe_load(self, nbytes: int, seconds: float, *, peer: bool = False) -> None:
        """Learn that reading `nbytes` from the store, or from another engine instance, took `seconds`."""
        if peer:
            known = self._peer_rate or self._load_rate
            self._peer_rate, self._speeds = learnt_rate(known, nbytes, seconds, self._weight), None
        else:
            self._load_rate, self._speeds = learnt_rate(self._load_rate, nbytes, seconds, self._weight), None

    def observe_transfer(self, nbytes: int, seconds: float) -> None:
        """Learn that sending `nbytes` to decode took `seconds`."""
        self._transfer_rate, self._speeds = learnt_rate(self._transfer_rate, nbytes, seconds, self._weight), None


def learnt_rate(rate: float, nbytes: float, seconds: float, weight: float) -> float:
    """A rate in bytes per second (0 = not known) after `nbytes` took `seconds`, which counts with `weight`.

    Averages seconds per byte, not bytes per second: one very quick sample must not hide slow samples.
    """
    if nbytes <= 0 or seconds <= 0.0:
        return rate
    known = rate or DEFAULT_BYTES_PER_S
    measured = min(max(nbytes / seconds, known / MAX_RATIO), known * MAX_RATIO)
    return 1.0 / ((1.0 - weight) / known + weight / measured)
