"""Lengths of answers: survival curves (Kaplan and Meier) over tokens, by tenant."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from math import exp, log

from moonpool.base.scheduling.state_machine import digest_of

Stratum = tuple[str, ...]
"""() is all requests, (tenant,) a tenant, (tenant, hint) a tenant's requests that expect about so many tokens."""
HINT_MARK = "~"
"""Before the tokens of a hint."""


def hinted(tenant: str, tokens: int) -> Stratum:
    """Return the stratum of a tenant's requests; `tokens`: what the client expects of the answer, 0 = nothing.

    Hints within a factor of two share a stratum, so that what such answers really become is learnt soon.
    """
    return (tenant, f"{HINT_MARK}{1 << (tokens - 1).bit_length()}") if tokens else (tenant,)


def _length_bounds() -> tuple[int, ...]:
    exact = (2 ** (quarter / 4) for quarter in range(81))
    return tuple(sorted({round(bound) for bound in exact}))


LENGTH_BOUNDS = _length_bounds()
"""The last length of each interval: 1, 2, 3, 4, 5, 6, 7, 8, 10, ... 1,048,576 tokens."""
PRIOR_ANSWERS = 8.0
"""Weight of the parent stratum's probability, in answers."""
LENGTH_WINDOW = 1024
"""Answers after which the counts of a stratum are halved, so that old answers fade."""
MAX_STRATA = 4096
"""Most strata; those that began an answer least recently are forgotten."""
HINT_LEVEL = 2
MIN_LOG_SURVIVAL = -30.0
"""Logarithm of the least probability for outliving an interval: a product of such is still a number."""
CURVE_REFRESH = 32
"""A curve is computed anew after 1 / `CURVE_REFRESH` more answers have ended, at least one."""


class OutputLengthModel:
    """Forecasts of answers' lengths, learnt from those that have ended.

    Args:
        assumed: mean length before any has ended.
    """

    def __init__(self, assumed: int = 256) -> None:
        self._prior = _exponential(assumed)
        self._counts: OrderedDict[Stratum, _LengthCounts] = OrderedDict({(): _LengthCounts()})
        self._running: dict[int, _RunningAnswer] = {}
        self._curves: dict[Stratum, tuple[int, tuple[float, ...]]] = {}

    def __len__(self) -> int:
        """Answers that are followed."""
        return len(self._running)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def begin(self, number: int, stratum: Stratum) -> None:
        """An answer has a first token; an answer that is followed already is fine."""
        if number in self._running:
            return
        self._running[number] = _RunningAnswer(stratum)
        for level in _with_parents(stratum):
            if level not in self._counts:
                self._counts[level] = _LengthCounts()
            self._counts.move_to_end(level)
        while len(self._counts) > MAX_STRATA:
            forgotten, _ = self._counts.popitem(last=False)
            self._curves.pop(forgotten, None)

    def grew(self, number: int, tokens: int) -> None:
        """An answer has `tokens` tokens and goes on, as far as is known; unknown numbers are fine."""
        running = self._running.get(number)
        if running is None or tokens <= LENGTH_BOUNDS[running.interval]:
            return
        reached = min(bisect_left(LENGTH_BOUNDS, tokens), len(LENGTH_BOUNDS) - 1)
        for counts in self._of(running.stratum):
            for interval in range(running.interval, reached):
                counts.outlived[interval] += 1.0
        running.interval = reached

    def ended(self, number: int, tokens: int) -> None:
        """An answer has ended normally after `tokens` tokens; unknown numbers are fine."""
        self.grew(number, tokens)
        running = self._running.pop(number, None)
        if running is not None:
            for counts in self._of(running.stratum):
                counts.end(running.interval)

    def removed(self, number: int) -> None:
        """An answer was cut off or given up, so the full length is unknown; unknown numbers are fine."""
        self._running.pop(number, None)

    def _of(self, stratum: Stratum) -> list[_LengthCounts]:
        return [self._counts[level] for level in _with_parents(stratum) if level in self._counts]

    # --- what is expected -------------------------------------------------------------------------------------------

    def outlives(self, stratum: Stratum, tokens: float, so_far: float = 0.0) -> float:
        """Return the probability that an answer that has more than `so_far` tokens has more than `tokens`."""
        curve = self._curve(stratum)
        return exp(min(_curve_at(curve, tokens) - _curve_at(curve, so_far), 0.0))

    def _curve(self, stratum: Stratum) -> tuple[float, ...]:
        """Return logarithm of the probability for outliving each bound, and 0 before the first."""
        hint = _hint(stratum)
        while stratum not in self._counts and not (hint and len(stratum) == HINT_LEVEL):
            stratum = stratum[:-1]
        total = self._counts[()].total
        known = self._curves.get(stratum)
        if known is not None and total - known[0] < max(1, known[0] // CURVE_REFRESH):
            return known[1]
        steps = self._prior
        for level in reversed(_with_parents(stratum)):
            steps = _exponential(hint) if hint and len(level) == HINT_LEVEL else steps
            steps = self._steps(level, steps) if level in self._counts else steps
        curve, height = [0.0], 0.0
        for step in steps:
            height += step
            curve.append(height)
        if stratum in self._counts:
            self._curves[stratum] = total, tuple(curve)
        return tuple(curve)

    def _steps(self, stratum: Stratum, parent: tuple[float, ...]) -> tuple[float, ...]:
        """Return the logarithms of the probabilities for outliving each interval, once reached."""
        counts = self._counts[stratum]
        three = zip(counts.ended, counts.outlived, parent, strict=True)
        return tuple(
            [
                log((outlived + PRIOR_ANSWERS * exp(above)) / (ended + outlived + PRIOR_ANSWERS))
                for ended, outlived, above in three
            ]
        )

    def digest(self) -> bytes:
        return digest_of(self._counts, self._running, self._curves)

    def check_invariants(self) -> None:
        """Assert that the root stratum is the sum of all tenants, as long as none was forgotten or has faded."""
        root = self._counts[()]
        assert all(count >= 0.0 for count in (*root.ended, *root.outlived))
        if root.total < LENGTH_WINDOW and len(self._counts) < MAX_STRATA:
            tenants = [counts for stratum, counts in self._counts.items() if len(stratum) == 1]
            assert root.total == sum(counts.total for counts in tenants)
        assert set(self._curves) <= set(self._counts)
        assert len(self._counts) <= MAX_STRATA


@dataclass(slots=True)
class _LengthCounts:
    """Answers by interval; `total`: all that have ended."""

    ended: list[float] = field(default_factory=lambda: [0.0] * len(LENGTH_BOUNDS))
    outlived: list[float] = field(default_factory=lambda: [0.0] * len(LENGTH_BOUNDS))
    total: int = 0
    recent: float = 0.0

    def end(self, interval: int) -> None:
        self.ended[interval] += 1.0
        self.total += 1
        self.recent += 1.0
        if self.recent >= LENGTH_WINDOW:
            self.recent /= 2
            self.ended = [count / 2 for count in self.ended]
            self.outlived = [count / 2 for count in self.outlived]


@dataclass(slots=True)
class _RunningAnswer:
    stratum: Stratum
    interval: int = 0


def _exponential(mean: int) -> tuple[float, ...]:
    """Return the logarithms of the probabilities for outliving each interval, of lengths with this mean."""
    widths = [bound - before for before, bound in zip((0, *LENGTH_BOUNDS), LENGTH_BOUNDS, strict=False)]
    return tuple([max(-width / mean, MIN_LOG_SURVIVAL) for width in widths])


def _hint(stratum: Stratum) -> int:
    """Return the tokens that a stratum's requests expect; 0 = they expect nothing."""
    named = stratum[1] if len(stratum) == HINT_LEVEL else ""
    return int(named.removeprefix(HINT_MARK)) if named.startswith(HINT_MARK) else 0


def _with_parents(stratum: Stratum) -> list[Stratum]:
    """Return the stratum and all parents, up to the root."""
    return [stratum[:length] for length in range(len(stratum), -1, -1)]


def _curve_at(curve: tuple[float, ...], tokens: float) -> float:
    """Return the curve between two borders: straight in the logarithm."""
    if tokens <= 0.0:
        return 0.0
    place = bisect_left(LENGTH_BOUNDS, tokens)
    if place >= len(LENGTH_BOUNDS):
        return curve[-1]
    before = LENGTH_BOUNDS[place - 1] if place else 0
    share = (tokens - before) / (LENGTH_BOUNDS[place] - before)
    return curve[place] + share * (curve[place + 1] - curve[place])
