"""Corrects an instance's speeds by measured durations, with running ratios of measured to predicted seconds."""

from __future__ import annotations

from dataclasses import replace

from moonpool.cost.predict import decode_step_seconds, prefill_seconds
from moonpool.cost.speeds import DEFAULT_BYTES_PER_S, Speeds

MAX_RATIO = 20.0
"""One observation moves a factor as if it were at most this many times slower or faster than predicted."""


class SpeedTracker:
    """Speeds that follow measurements: an exponentially weighted mean of measured over predicted.

    Prefill and decode keep one factor each over all their coefficients, so that their shape (fixed, per token, per
    pair) stays the one measured at start; rates of loading and sending are followed directly.
    """

    def __init__(self, base: Speeds, *, weight: float = 0.2) -> None:
        """Start from `base`; each observation has `weight` in (0, 1]."""
        if not 0.0 < weight <= 1.0:
            raise ValueError("weight must be in (0, 1]")
        self._weight = weight
        self._base = base
        self._prefill_factor = 1.0
        self._decode_factor = 1.0
        self._speeds: Speeds | None = None  # computed when they are asked for

    @property
    def base(self) -> Speeds:
        """The speeds without correction of prefill and decode, with the rates measured so far."""
        return self._base

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds."""
        if self._speeds is None:
            self._speeds = self._base.slowed_prefill(self._prefill_factor).slowed_decode(self._decode_factor)
        return self._speeds

    def rebase(self, base: Speeds) -> None:
        """Replace the base. The factors stay: what was learnt over the old base is true until it is measured anew."""
        self._base, self._speeds = base, None

    def observe_prefill(
        self, new_tokens: int, prefix_tokens: int, seconds: float, *, steps: int = 1, begins: bool = True
    ) -> None:
        """Learn that computing took `seconds`; arguments as in `prefill_seconds`."""
        predicted = prefill_seconds(self._base, new_tokens, prefix_tokens, steps=steps, begins=begins)
        self._prefill_factor = self._corrected(self._prefill_factor, predicted, seconds, self._weight)
        self._speeds = None

    def observe_decode(self, sequences: int, context_tokens: float, seconds: float, *, steps: int = 1) -> None:
        """Learn that decode steps took `seconds` each on the average, over so much context on the average."""
        predicted = decode_step_seconds(self._base, sequences, context_tokens)
        weight = 1.0 - (1.0 - self._weight) ** steps
        self._decode_factor = self._corrected(self._decode_factor, predicted, seconds, weight)
        self._speeds = None

    def observe_load(self, nbytes: int, seconds: float) -> None:
        """Learn that reading `nbytes` from the store took `seconds`."""
        rate = self._rate(self._base.load_bytes_per_s, nbytes, seconds)
        self.rebase(replace(self._base, load_bytes_per_s=rate))

    def observe_transfer(self, nbytes: int, seconds: float) -> None:
        """Learn that sending `nbytes` to decode took `seconds`."""
        rate = self._rate(self._base.transfer_bytes_per_s, nbytes, seconds)
        self.rebase(replace(self._base, transfer_bytes_per_s=rate))

    def _corrected(self, factor: float, predicted: float, measured: float, weight: float) -> float:
        if predicted <= 0.0 or measured <= 0.0:
            return factor
        ratio = min(max(measured / predicted, factor / MAX_RATIO), factor * MAX_RATIO)
        return factor + weight * (ratio - factor)

    def _rate(self, rate: float, nbytes: int, seconds: float) -> float:
        """Mean of seconds per byte, not of bytes per second: one very quick sample must not hide slow ones."""
        if nbytes <= 0 or seconds <= 0.0:
            return rate
        known = rate or DEFAULT_BYTES_PER_S
        measured = min(max(nbytes / seconds, known / MAX_RATIO), known * MAX_RATIO)
        return 1.0 / ((1.0 - self._weight) / known + self._weight / measured)
