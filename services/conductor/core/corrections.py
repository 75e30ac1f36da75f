"""What measured times to first token teach of a prefill instance, beside the speeds that it tells."""

from dataclasses import replace

from moonpool.cost import DEFAULT_BYTES_PER_S, Regression, Speeds

OVERHEAD_S = 0.02
"""How uncertain the fixed part is before anything was measured."""
OVERHEAD_DRIFT = 5e-3
"""About the last five count: it follows how busy the machine is."""
SPREAD = 0.2
"""The same of the factors of waiting, loading and computing."""
CHANGE = 16
"""An instance learns from each of its steps and tells what it has learnt. The factors are about what it cannot see, and
are in no hurry: otherwise both would learn one slow moment, and it would count twice."""
LEAST_S = 0.005
"""Errors of predictions shorter than this count as those of one so long."""
COMPANY_SPREAD = 0.3
"""How uncertain it is that prompts take longer while others of their host compute."""


Factors = tuple[float, float, float]
"""Of waiting, loading and computing."""


class Company:
    """What is learnt of prompts that found the other engines of their host in one state.

    Attributes:
        overhead_s: seconds that each prompt takes beside waiting, loading and computing.
        factor: so many times as long as otherwise all three take.
    """

    __slots__ = ("_factor", "_overhead", "factor", "overhead_s")

    def __init__(self) -> None:
        self._overhead = Regression((0.0,), (OVERHEAD_S,), drift=OVERHEAD_DRIFT, least_s=LEAST_S)
        self._factor = Regression((1.0,), (COMPANY_SPREAD,), change=CHANGE, least_s=LEAST_S)
        self.overhead_s, self.factor = 0.0, 1.0

    def alone(self, otherwise_s: float, there_s: float) -> float:
        """Learns that a prompt took `there_s` instead of `otherwise_s`; returns what it would have taken otherwise."""
        self._factor.observe((otherwise_s,), there_s)
        (self.factor,) = self._factor.coefficients
        return there_s / self.factor

    def observe_overhead(self, seconds: float) -> None:
        """Learns what a prompt took from being placed to its first token, less what it took at its instance."""
        self._overhead.observe((1.0,), seconds)
        (self.overhead_s,) = self._overhead.coefficients

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return *self._overhead.state, *self._factor.state


class Corrections:
    """Speeds of a prefill instance: those that it tells, corrected by what its prompts took.

    What a prompt takes at its instance, from coming to its first token, is `queue * waiting + load * loading + compute
    * computing`; the factors begin with 1: what the instance says is believed first. Prompts that found it idle teach
    the last two. Those that waited teach the first, which has in it what later prompts take that share their steps.
    What is left of the time that the conductor measures is overhead: calls, tokenising, tokens on their way, and all
    else that does not grow with the prompt.

    Where engines share a host, a prompt takes longer while another one computes. So there are two `Company`: of prompts
    that found the others busy, and of those that found them idle.

    Attributes:
        factors: of waiting, loading and computing, in company and out of it.
    """

    __slots__ = ("_busy", "_idle", "_parts", "_speeds", "_told", "_waiting", "factors")

    def __init__(self, told: Speeds) -> None:
        self._told = told
        self._busy, self._idle = Company(), Company()
        self._waiting = Regression((1.0,), (SPREAD,), change=CHANGE, least_s=LEAST_S)
        self._parts = Regression((1.0, 1.0), (SPREAD, SPREAD), change=CHANGE, least_s=LEAST_S)
        self._speeds: Speeds | None = None
        self.factors: Factors = (1.0, 1.0, 1.0)

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

    def company(self, *, busy: bool | None) -> Company:
        """What is learnt of prompts that find other engines of the host busy, or idle; None = there are none."""
        return self._busy if busy else self._idle

    def observe(
        self, foreseen: tuple[float, float, float], by: Factors, there_s: float, *, busy: bool | None = None
    ) -> None:
        """Learns from a prompt what it took at its instance, in seconds from its coming to its first token.

        Args:
            foreseen: seconds of waiting, loading and computing, as it was placed.
            by: the factors in them.
            there_s: measured by the instance.
            busy: other engines of its host were, when it was placed; None = there were none.
        """
        waits_s, load_s, compute_s = (seconds / factor for seconds, factor in zip(foreseen, by, strict=True))
        alone_s = self._parts.seconds((load_s, compute_s))
        if busy is not None:
            there_s = self.company(busy=busy).alone(self._waiting.seconds((waits_s,)) + alone_s, there_s)
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
        return self._told, *self._waiting.state, *self._parts.state, *self._busy.state, *self._idle.state
