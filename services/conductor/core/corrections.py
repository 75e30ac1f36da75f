"""What measured times to first token teach of a prefill instance, beside the speeds that it tells."""

from moonpool.cost import PrefillWork, Regression, Speeds, work_seconds
from services.conductor.core.crowds import CHANGE, DRIFT, LEAST_S, SLOW, Overheads, Slowness
from services.conductor.core.parts import Parts

LATER = 0.25
"""Share of a full step that prompts which come later are believed to take of the step in which one that waited ends."""
FIRST = Parts(later=LATER)
SPREADS = Parts(queue=0.2, load=0.2, fixed=0.2, growing=0.2, later=0.25)
"""What is believed of the factors before anything was measured, and how uncertain that is."""
SHARED_SPREADS = SPREADS._replace(fixed=0.3, growing=0.5)
"""The same where other programs may have cores: an instance tells what it takes with all of its own."""


class Corrections:
    """Speeds of a prefill instance: those that it tells, corrected by what its prompts took.

    What a prompt takes at its instance, from coming to its first token, is the sum of some parts (`Parts`), each times
    its factor. The factors begin with 1: what the instance says is believed first. Where other programs have cores,
    what grows with tokens takes longer, and the rest of a step hardly does. While a prompt waits others come, whose
    tokens fill the step in which it ends; that does not grow with the queue: it is a share of a full step. All factors
    are learnt together: had those that waited a regression of their own, one misled prompt that found the instance idle
    would stay believed as long as all wait.
    What is left of the time that the conductor measures is overhead: calls, tokenising, tokens on their way, and all
    else that does not grow with the prompt.

    An instance learns from each of its steps and tells what it has learnt. The factors are about what it cannot see,
    and are in no hurry: otherwise both would learn one slow moment, and it would count twice.

    Where engines share a host, a prompt takes longer while another one computes, the more so the more requests there
    are, as the services take cores, too. Prompts that were expected to have company teach how much (`Slowness`).

    Args:
        told: the speeds that it tells.
        alone: it takes no cores from others, nor they from it, as emulated engines; company costs it nothing.

    Attributes:
        overheads: what prompts take beside.
        factors: of each part.
        slowness: how much longer it takes in company.
    """

    __slots__ = ("_learnt", "_speeds", "_told", "factors", "overheads", "slowness")

    def __init__(self, told: Speeds, *, alone: bool = False) -> None:
        self._told = told
        self.overheads = Overheads()
        self._learnt = Regression(
            FIRST, SPREADS if alone else SHARED_SPREADS, change=CHANGE, drift=DRIFT, least_s=LEAST_S
        )
        self.slowness = Slowness(1.0 if alone else SLOW)
        self._speeds: Speeds | None = None
        self.factors = FIRST

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object as long as nothing changes."""
        if self._speeds is None:
            _, load, fixed, growing, _ = self.factors
            same = load == fixed == growing == 1.0
            self._speeds = self._told if same else self._told.slowed_prefill(growing, load, fixed)
        return self._speeds

    def told(self, speeds: Speeds) -> None:
        """The instance tells its speeds. What was learnt stays true until it is measured anew."""
        if speeds != self._told:
            self._told, self._speeds = speeds, None

    def slowed(self, work: PrefillWork) -> float:
        """Times as long as the instance tells that some work takes."""
        told_s = work_seconds(self._told, *work)
        return work_seconds(self.speeds, *work) / told_s if told_s else self.factors.growing

    def observe(
        self,
        foreseen: Parts,
        by: Parts,
        there_s: float,
        shared: float | None = None,
        others: int = 0,
    ) -> None:
        """Learns from a prompt what it took at its instance, in seconds from its coming to its first token.

        Args:
            foreseen: seconds of each part, as it was placed.
            by: the factors in them.
            there_s: measured by the instance.
            shared: of its work, the share that was expected to be done in company; None = there is none on its host.
            others: requests that its host had as it was placed.
        """
        sizes = Parts(*[seconds / factor for seconds, factor in zip(foreseen, by, strict=True)])
        if shared:
            whole_s = self._learnt.seconds(sizes)
            self.slowness.observe(others, shared * whole_s, (1.0 - shared) * whole_s, there_s)
            there_s /= 1.0 + shared * (self.slowness.of(others) - 1.0)
        self._learnt.observe(sizes, there_s)
        self.factors, self._speeds = Parts(*self._learnt.coefficients), None

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._told, *self._learnt.state, *self.slowness.state, *self.overheads.state
