"""The last stage's end of a step: which tokens its sequences get, and log probabilities."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.native.structures import GoOn
from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.masks import Making
from moonpool.logprobs import Logprobs
from moonpool.model.batch import PackedBatch
from moonpool.model.likely import logprobs, most_likely
from moonpool.model.sampler import NOT_FINITE, NOTHING_LEFT, Sampled, Sampler
from moonpool.model.stage import StageModel
from moonpool.sampling import SampleSpec
from moonpool.sched.steps import Scored, Several, Step

_NO_MASKS: dict[int, memoryview] = {}
"""Always the same: the sampler looks at masks only where they are others than before."""


@dataclass(slots=True)
class Found:
    """As the fields of `StepResult`; and how long grammars of masks were waited for."""

    sampled: list[int | None] = field(default_factory=list)
    several: dict[int, Several] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    awaited_ns: int = 0


class Choosing:
    """What is wanted of the last hidden states of a step and, where it is a run, of its further steps.

    Args:
        model: the last stage.
        step: the run's first.
        dropped: sequences, by index, that nothing is wanted of any more.

    Attributes:
        logits: of the first part, the largest, once there are some: the others take its memory after it.
    """

    def __init__(self, model: StageModel, step: Step, dropped: Container[int]) -> None:
        self._model, self._count = model, len(step.sequences)
        self.logits: Tensor | None = None
        live = [(index, sequence) for index, sequence in enumerate(step.sequences) if index not in dropped]
        wanted = [(index, sequence.sample) for index, sequence in live if sequence.sample is not None]
        self._parts = [
            _Part(model, wanted[begin : begin + LOGIT_ROWS], step.steps) for begin in range(0, len(wanted), LOGIT_ROWS)
        ]
        self._scored = [
            (index, len(sequence.token_ids) // 4, sequence.scored)
            for index, sequence in live
            if sequence.scored is not None
        ]

    def choose(self, hidden: Tensor, batch: PackedBatch, masks: Making | None) -> Found:
        """Everything that is wanted of the `hidden` states [T, hidden] after the last layer.

        `masks`: which tokens may follow, where not all may.
        """
        found = Found([None] * self._count)
        for part in self._parts:
            self.logits = part.choose(hidden, batch, masks, found, self.logits)
        for index, tokens, scored in self._scored:
            last = int(batch.last_rows[index])
            found.scores[index] = _scores(self._model, hidden[last + 1 - tokens : last + 1], scored)
        return found

    @property
    def chosen(self) -> int | None:
        """Address of the tokens, one int32 of each sequence, written by each choice; None where there is no such.

        Then logits of all sequences are computed together, and `choose_from` takes them.
        """
        whole = len(self._parts) == 1 and not self._scored
        return self._parts[0].chosen_of(self._count) if whole else None

    def choose_from(self, logits: int, masks: Making | None) -> Found:
        """As `choose`, of all sequences' logits [S, vocab] at an address, which are overwritten."""
        return self._parts[0].draw_all(logits, masks)

    def alone(self, further: GoOn) -> bool:
        """See `NativeRows.alone`; where `chosen` is an address."""
        return self._parts[0].alone(further)

    def permit(self, masks: Making) -> Found:
        """The next of these steps chooses by these masks; returns what is known of it before."""
        return self._parts[0].permit(masks)

    def found_alone(self, masks: Making | None) -> Found:
        """What was found in the last of these steps, where that is not a token for each; `masks` are its."""
        return self._parts[0].found_alone(masks)

    def begin_with(self, tokens: Sequence[int]) -> None:
        """The run's first step computes these tokens, one of each sequence; `chosen`, where it is one, has them."""
        if self.chosen is not None:
            self._parts[0].begin_with(tokens)

    def go_on(self, tokens: Sequence[int]) -> None:
        """The run's next step: each of its sequences has got its one of `tokens`."""
        for part in self._parts:
            part.go_on(tokens)


class _Part:
    """Sequences whose logits are computed together."""

    def __init__(self, model: StageModel, wanted: Sequence[tuple[int, SampleSpec]], steps: int) -> None:
        self._model, self._wanted = model, wanted
        self._drawn = [(row, index) for row, (index, spec) in enumerate(wanted) if not spec.best]
        specs = [spec for _, spec in wanted if not spec.best]
        self._sampler = Sampler(specs, model.config.vocab_size, model.device, steps)
        self._seen: dict[int, memoryview] = {}
        self._masks = _NO_MASKS

    def choose(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        masks: Making | None,
        found: Found,
        room: Tensor | None,
    ) -> Tensor:
        """Each row's tokens; for beams the most likely ones, which are not drawn.

        Returns:
            Logits that nobody needs any more: `room`, or where there was none those of this part.
        """
        if len(self._wanted) != batch.num_tokens:
            hidden = hidden[batch.last_rows[[index for index, _ in self._wanted]]]
        logits = self._model.logits(hidden, out=None if room is None else room[: len(self._wanted)])
        room = logits if room is None else room
        if len(self._drawn) != len(self._wanted):
            for row, (index, spec) in enumerate(self._wanted):
                if spec.best:
                    _most_likely(logits[row], index, spec, found)
            logits = logits[[row for row, _ in self._drawn]]
        self._note(self._sampler.sample(logits, self._allowed(masks, found)), found)
        return room

    def draw_all(self, logits: int, masks: Making | None) -> Found:
        """As `Choosing.choose_from`: these are all sequences."""
        found = Found()
        tokens = self._sampler.sample_at(logits, self._allowed(masks, found))
        if isinstance(tokens, list) and not found.failed:
            found.sampled = list(tokens)
            return found
        found.sampled = [None] * len(self._wanted)
        self._note(Sampled([[it] for it in tokens], {}, {}) if isinstance(tokens, list) else tokens, found)
        return found

    def alone(self, further: GoOn) -> bool:
        """See `Choosing.alone`."""
        return self._sampler.alone(further)

    def permit(self, masks: Making) -> Found:
        """See `Choosing.permit`."""
        found = Found()
        self._sampler.permit(self._allowed(masks, found))
        return found

    def found_alone(self, masks: Making | None) -> Found:
        """See `Choosing.found_alone`."""
        found = Found([None] * len(self._wanted))
        self._allowed(masks, found)
        self._note(self._sampler.found(), found)
        return found

    def chosen_of(self, sequences: int) -> int | None:
        """As `Choosing.chosen`, where a step has so many sequences."""
        return self._sampler.chosen if len(self._drawn) == sequences else None

    def begin_with(self, tokens: Sequence[int]) -> None:
        """See `Choosing.begin_with`."""
        self._sampler.begin_with(tokens)

    def go_on(self, tokens: Sequence[int]) -> None:
        """See `Choosing.go_on`."""
        self._sampler.go_on(tokens if len(self._drawn) == len(tokens) else [tokens[index] for _, index in self._drawn])

    def _allowed(self, masks: Making | None, found: Found) -> dict[int, memoryview]:
        """Masks by row of those that are drawn, the same objects in all steps; `found` says where there is none."""
        if masks is None:
            return _NO_MASKS
        made = masks.now()
        found.awaited_ns = made.waited_ns
        found.failed.update((index, made.failed[index]) for _, index in self._drawn if index in made.failed)
        if made.masks is not self._seen:
            self._seen = made.masks
            self._masks = {at: made.masks[index] for at, (_, index) in enumerate(self._drawn) if index in made.masks}
        return self._masks

    def _note(self, chosen: Sampled, found: Found) -> None:
        for at, (_, index) in enumerate(self._drawn):
            if at in chosen.failed:
                found.failed.setdefault(index, chosen.failed[at])
            if index in found.failed:
                continue
            tokens = chosen.tokens[at]
            found.sampled[index] = tokens[0]
            if len(tokens) > 1:
                found.several[index] = Several(tuple(tokens))
            if at in chosen.logprobs:
                found.logprobs[index] = chosen.logprobs[at]


def _most_likely(logits: Tensor, index: int, spec: SampleSpec, found: Found) -> None:
    """A beam's most likely tokens; a beam without any ends its search."""
    tokens, scores = most_likely(logits, spec)
    if tokens:
        found.sampled[index], found.several[index] = tokens[0], Several(tuple(tokens), tuple(scores))
    else:
        found.failed[index] = NOTHING_LEFT if bool(torch.isfinite(logits).all()) else NOT_FINITE


def _scores(model: StageModel, hidden: Tensor, scored: Scored) -> Logprobs:
    """Log probabilities of the tokens after the leading rows of `hidden`."""
    tokens, found = torch.frombuffer(bytearray(scored.token_ids), dtype=torch.int32).tolist(), Logprobs()
    for begin in range(0, len(tokens), LOGIT_ROWS):
        part = tokens[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[begin : begin + len(part)])
        for its in logprobs(logits, [[token] for token in part], scored.top):
            found.extend(its)
    return found
