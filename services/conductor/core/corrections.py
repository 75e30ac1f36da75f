"""What measured times to first token teach of a prefill instance, beside the speeds that it tells."""

from moonpool.cost import Regression, Speeds
from services.conductor.core.crowds import CHANGE, DRIFT, LEAST_S, SLOW, Overheads, Slowness

SPREAD = 0.2
"""How uncertain the factors of waiting, loading and computing are before anything was measured."""
LATER, LATER_SPREAD = 0.25, 0.25
"""Share of a full step that prompts which come later are believed to take of the step in which one that waited ends."""

Factors = tuple[float, float, float, float]
"""Of waiting, loading and computing, and of a full step: what later prompts take of it."""


class Corrections:
    """Speeds of a prefill instance: those that it tells, corrected by what its prompts took.

    What a prompt takes at its instance, from coming to its first token, is `queue * waiting + load * loading + compute
    * computing`; the factors begin with 1: what the instance says is believed first. Prompts that found it idle teach
    the last two. Those that waited teach the first, and `later`: while they waited others came, whose tokens fill the
    step in which they end. That does not grow with the queue: `step * later`, where a step is a full one.
    What is left of the time that the conductor measures is overhead: calls, tokenising, tokens on their way, and all
    else that does not grow with the prompt.

    An instance learns from each of its steps and tells what it has learnt. The factors are about what it cannot see,
    and are in no hurry: otherwise both would learn one slow moment, and it would count twice.

    Where engines share a host, a prompt takes longer while another one computes, the more so the more requests there
    are, as the services take cores, too. Prompts that were expected to have company teach how much (`Slowness`).

    Args:
        told: the speeds that it tells.
        slow: times as long as alone that work is believed to take in company; 1 = as long, as of emulated engines.

    Attributes:
        overheads: what prompts take beside.
        factors: of waiting, loading and computing alone, and `later`.
        slowness: how much longer it takes in company.
    """

    __slots__ = ("_parts", "_speeds", "_told", "_waiting", "factors", "overheads", "slowness")

    def __init__(self, told: Speeds, slow: float = SLOW) -> None:
        self._told = told
        self.overheads = Overheads()
        self._waiting = Regression((1.0, LATER), (SPREAD, LATER_SPREAD), change=CHANGE, drift=DRIFT, least_s=LEAST_S)
        self._parts = Regression((1.0, 1.0), (SPREAD, SPREAD), change=CHANGE, drift=DRIFT, least_s=LEAST_S)
        self.slowness = Slowness(slow)
        self._speeds: Speeds | None = None
        self.factors: Factors = (1.0, 1.0, 1.0, LATER)

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object as long as nothing changes."""
        if self._speeds is None:
            _, load, compute, _ = self.factors
            same = load == compute == 1.0
            self._speeds = self._told if same else self._told.slowed_prefill(compute, load)
        return self._speeds

    def told(self, speeds: Speeds) -> None:
        """The instance tells its speeds. What was learnt stays true until it is measured anew."""
        if speeds != self._told:
            self._told, self._speeds = speeds, None

    def observe(
        self,
        foreseen: tuple[float, float, float, float],
        by: Factors,
        there_s: float,
        shared: float | None = None,
        others: int = 0,
    ) -> None:
        """Learns from a prompt what it took at its instance, in seconds from its coming to its first token.

        Args:
            foreseen: seconds of waiting, loading and computing, and of later prompts, as it was placed.
            by: the factors in them.
            there_s: measured by the instance.
            shared: of its work, the share that was expected to be done in company; None = there is none on its host.
            others: requests that its host had as it was placed.
        """
        waits_s, load_s, compute_s, step_s = (seconds / factor for seconds, factor in zip(foreseen, by, strict=True))
        alone_s = self._parts.seconds((load_s, compute_s))
        if shared:
            whole_s = self._waiting.seconds((waits_s, step_s)) + alone_s
            self.slowness.observe(others, shared * whole_s, (1.0 - shared) * whole_s, there_s)
            there_s /= 1.0 + shared * (self.slowness.of(others) - 1.0)
        if waits_s > 0.0:
            self._waiting.observe((waits_s, step_s), there_s, known_s=alone_s)
        else:
            self._parts.observe((load_s, compute_s), there_s)
            self._speeds = None
        (queue, later), (load, compute) = self._waiting.coefficients, self._parts.coefficients
        self.factors = queue, load, compute, later

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        learnt = *self._waiting.state, *self._parts.state, *self.slowness.state
        return self._told, *learnt, *self.overheads.state
