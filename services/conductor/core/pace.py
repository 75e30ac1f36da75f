"""How quickly an answer's tokens follow each other, as its client counts it.

That is the mean over the answer: its steps at decode, and once what lies between prefill's token and decode's first
step (the rest of the KV on its way, the call, the end of the step that runs) and what telling the last token takes. Of
a short answer this is most of the time. Steps take longer than decode promises, as prompts that come later are computed
on its host beside them, or before them.
"""

from typing import NamedTuple

from services.conductor.core.crowds import ByCrowd


class Foreseen(NamedTuple):
    """What is foreseen of the times between an answer's tokens, seconds.

    Attributes:
        tbt_s: of a step, as decode has promised it; 0 = it has not.
        tpot_s: the mean over the answer; 0 = not foreseen.
        others: requests that its host has as it is placed.
    """

    tbt_s: float = 0.0
    tpot_s: float = 0.0
    others: int = 0


NOTHING = Foreseen()
FIRST = (0.01, 1.0, 0.0)
"""What is believed before anything was measured: seconds once, and factors of steps as promised and as at its start."""
SPREADS = (0.05, 0.5, 1.0)
"""How uncertain these are."""


class Pace:
    """Learns of a decode instance what answers take there.

    That is so much once, so many times what was promised for their steps, and so many times what steps took at the
    instance's start: what is promised follows the moment, and what slows steps down later does not depend on it.

    Args:
        step_s: a step of one sequence, as the instance said at its start.
    """

    __slots__ = ("_learnt", "_step_s")

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._learnt = ByCrowd(FIRST, SPREADS)

    def foresee(self, tbt_s: float, steps: float, others: int, *, joins: bool) -> Foreseen:
        """Of an answer of so many tokens after its first one; `joins`: prefill computes that one, not decode."""
        once_s, *factors = self._learnt.coefficients(others)
        step_s = factors[0] * tbt_s + factors[1] * self._step_s
        return Foreseen(tbt_s, step_s + (once_s / max(steps, 1.0) if joins else 0.0), others)

    def observe(self, foreseen: Foreseen, steps: int, seconds: float) -> None:
        """Learns what an answer took from its first token to its last one, so many later."""
        sizes = 1.0, steps * foreseen.tbt_s, steps * self._step_s
        self._learnt.observe(foreseen.others, sizes, seconds)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._step_s, self._learnt.state
