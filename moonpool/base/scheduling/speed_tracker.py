"""Speeds of an instance, corrected by what its steps and copies took."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.base.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    Speeds,
    attention_pairs,
    decode_step_seconds,
    prefill_seconds,
)
from moonpool.base.scheduling.regression import Regression

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
        self._encode_s, self._rows_s = base.encode_per_token_s, base.rows_per_token_s
        chunk_s = prefill_seconds(base, TYPICAL_CHUNK, 0)
        grows = base.prefill_per_token_s, base.prefill_per_pair_s, base.prefill_per_context_token_s
        self._prefill = Regression(
            (base.prefill_base_s, *grows, 1.0),
            (FIXED_SPREAD * chunk_s, *(OWN_SPREAD * rate for rate in grows), OWN_SPREAD),
            common=COMMON_SPREAD,
            drift=PREFILL_DRIFT,
        )
        batch_s = decode_step_seconds(base, TYPICAL_BATCH, TYPICAL_CONTEXT)
        decode_grows = base.decode_per_sequence_s, base.decode_per_context_token_s
        self._decode = Regression(
            (base.decode_base_s, *decode_grows),
            (FIXED_SPREAD * batch_s, *(OWN_SPREAD * rate for rate in decode_grows)),
            common=COMMON_SPREAD,
        )
        self._speeds: Speeds | None = base  # None: computed when they are asked for

    @property
    def speeds(self) -> Speeds:
        if self._speeds is None:
            base_s, per_token_s, per_pair_s, context_s, once = self._prefill.coefficients
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
                self._encode_s,
                self._rows_s,
                context_s,
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
        base, tokens, pairs, context, once_s = self._base, 0, 0, 0, 0.0
        share = max(share, LEAST_CORE_SHARE)
        for new, prefix, begins in chunks:
            tokens += new
            pairs += attention_pairs(new, prefix)
            context += prefix
            once_s += base.prefill_per_prompt_s + base.prefill_per_cached_token_s * prefix if begins else 0.0
        self._prefill.observe((1.0, tokens / share, pairs / share, context / share, once_s / share), seconds, known_s)
        self._speeds = None

    def observe_decode(self, sequences: int, context_tokens: int, seconds: float) -> None:
        """Learn that one decode step took `seconds`."""
        self._decode.observe((1.0, sequences, context_tokens), seconds)
        self._speeds = None

    def observe_encode(self, tokens: int, seconds: float) -> None:
        """Learn that encoding pictures of so many tokens took `seconds`."""
        measured = seconds / tokens
        self._encode_s += (self._weight if self._encode_s else 1.0) * (measured - self._encode_s)
        self._speeds = None

    def observe_rows(self, tokens: int, seconds: float) -> None:
        """Learn that reading the rows of pictures of so many tokens from kvstores took `seconds`."""
        self._rows_s += (self._weight if self._rows_s else 1.0) * (seconds / tokens - self._rows_s)
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
