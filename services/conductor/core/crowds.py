"""Learns, by the number of other requests on a host, how much longer work takes there and what it waits besides."""

from collections.abc import Sequence

from moonpool.cost import Regression

CROWDS = 5
"""Learnt apart for requests that find no other one on their host, one, two or three, four to seven, and more."""
OVERHEADS = 15
"""The overhead is the median of so many: a few that took long do not count, and it follows how busy the machine is."""
SLOW, SLOW_SPREAD = 1.5, 0.5
"""Times as long as alone that work is believed to take while other engines of the host compute, and how uncertain."""
MOST_SLOW = 6.0
CHANGE = 16
"""So many prompts in a row beyond the gate are a change."""
DRIFT = 5e-3
"""Of what is learnt here: where times differ by a third, the last twenty prompts count most."""
LEAST_S = 0.005
"""Errors of predictions shorter than this count as those of one so long."""


def crowd_of(others: int) -> int:
    """The crowd that so many others are."""
    return min(others.bit_length(), CROWDS - 1)


def nearest(crowd: int, known: list[bool]) -> int | None:
    """The crowd next to this one of which something is known; None = there is none."""
    return min((it for it in range(CROWDS) if known[it]), key=lambda it: (abs(it - crowd), it), default=None)


class Overheads:
    """Seconds that requests take beside what is foreseen of them by their sizes: medians of the last ones."""

    __slots__ = ("_latest", "_medians")

    def __init__(self) -> None:
        self._latest: list[tuple[float, ...]] = [()] * CROWDS
        self._medians = [0.0] * CROWDS

    def seconds(self, others: int) -> float:
        """The median of the last ones; where there are none, of those of the nearest crowd."""
        return self._medians[crowd_of(others)]

    def observe(self, others: int, seconds: float) -> None:
        """Learns what a request took beside."""
        crowd = crowd_of(others)
        self._latest[crowd] = (*self._latest[crowd][-OVERHEADS + 1 :], max(seconds, 0.0))
        known = [bool(latest) for latest in self._latest]
        near = [self._latest[it] for crowd in range(CROWDS) if (it := nearest(crowd, known)) is not None]
        self._medians = [sorted(latest)[len(latest) // 2] for latest in near]

    @property
    def state(self) -> tuple[tuple[float, ...], ...]:
        """Everything that later predictions depend on."""
        return tuple(self._latest)


class ByCrowd:
    """A regression for each crowd, which begins with what is known of the nearest one then.

    Args:
        first: coefficients before anything was measured.
        spreads: how uncertain each is.
    """

    __slots__ = ("_first", "_regressions", "_spreads")

    def __init__(self, first: Sequence[float], spreads: Sequence[float]) -> None:
        self._first, self._spreads = tuple(first), tuple(spreads)
        self._regressions: list[Regression | None] = [None] * CROWDS

    def coefficients(self, others: int) -> tuple[float, ...]:
        """With so many other requests; where nothing was measured, those of the nearest crowd."""
        near = nearest(crowd_of(others), [one is not None for one in self._regressions])
        found = None if near is None else self._regressions[near]
        return self._first if found is None else found.coefficients

    def observe(self, others: int, sizes: Sequence[float], seconds: float, known_s: float = 0.0) -> None:
        """See `Regression.observe`."""
        crowd = crowd_of(others)
        one = self._regressions[crowd]
        if one is None:
            first = self.coefficients(others)
            one = Regression(first, self._spreads, change=CHANGE, drift=DRIFT, least_s=LEAST_S)
            self._regressions[crowd] = one
        one.observe(sizes, seconds, known_s)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return tuple(None if one is None else one.state for one in self._regressions)


class Slowness:
    """How many times as long as alone work takes in company. The more requests a host has, the more its services take.

    Args:
        first: what is believed at first; 1 = company costs nothing, as of emulated engines, and that stays so.
    """

    __slots__ = ("_learnt",)

    def __init__(self, first: float = SLOW) -> None:
        self._learnt = ByCrowd((first,), (SLOW_SPREAD if first > 1.0 else 0.0,))

    def of(self, others: int) -> float:
        """With so many other requests; where nothing was measured, as of the nearest crowd."""
        return min(max(self._learnt.coefficients(others)[0], 1.0), MOST_SLOW)

    def observe(self, others: int, beside_s: float, alone_s: float, seconds: float) -> None:
        """Learns what work took of which `beside_s` was done in company and `alone_s` was not, as it takes alone."""
        self._learnt.observe(others, (beside_s,), seconds, alone_s)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._learnt.state
