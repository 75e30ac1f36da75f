"""Samples a step's tokens, and what else a step asks of the last stage: scores, candidates, embeddings."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SampledCandidates, ScoredTokens, Step
from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.kernels.native.structures import GoOn
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.stage import StageModel
from moonpool.engine.sampling.logprobs import compute_logprobs, top_candidates
from moonpool.engine.sampling.native_sampler import NativeRows
from moonpool.engine.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, SamplerOutput, sampler_output
from moonpool.engine.structured_output import PendingMasks

_NO_MASKS: dict[int, memoryview] = {}
"""One object for all steps: the sampler reads masks again only if the object has changed."""


class StepSampler:
    """Samples a step's tokens, and the tokens for the run's later steps.

    Args:
        model: the last stage.
        step: the run's first.
        dropped: indices of sequences that were dropped from the step.

    Attributes:
        logits: the first, largest group's logits, once computed; the other groups reuse their memory.
    """

    def __init__(self, model: StageModel, step: Step, dropped: Container[int]) -> None:
        self._model, self._count = model, len(step.sequences)
        self.logits: Tensor | None = None
        live = [(index, sequence) for index, sequence in enumerate(step.sequences) if index not in dropped]
        wanted = [(index, sequence.sample) for index, sequence in live if sequence.sample is not None]
        self._groups = [
            _RowGroup(model, wanted[begin : begin + LOGIT_ROWS], step.steps)
            for begin in range(0, len(wanted), LOGIT_ROWS)
        ]
        self._scored = [
            (index, len(sequence.token_ids) // 4, sequence.scored)
            for index, sequence in live
            if sequence.scored is not None
        ]
        self._embedded = [index for index, spec in wanted if spec.params.embedding and not spec.position]

    def choose(self, hidden: Tensor, batch: PackedBatch, masks: PendingMasks | None) -> StepOutput:
        """Return all that the step asks for from `hidden` [T, hidden], the states after the last layer.

        `masks`: tokens that may follow; None: all.
        """
        output = StepOutput([None] * self._count)
        for group in self._groups:
            self.logits = group.choose(hidden, batch, masks, output, self.logits)
        for index, tokens, scored in self._scored:
            last = int(batch.host.last_rows[index])
            output.scores[index] = _score_tokens(self._model, hidden[last + 1 - tokens : last + 1], scored)
        if self._embedded:
            pooled = self._model.pooled(hidden, batch, self._embedded).cpu()
            output.embeddings = {
                index: row.numpy().astype("<f4").tobytes() for index, row in zip(self._embedded, pooled, strict=True)
            }
        return output

    @property
    def tokens_address(self) -> int | None:
        """The address of the last step's tokens, one int32 per sequence. None if native code cannot sample whole steps.

        With an address, the logits of all sequences are computed together, for `sample_from`.
        """
        whole = len(self._groups) == 1 and not self._scored and not self._embedded
        return self._groups[0].tokens_address(self._count) if whole else None

    def sample_from(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `choose`, from all sequences' logits [S, vocab] at an address; they are overwritten."""
        return self._groups[0].sample_all(logits, masks)

    def attach(self, further: GoOn) -> bool:
        """See `NativeRows.attach`. Needs a `tokens_address`, as the next three methods do."""
        return self._groups[0].attach(further)

    def set_masks(self, masks: PendingMasks) -> StepOutput:
        """Set the masks of the next step; return what is known before the step: failed sequences, time waited."""
        return self._groups[0].set_masks(masks)

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        """Return the output of the last step. `masks`: those of that step."""
        return self._groups[0].last_output(masks)

    def set_previous(self, tokens: Sequence[int]) -> None:
        """Set each sequence's token before the run's first step; does nothing without a `tokens_address`."""
        if self.tokens_address is not None:
            self._groups[0].set_previous(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the run's next step, after sequence i got `tokens[i]`."""
        for group in self._groups:
            group.advance(tokens)


@dataclass(slots=True)
class StepOutput:
    """`StepResult`'s fields with the same names, and the time spent waiting for masks, in nanoseconds."""

    sampled: list[int | None] = field(default_factory=list)
    several: dict[int, SampledCandidates] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    awaited_ns: int = 0


class _RowGroup:
    """Sequences whose logits are computed together: `LOGIT_ROWS` at most."""

    def __init__(self, model: StageModel, wanted: Sequence[tuple[int, SampleSpec]], steps: int) -> None:
        self._model, self._wanted = model, wanted
        self._drawn = [(row, index) for row, (index, spec) in enumerate(wanted) if not spec.best]
        specs = [spec for _, spec in wanted if not spec.best]
        self._sampler = Sampler(specs, model.config.vocab_size, model.device, steps)
        self._seen: dict[int, memoryview] = {}
        vocab = model.config.vocab_size
        self._forced = {row: _only(spec.forced, vocab) for row, spec in enumerate(specs) if spec.forced is not None}
        """Masks of rows whose next token is forced: these have no further step in a run."""
        self._masks = self._forced or _NO_MASKS

    def choose(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        masks: PendingMasks | None,
        output: StepOutput,
        room: Tensor | None,
    ) -> Tensor:
        """Write each row's tokens to the output; a row that wants candidates gets the most likely tokens.

        Returns:
            Logits with reusable memory: `room`, or this group's logits without `room`.
        """
        if len(self._wanted) != batch.num_tokens:
            hidden = batch.last_of(hidden, [index for index, _ in self._wanted])
        logits = self._model.logits(hidden, out=None if room is None else room[: len(self._wanted)])
        room = logits if room is None else room
        if len(self._drawn) != len(self._wanted):
            for row, (index, spec) in enumerate(self._wanted):
                if spec.best:
                    _top_candidates(logits[row], index, spec, output)
            logits = logits[[row for row, _ in self._drawn]]
        self._record(self._sampler.sample(logits, self._row_masks(masks, output)), output)
        return room

    def sample_all(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `StepSampler.sample_from`: these are all sequences."""
        output = StepOutput()
        tokens = self._native.sample_at(logits, self._row_masks(masks, output))
        if tokens is not None and not output.failed and not output.late:
            output.sampled = list(tokens)
            return output
        output.sampled = [None] * len(self._wanted)
        self._record(sampler_output(self._native.choices()), output)
        return output

    @property
    def _native(self) -> NativeRows:
        native = self._sampler.native
        assert native is not None
        return native

    def attach(self, further: GoOn) -> bool:
        return self._native.attach(further)

    def set_masks(self, masks: PendingMasks) -> StepOutput:
        output = StepOutput()
        self._native.set_masks(self._row_masks(masks, output))
        return output

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        output = StepOutput([None] * len(self._wanted))
        self._row_masks(masks, output)
        self._record(sampler_output(self._native.choices()), output)
        return output

    def tokens_address(self, sequences: int) -> int | None:
        """See `StepSampler.tokens_address`, for a step of so many sequences."""
        native = self._sampler.native
        return native.tokens_address if native is not None and len(self._drawn) == sequences else None

    def set_previous(self, tokens: Sequence[int]) -> None:
        self._native.set_previous(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        self._sampler.advance(
            tokens if len(self._drawn) == len(tokens) else [tokens[index] for _, index in self._drawn]
        )

    def _row_masks(self, masks: PendingMasks | None, output: StepOutput) -> dict[int, memoryview]:
        """Return masks by row, the same object if unchanged; add to the output the sequences without a mask."""
        if masks is None:
            return self._masks
        made = masks.now()
        output.awaited_ns = made.waited_ns
        output.failed.update((index, made.failed[index]) for _, index in self._drawn if index in made.failed)
        output.late |= made.late.intersection(index for _, index in self._drawn)
        if made.masks is not self._seen:
            self._seen = made.masks
            found = {at: made.masks[index] for at, (_, index) in enumerate(self._drawn) if index in made.masks}
            self._masks = found | self._forced
        return self._masks

    def _record(self, chosen: SamplerOutput, output: StepOutput) -> None:
        for at, (_, index) in enumerate(self._drawn):
            if index in output.late:
                continue
            if at in chosen.failed:
                output.failed.setdefault(index, chosen.failed[at])
            if index in output.failed:
                continue
            tokens = chosen.tokens[at]
            output.sampled[index] = tokens[0]
            if len(tokens) > 1:
                output.several[index] = SampledCandidates(tuple(tokens))
            if at in chosen.logprobs:
                output.logprobs[index] = chosen.logprobs[at]


def _only(token: int, vocab: int) -> memoryview:
    """Return a mask that allows one token."""
    mask = bytearray(-(-vocab // 8))
    mask[token // 8] = 1 << token % 8
    return memoryview(mask)


def _top_candidates(logits: Tensor, index: int, spec: SampleSpec, output: StepOutput) -> None:
    """Write a row's most likely tokens to the output; a row without any fails."""
    tokens, scores = top_candidates(logits, spec)
    if tokens:
        output.sampled[index], output.several[index] = tokens[0], SampledCandidates(tuple(tokens), tuple(scores))
    else:
        output.failed[index] = NOTHING_LEFT if bool(torch.isfinite(logits).all()) else NOT_FINITE


def _score_tokens(model: StageModel, hidden: Tensor, scored: ScoredTokens) -> Logprobs:
    """Return log probabilities for the tokens after the leading rows in `hidden`."""
    tokens, found = torch.frombuffer(bytearray(scored.token_ids), dtype=torch.int32).tolist(), Logprobs()
    for begin in range(0, len(tokens), LOGIT_ROWS):
        part = tokens[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[begin : begin + len(part)])
        for row in compute_logprobs(logits, [[token] for token in part], scored.top):
            found.extend(row)
    return found
