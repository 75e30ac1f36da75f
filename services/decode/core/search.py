"""The scores of a beam search: which candidates go on, which end, and when no better hypothesis can be found."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.frozen import frozen
from services.decode.core.events import Beams, Candidates


@frozen
class Hypothesis:
    """A sequence that has ended."""

    number: int
    """In the order in which they ended."""
    score: float


@dataclass(slots=True)
class Search:
    """A beam search; see `services.decode.core.beams` for its rules."""

    width: int
    longest: int
    """Most tokens of an answer."""
    rules: Beams
    length: int = 0
    """Tokens of each beam's answer."""
    scores: list[float] = field(default_factory=lambda: [0.0])
    """Of the beams, the best first: sums of log probabilities."""
    kept: list[Hypothesis] = field(default_factory=list)
    """The best hypotheses so far, the best first; at most `width`."""
    ended: int = 0
    """Hypotheses that were found, also those not kept."""
    over: bool = False

    def step(self, candidates: Sequence[Candidates]) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Takes what may follow each beam, in their order.

        Returns:
            The beams that go on, the best first, as (parent, candidate); none when the search is over. And what has
            ended and is kept, as (number, parent, candidate).
        """
        self.length += 1
        order = sorted(
            (-(self.scores[beam] + log_probability), beam, index, ends)
            for beam, found in enumerate(candidates)
            for index, (log_probability, ends) in enumerate(found)
        )
        going = [it for it in order if not it[3]][: self.width]
        ended = self._end([it for it in order[: self.width] if it[3]])
        self.over = len(going) < self.width or self._is_decided(-going[0][0])
        if self.over:
            return [], ended
        self.scores = [-negative for negative, *_ in going]
        return [(beam, index) for _, beam, index, _ in going], ended

    def _end(self, found: list[tuple[float, int, int, bool]]) -> list[tuple[int, int, int]]:
        """Keeps the best hypotheses; returns which of the new ones are among them."""
        new = {}
        for negative, beam, index, _ in found:
            self.kept.append(Hypothesis(self.ended, self._scored(-negative, self.length)))
            new[self.ended] = (self.ended, beam, index)
            self.ended += 1
        self.kept = sorted(self.kept, key=lambda it: -it.score)[: self.width]
        return [new[it.number] for it in self.kept if it.number in new]

    def _scored(self, total: float, length: int) -> float:
        return float(total / length**self.rules.length_penalty)

    def _is_decided(self, best: float) -> bool:
        """Whether no beam is to be waited for: there are enough hypotheses, and none is expected to become better."""
        if len(self.kept) < self.width:
            return False
        if self.rules.early_stopping is True:
            return True
        grows = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        return self._scored(best, self.longest if grows else self.length) <= self.kept[-1].score

    def check_invariants(self) -> None:
        """Asserts that beams and hypotheses are in order and no more than wanted."""
        assert self.scores == sorted(self.scores, reverse=True)
        scores = [it.score for it in self.kept]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) <= min(self.width, self.ended)
        assert 0 <= self.length < self.longest or self.over
