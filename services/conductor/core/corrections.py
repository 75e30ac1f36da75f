"""What measured times to first token teach of a prefill instance, beside the speeds that it tells."""

from dataclasses import replace

from moonpool.cost import DEFAULT_BYTES_PER_S, Regression, Speeds
from services.conductor.core.company import MOST_LOST

OVERHEADS = 15
"""The overhead is the median of so many: a few that took long do not count, and it follows how busy the machine is."""
CROWDS = 4
"""Overheads are learnt apart for prompts that find no other request on their host, one, two, and more."""
SPREAD = 0.2
"""How uncertain the factors of waiting, loading and computing are before anything was measured."""
CHANGE = 16
"""An instance learns from each of its steps and tells what it has learnt. The factors are about what it cannot see, and
are in no hurry: otherwise both would learn one slow moment, and it would count twice."""
DRIFT = 2e-3
"""Of the factors: prompts of the last minute or so count."""
LEAST_S = 0.005
"""Errors of predictions shorter than this count as those of one so long."""
LOST, LOST_SPREAD = 0.3, 0.3
"""Of its speed that an engine is believed to lose while others of its host compute, and how uncertain that is."""
LEAST_ALONE = 0.2
"""Share of a prompt's time that counts at least as its own."""


Factors = tuple[float, float, float]
"""Of waiting, loading and computing."""


class Overheads:
    """Seconds that each prompt takes beside waiting, loading and computing, by how many others its host has."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: list[tuple[float, ...]] = [()] * CROWDS

    def seconds(self, others: int) -> float:
        """The median of the last ones; where there are none, of those with the next number of others."""
        crowd = min(others, CROWDS - 1)
        for near in sorted(range(CROWDS), key=lambda it: abs(it - crowd)):
            if self._latest[near]:
                return sorted(self._latest[near])[len(self._latest[near]) // 2]
        return 0.0

    def observe(self, others: int, seconds: float) -> None:
        """Learns what a prompt took from being placed to its first token, less what it took at its instance."""
        crowd = min(others, CROWDS - 1)
        self._latest[crowd] = (*self._latest[crowd][-OVERHEADS + 1 :], max(seconds, 0.0))

    @property
    def state(self) -> tuple[tuple[float, ...], ...]:
        """Everything that later predictions depend on."""
        return tuple(self._latest)


class Corrections:
    """Speeds of a prefill instance: those that it tells, corrected by what its prompts took.

    What a prompt takes at its instance, from coming to its first token, is `queue * waiting + load * loading + compute
    * computing`; the factors begin with 1: what the instance says is believed first. Prompts that found it idle teach
    the last two. Those that waited teach the first, which has in it what later prompts take that share their steps.
    What is left of the time that the conductor measures is overhead: calls, tokenising, tokens on their way, and all
    else that does not grow with the prompt.

    Where engines share a host, a prompt takes longer while another one computes, which loses it a share of its speed.
    Prompts that were expected to have company teach that share. The services' own work is slower then, too: so the
    overhead depends on how many other requests the host has.

    Args:
        told: the speeds that it tells.
        lost: share of its speed that company is believed to cost at first; 0 = it costs none, as of emulated engines.

    Attributes:
        overheads: what prompts take beside.
        factors: of waiting, loading and computing alone.
        lost: share of the speed that is lost in company.
    """

    __slots__ = ("_lost", "_parts", "_speeds", "_told", "_waiting", "factors", "lost", "overheads")

    def __init__(self, told: Speeds, lost: float = LOST) -> None:
        self._told = told
        self.overheads = Overheads()
        self._waiting = Regression((1.0,), (SPREAD,), change=CHANGE, drift=DRIFT, least_s=LEAST_S)
        self._parts = Regression((1.0, 1.0), (SPREAD, SPREAD), change=CHANGE, drift=DRIFT, least_s=LEAST_S)
        self._lost = Regression((lost,), (LOST_SPREAD if lost else 0.0,), change=CHANGE, drift=DRIFT, least_s=LEAST_S)
        self._speeds: Speeds | None = None
        self.factors: Factors = (1.0, 1.0, 1.0)
        self.lost = lost

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object as long as nothing changes."""
        if self._speeds is None:
            _, load, compute = self.factors
            speeds = self._told if compute == 1.0 else self._told.slowed_prefill(compute)
            rate = (speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S) / load
            self._speeds = speeds if load == 1.0 else replace(speeds, load_bytes_per_s=rate)
        return self._speeds

    def told(self, speeds: Speeds) -> None:
        """The instance tells its speeds. What was learnt stays true until it is measured anew."""
        if speeds != self._told:
            self._told, self._speeds = speeds, None

    def observe(
        self, foreseen: tuple[float, float, float], by: Factors, there_s: float, shared_s: float | None = None
    ) -> None:
        """Learns from a prompt what it took at its instance, in seconds from its coming to its first token.

        Args:
            foreseen: seconds of waiting, loading and computing, as it was placed.
            by: the factors in them.
            there_s: measured by the instance.
            shared_s: of the time that was foreseen, in company; None = it has none on its host.
        """
        waits_s, load_s, compute_s = (seconds / factor for seconds, factor in zip(foreseen, by, strict=True))
        alone_s = self._parts.seconds((load_s, compute_s))
        if shared_s:
            self._lost.observe((shared_s,), there_s, known_s=self._waiting.seconds((waits_s,)) + alone_s)
            self.lost = min(self._lost.coefficients[0], MOST_LOST)
            there_s = max(there_s - self.lost * shared_s, LEAST_ALONE * there_s)
        if waits_s > 0.0:
            self._waiting.observe((waits_s,), there_s, known_s=alone_s)
        else:
            self._parts.observe((load_s, compute_s), there_s)
            self._speeds = None
        (queue,), (load, compute) = self._waiting.coefficients, self._parts.coefficients
        self.factors = queue, load, compute

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        learnt = *self._waiting.state, *self._parts.state, *self._lost.state
        return self._told, *learnt, *self.overheads.state
