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
BESIDE_S, BESIDE_SPREAD_S = 0.01, 0.03
"""Seconds that an answer is believed to take beside its steps, and how uncertain."""
STEPS_SPREAD = 0.5
"""How uncertain it is that steps take the time that was promised."""


class Pace:
    """Learns of a decode instance what answers take there: so much once, and a factor of their steps' promised time."""

    __slots__ = ("_learnt",)

    def __init__(self) -> None:
        self._learnt = ByCrowd((BESIDE_S, 1.0), (BESIDE_SPREAD_S, STEPS_SPREAD))

    def foresee(self, tbt_s: float, steps: float, others: int, *, joins: bool) -> Foreseen:
        """Of an answer of so many tokens after its first one; `joins`: prefill computes that one, not decode."""
        beside_s, longer = self._learnt.coefficients(others)
        once_s = beside_s / max(steps, 1.0) if joins else 0.0
        return Foreseen(tbt_s, once_s + longer * tbt_s, others)

    def observe(self, foreseen: Foreseen, steps: int, seconds: float) -> None:
        """Learns what an answer took from its first token to its last one, so many later."""
        self._learnt.observe(foreseen.others, (1.0, steps * foreseen.tbt_s), seconds)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._learnt.state
