"""Admission by the load of the whole decode pool, as in section 7 of the Mooncake paper.

Its assumptions: all decode instances have equally much to do, all answers take equally long, and a request is judged by
the load that is there, whatever it would add itself. A load is the time between tokens as a share of its limit.
"""

from dataclasses import dataclass

from moonpool.cost import decode_step_seconds
from simulator.cluster.config import ClusterConfig

FULL = 1.0
"""Load above which nobody is let in."""
FIRST_S = 10.0
"""Seconds that answers are thought to take until one has ended."""


@dataclass(slots=True)
class _Answer:
    """One that was let in. `begins_at` is when its prompt is thought to be computed, or was when it has begun."""

    tokens: int
    begins_at: float
    begun: bool = False


class PoolLoad:
    """The decode pool's load, as it is and as it is expected.

    Args:
        config: of the cluster.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._speeds, self._instances, self._limit_s = config.profile.speeds, config.decode, config.slo.tbt_s
        self._answers: dict[int, _Answer] = {}
        self._ended, self._total_s = 0, 0.0

    @property
    def answer_s(self) -> float:
        """Seconds that every answer is thought to take: the mean of those that have ended."""
        return self._total_s / self._ended if self._ended else FIRST_S

    def placed(self, request: int, tokens: int, begins_at: float) -> None:
        """A prompt of so many tokens is to be computed until then."""
        self._answers[request] = _Answer(tokens, begins_at)

    def began(self, request: int, now: float) -> None:
        """Its first token has come."""
        answer = self._answers[request]
        answer.begins_at, answer.begun = now, True

    def ended(self, request: int, now: float) -> None:
        """It is over, in any way; one that was not placed is fine."""
        answer = self._answers.pop(request, None)
        if answer is not None and answer.begun:
            self._ended += 1
            self._total_s += now - answer.begins_at

    def now(self) -> float:
        """What decodes now, prompts that are being computed left out."""
        return self._level([answer.tokens for answer in self._answers.values() if answer.begun])

    def at(self, when: float) -> float:
        """At a later time: those whose prompts are computed by then have begun, and the oldest are over."""
        since = when - self.answer_s
        return self._level([it.tokens for it in self._answers.values() if since < it.begins_at <= when])

    def _level(self, contexts: list[int]) -> float:
        sequences, context = len(contexts) / self._instances, sum(contexts) / self._instances
        return decode_step_seconds(self._speeds, sequences, context) / self._limit_s
