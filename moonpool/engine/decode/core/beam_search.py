"""Beam search: scores each step's candidates, and chooses which beams fork and which hypotheses are kept.

The step equals `transformers` 5.23 (`GenerationMixin._beam_search`), which considers the best max(2, 1 + end tokens)
times `width` candidates over all beams. Only the best `width` may end; the best `width` that do not end continue. The
best (width + end tokens) candidates of each beam contain every candidate that can be chosen. Ties go to the earlier
beam, then to the earlier candidate of a beam; among equal hypotheses the earlier is better. Log probabilities are
summed in double precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.base.frozen import frozen
from moonpool.engine.decode.core.actions import AnswersRanked, ForkSequences
from moonpool.engine.decode.core.events import Candidates, SearchRules


@frozen
class Hypothesis:
    """A sequence that has ended.

    Attributes:
        number: counts hypotheses in the order in which they ended.
        score: sum of log probabilities, normalised by length.
    """

    number: int
    score: float


@dataclass(slots=True)
class BeamSearch:
    """One request's beam search. Holds scores; tokens and blocks are elsewhere.

    Attributes:
        width: number of beams.
        longest: most tokens in an answer.
        rules: length penalty and early stopping.
        first_candidates: tokens that may follow the prompt; set when the request starts.
        length: tokens in each beam's answer.
        scores: each beam's sum of log probabilities, best first.
        kept: the best hypotheses so far, best first; at most `width`.
        ended: hypotheses found so far, kept or not.
        over: whether the search has ended.
    """

    width: int
    longest: int
    rules: SearchRules
    first_candidates: Candidates = ()
    length: int = 0
    scores: list[float] = field(default_factory=lambda: [0.0])
    kept: list[Hypothesis] = field(default_factory=list)
    ended: int = 0
    over: bool = False

    def advance(
        self, request: int, candidates: Sequence[Candidates]
    ) -> tuple[list[int], list[ForkSequences | AnswersRanked]]:
        """Take each beam's candidates, in beam order.

        Returns:
            Each continuing beam's parent, best first; empty if the search is over. And the actions.
        """
        beams, ended = self.step(candidates)
        kept = tuple(hypothesis.number for hypothesis in self.kept)
        selected = ForkSequences(request, tuple(beams), tuple(ended), kept)
        if self.over:
            ranked = tuple((hypothesis.number, hypothesis.score) for hypothesis in self.kept)
            return [], [selected, AnswersRanked(request, ranked)]
        return [parent for parent, _ in beams], [selected]

    def step(self, candidates: Sequence[Candidates]) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Score each beam's candidates, in beam order.

        Returns:
            The beams that continue, best first, as (parent, candidate); empty if the search is over. And the new
            hypotheses that are kept, as (number, parent, candidate).
        """
        self.length += 1
        order = sorted(
            (-(self.scores[beam] + log_probability), beam, index, ends)
            for beam, found in enumerate(candidates)
            for index, (log_probability, ends) in enumerate(found)
        )
        live = [candidate for candidate in order if not candidate[3]][: self.width]
        ended = self._end([candidate for candidate in order[: self.width] if candidate[3]])
        self.over = len(live) < self.width or self._is_decided(-live[0][0])
        if self.over:
            return [], ended
        self.scores = [-negative for negative, *_ in live]
        return [(beam, index) for _, beam, index, _ in live], ended

    def _end(self, found: list[tuple[float, int, int, bool]]) -> list[tuple[int, int, int]]:
        """Keep the best hypotheses; return the new hypotheses that are kept."""
        new = {}
        for negative, beam, index, _ in found:
            self.kept.append(Hypothesis(self.ended, self._score(-negative, self.length)))
            new[self.ended] = (self.ended, beam, index)
            self.ended += 1
        self.kept = sorted(self.kept, key=lambda hypothesis: -hypothesis.score)[: self.width]
        return [new[hypothesis.number] for hypothesis in self.kept if hypothesis.number in new]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.rules.length_penalty)

    def _is_decided(self, best: float) -> bool:
        """Return whether there are enough hypotheses, and no beam is expected to become a better hypothesis."""
        if len(self.kept) < self.width:
            return False
        if self.rules.early_stopping is True:
            return True
        grows = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        return self._score(best, self.longest if grows else self.length) <= self.kept[-1].score

    def check_invariants(self) -> None:
        """Assert that beams and hypotheses are in order and at most `width`."""
        assert self.scores == sorted(self.scores, reverse=True)
        scores = [hypothesis.score for hypothesis in self.kept]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) <= min(self.width, self.ended)
        assert 0 <= self.length < self.longest or self.over
