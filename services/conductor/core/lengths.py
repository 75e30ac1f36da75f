"""How long answers become: survival curves (Kaplan and Meier, 1958) over tokens, by tenant and length of the prompt.

Lengths are grouped in intervals that grow by a quarter octave. Of each interval it is known how many answers ended in
it and how many outlived it. An answer that still runs, that was cut off at its limit or given up counts in the
intervals that it has outlived and in no other: it is *censored*. The probability of outliving an interval is
`outlived / (ended + outlived)`, and the curve is their product.

A stratum with few answers borrows: its parent's probability counts as `BORROWED` answers of its own. Prompts of similar
length of one tenant are a stratum, its parent is the tenant, whose parent is everybody; everybody borrows from an
exponential distribution. Requests without a token are not in it, so what is refused does not feed the forecast.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from math import exp, log

from moonpool.core.digest import digest_of


def _borders() -> tuple[int, ...]:
    exact = (2 ** (quarter / 4) for quarter in range(81))
    return tuple(sorted({round(border) for border in exact}))


BORDERS = _borders()
"""The last length of each interval: 1, 2, 3, 4, 5, 6, 7, 8, 10, ... 1,048,576 tokens."""
BORROWED = 8.0
"""Answers that a parent's probability counts as."""
WINDOW = 1024
"""Answers that ended, after which the counts of a stratum are halved: old ones fade."""
MAX_STRATA = 4096
"""Of the strata beyond, those that began an answer least recently are forgotten."""
LEAST = -30.0
"""Logarithm of the least probability of outliving an interval: a product of such is still a number."""
RENEWED = 32
"""A curve is computed anew when answers have ended beside it by a share of one in so many, and at least one."""

Stratum = tuple[str, ...]
"""() is everybody, (tenant,) a tenant, (tenant, bucket) a tenant's prompts of similar length."""


def stratum_of(tenant: str, prompt_tokens: int) -> Stratum:
    """The stratum of a request; lengths of prompts within a factor of four are alike."""
    return tenant, str((prompt_tokens.bit_length() + 1) // 2)


@dataclass(slots=True)
class _Counts:
    """Answers by interval; `total` those that ended ever."""

    ended: list[float] = field(default_factory=lambda: [0.0] * len(BORDERS))
    outlived: list[float] = field(default_factory=lambda: [0.0] * len(BORDERS))
    total: int = 0
    recent: float = 0.0

    def end(self, interval: int) -> None:
        self.ended[interval] += 1.0
        self.total += 1
        self.recent += 1.0
        if self.recent >= WINDOW:
            self.recent /= 2
            self.ended = [count / 2 for count in self.ended]
            self.outlived = [count / 2 for count in self.outlived]


@dataclass(slots=True)
class _Running:
    stratum: Stratum
    interval: int = 0


class Lengths:
    """Forecasts lengths of answers from those that were seen.

    Args:
        assumed: mean length that is believed before any was seen.
    """

    def __init__(self, assumed: int = 256) -> None:
        widths = [border - before for before, border in zip((0, *BORDERS), BORDERS, strict=False)]
        self._prior = tuple([max(-width / assumed, LEAST) for width in widths])
        self._counts: OrderedDict[Stratum, _Counts] = OrderedDict({(): _Counts()})
        self._running: dict[int, _Running] = {}
        self._curves: dict[Stratum, tuple[int, tuple[float, ...]]] = {}

    def __len__(self) -> int:
        """Answers that are followed."""
        return len(self._running)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def begin(self, number: int, stratum: Stratum) -> None:
        """An answer has its first token; one that is followed already is fine."""
        if number in self._running:
            return
        self._running[number] = _Running(stratum)
        for one in _and_parents(stratum):
            if one not in self._counts:
                self._counts[one] = _Counts()
            self._counts.move_to_end(one)
        while len(self._counts) > MAX_STRATA:
            forgotten, _ = self._counts.popitem(last=False)
            self._curves.pop(forgotten, None)

    def grew(self, number: int, tokens: int) -> None:
        """An answer has so many tokens and goes on, as far as is known; unknown ones are fine."""
        running = self._running.get(number)
        if running is None or tokens <= BORDERS[running.interval]:
            return
        reached = min(bisect_left(BORDERS, tokens), len(BORDERS) - 1)
        for counts in self._of(running.stratum):
            for interval in range(running.interval, reached):
                counts.outlived[interval] += 1.0
        running.interval = reached

    def ended(self, number: int, tokens: int) -> None:
        """An answer has ended by itself with so many tokens; unknown ones are fine."""
        self.grew(number, tokens)
        running = self._running.pop(number, None)
        if running is not None:
            for counts in self._of(running.stratum):
                counts.end(running.interval)

    def removed(self, number: int) -> None:
        """An answer was cut off or given up: how long it would have become is not known. Unknown ones are fine."""
        self._running.pop(number, None)

    def _of(self, stratum: Stratum) -> list[_Counts]:
        return [self._counts[one] for one in _and_parents(stratum) if one in self._counts]

    # --- what is expected -------------------------------------------------------------------------------------------

    def outlives(self, stratum: Stratum, tokens: float, so_far: float = 0.0) -> float:
        """Probability that an answer that has more than `so_far` tokens has more than `tokens`."""
        curve = self._curve(stratum)
        return exp(min(_at(curve, tokens) - _at(curve, so_far), 0.0))

    def expected(self, stratum: Stratum, longest: int, least: int = 0) -> float:
        """Mean length of an answer that has at least `least` tokens and is cut off at `longest`."""
        curve, before = self._curve(stratum), min(least, longest)
        mean, known, share = float(before), _at(curve, before), 1.0
        for border in BORDERS[bisect_left(BORDERS, before + 1) :]:
            if before >= longest:
                break
            end, share_before = min(border, longest), share
            share = exp(_at(curve, end) - known)
            mean += (end - before) * (share_before + share) / 2
            before = end
        return mean

    def _curve(self, stratum: Stratum) -> tuple[float, ...]:
        """Logarithm of the probability of outliving each border, and 0 before the first."""
        while stratum not in self._counts:
            stratum = stratum[:-1]
        total = self._counts[()].total
        known = self._curves.get(stratum)
        if known is not None and total - known[0] < max(1, known[0] // RENEWED):
            return known[1]
        steps = self._prior
        for one in reversed(_and_parents(stratum)):
            steps = self._steps(one, steps) if one in self._counts else steps
        curve, height = [0.0], 0.0
        for step in steps:
            height += step
            curve.append(height)
        self._curves[stratum] = total, tuple(curve)
        return tuple(curve)

    def _steps(self, stratum: Stratum, parent: tuple[float, ...]) -> tuple[float, ...]:
        """Logarithms of the probabilities of outliving each interval, once it is reached."""
        counts = self._counts[stratum]
        three = zip(counts.ended, counts.outlived, parent, strict=True)
        return tuple(
            [
                log((outlived + BORROWED * exp(above)) / (ended + outlived + BORROWED))
                for ended, outlived, above in three
            ]
        )

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._counts, self._running, self._curves)

    def check_invariants(self) -> None:
        """Asserts that everybody is the sum of all, as far as nobody was forgotten or faded."""
        everybody = self._counts[()]
        assert all(count >= 0.0 for count in (*everybody.ended, *everybody.outlived))
        if everybody.total < WINDOW and len(self._counts) < MAX_STRATA:
            tenants = [counts for stratum, counts in self._counts.items() if len(stratum) == 1]
            assert everybody.total == sum(counts.total for counts in tenants)
        assert set(self._curves) <= set(self._counts)
        assert len(self._counts) <= MAX_STRATA


def _and_parents(stratum: Stratum) -> list[Stratum]:
    """From itself to everybody."""
    return [stratum[:length] for length in range(len(stratum), -1, -1)]


def _at(curve: tuple[float, ...], tokens: float) -> float:
    """The curve between its borders: straight in the logarithm."""
    if tokens <= 0.0:
        return 0.0
    place = bisect_left(BORDERS, tokens)
    if place >= len(BORDERS):
        return curve[-1]
    before = BORDERS[place - 1] if place else 0
    share = (tokens - before) / (BORDERS[place] - before)
    return curve[place] + share * (curve[place + 1] - curve[place])
