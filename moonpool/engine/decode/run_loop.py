"""Gives the engine runs, and sends the tokens of each step."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from moonpool.base.errors import Unavailable
from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.scheduling.steps import SampledCandidates, SequenceStep, Step, StepResult
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.telemetry.spans import Recorder
from moonpool.engine.decode.core.actions import Chunk, StartRun
from moonpool.engine.decode.core.events import (
    Candidates,
    CheckedDraft,
    FirstTokens,
    RunDone,
    RunProgress,
)
from moonpool.engine.decode.draft_model import DraftModel, DraftRequest
from moonpool.engine.decode.live_requests import (
    LiveRequest,
    LiveRequestTable,
    LiveSequence,
)
from moonpool.engine.decode.speculation import DraftingSequence, DraftPlanner, DraftSource, LookupDrafter
from moonpool.engine.instance import ExecutorParts

log = get_logger(__name__)


class RunLoop:
    """Gives the engine one run after the other. While a step is computed, the previous step's tokens are sent.

    Args:
        parts: engine, write-back, journal and the like.
        live: the sequences.
        max_tokens: longest sequence the model takes.
        post: tells the scheduler.
        abort: ends a request early.
        drafts: decides which guesses steps check, as far as the scheduler allows guesses.
        model: guesses if the text does not repeat; None = no small model.

    Attributes:
        steps: so far.
        checked: guesses that steps checked, by source.
        accepted: right ones among them.
    """

    def __init__(
        self,
        parts: ExecutorParts,
        live: LiveRequestTable,
        max_tokens: int,
        post: Callable[[RunProgress | RunDone], None],
        abort: Callable[[LiveRequest, str], None],
        drafts: DraftPlanner,
        model: DraftModel | None = None,
    ) -> None:
        self._engine, self._spans, self._notify = parts.engine, parts.spans, parts.notify
        self._histograms = parts.histograms
        self._drafts, self._model, self._clock = drafts, model, parts.clock
        self._live, self._max_tokens = live, max_tokens
        self._post, self._abort = post, abort
        self._block_size = parts.engine.layout.block_size
        self._order: StartRun | None = None
        self._wake = asyncio.Event()
        self._last_ns = 0
        self.steps = 0
        self.checked, self.accepted = dict.fromkeys(DraftSource, 0), dict.fromkeys(DraftSource, 0)

    def order(self, run: StartRun) -> None:
        """Order the next run."""
        self._order = run
        self._wake.set()

    def cut(self, step: int, *, hurried: bool = False) -> None:
        """End the run with the step being computed; see `StopRun`."""
        self._engine.stop_run(step, urgent=hurried)

    def close(self) -> None:
        """Begin no more runs."""
        self._order = None

    async def run(self) -> None:
        """Execute ordered runs until cancelled.

        Raises:
            Unavailable: the engine died.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._order is not None:
                await self._run(self._order)

    async def _run(self, run: StartRun) -> None:
        self._order, self._last_ns = None, 0
        sequences = [self._live.sequences[number] for number in run.batch]
        guesses = self._guesses(run, sequences)
        if any(guesses):
            drafters = [sequence.drafter for sequence in sequences]
            sources = [drafter.source if drafter is not None else DraftSource.TEXT for drafter in drafters]
            await self._check_guesses(run, sequences, guesses, sources)
            return
        if self._model is not None and run.drafts and await self._draft_by_model(self._model, run, sequences):
            return
        steps = (
            1 if run.steps == 1 else min(run.steps, *(sequence.most_steps(self._max_tokens) for sequence in sequences))
        )
        size = self._block_size
        parts = [self._next_token(sequence, steps) for sequence in sequences]
        for chunk in run.chunks:
            sequence = self._live.sequences[chunk.id]
            sequences.append(sequence)
            kind = {"sample": chunk.sample, "full_hit": chunk.full_hit, "scores": sequence.request.prompt is not None}
            parts.append(sequence.step(chunk.start, chunk.count, size, **kind))
        step = Step(run.step, tuple(parts), copies=run.copies, patient=run.patient, steps=steps)
        result = await self._engine.run(step, on_step=partial(self._goes_on, run, sequences))
        self._over(run, sequences, result)

    def _next_token(self, sequence: LiveSequence, steps: int = 1) -> SequenceStep:
        """Return the sequence's part in a step, or in a run's first step, that computes the last token."""
        may_skip = sequence.request.search is None
        last = len(sequence.tokens) - 1
        return sequence.step(last, 1, self._block_size, sample=True, steps=steps, may_skip=may_skip)

    def _goes_on(self, run: StartRun, sequences: list[LiveSequence], result: StepResult) -> None:
        """Take steps of a run that goes on, and end the run early if guesses pay now."""
        self._took_steps(run, sequences, (*result.earlier, result))
        if any(self._guesses(run, sequences)):
            self.cut(run.step)

    # --- guesses ---------------------------------------------------------------------------------------------------

    def _guesses(self, run: StartRun, sequences: list[LiveSequence]) -> list[list[int]]:
        """For each sequence the guesses that the next step checks."""
        if not run.drafts or not self._drafts.may_pay(len(sequences), sum(len(other.tokens) for other in sequences)):
            return []
        each = []
        for sequence in sequences:
            most = sequence.room_for_guesses(self._block_size, self._max_tokens)
            if sequence.drafter is None and most > 0:
                sequence.drafter = self._drafter(sequence)
            each.append(DraftingSequence(sequence.drafter, len(sequence.tokens), most))
        return self._drafts.plan(each, run.drafts)

    def _drafter(self, sequence: LiveSequence) -> LookupDrafter:
        total, incoming = sequence.sampling.total_tokens(self._max_tokens), sequence.request.incoming
        root, tenant, transient = incoming.chain_root, incoming.spec.tenant, incoming.spec.transient
        first, media = incoming.sampling.prompt_tokens, incoming.sampling.media
        return self._drafts.drafter(sequence.tokens, total, root, tenant, first, transient=transient, media=media)

    async def _draft_by_model(self, model: DraftModel, run: StartRun, sequences: list[LiveSequence]) -> bool:
        """Execute a run that checks a small model's guesses; return whether there were any."""
        context = sum(len(sequence.tokens) for sequence in sequences)
        most = self._drafts.model_guesses(len(sequences), context, model.speeds)
        most = min(most, run.drafts // len(sequences))
        rooms = [min(most, sequence.room_for_guesses(self._block_size, self._max_tokens)) for sequence in sequences]
        wanted = [
            DraftRequest(sequence.id, sequence.tokens, sequence.sampling.at(sequence.tokens, sequence.choice), room)
            for sequence, room in zip(sequences, rooms, strict=True)
            if room > 0
        ]
        if not wanted:
            return False
        began = self._clock()
        try:
            found = dict(zip((asked.id for asked in wanted), await model.guess(wanted), strict=True))
        except Unavailable as error:
            log.error("the draft model is gone: answers go on without its guesses", error=str(error))
            self._model = None
            return False
        seconds = self._clock() - began
        guesses = [found.get(sequence.id, []) for sequence in sequences]
        if not any(guesses):
            return False
        expected_s = most * decode_step_seconds(model.speeds, len(sequences), context)
        drafts = await self._check_guesses(run, sequences, guesses, [DraftSource.MODEL] * len(sequences))
        right = sum(draft.accepted for draft in drafts)
        wrong = sum(draft.accepted < draft.tokens for draft in drafts)
        self._drafts.observe_model(right + wrong, right, seconds, expected_s)
        return True

    def forget(self, sequence: LiveSequence) -> None:
        """Drop what the draft model keeps of an ended sequence; recent answers keep the answer."""
        if self._model is not None:
            self._model.forget(sequence.id)
        if sequence.drafter is not None:
            sequence.drafter.end()

    async def _check_guesses(
        self, run: StartRun, sequences: list[LiveSequence], guesses: list[list[int]], sources: list[DraftSource]
    ) -> list[CheckedDraft]:
        """Execute a run with one step that checks guesses; return how many guesses were right.

        `sources`: what made the guesses, for each sequence.
        """
        began, parts = self._clock(), list[SequenceStep]()
        for sequence, guess in zip(sequences, guesses, strict=True):
            parts += sequence.draft_steps(guess, self._block_size) if guess else [self._next_token(sequence)]
        step = Step(run.step, tuple(parts), copies=run.copies, patient=run.patient)
        result = await self._engine.run(step)
        if not result.aborted:
            self._drafts.observe_overhead(self._clock() - began - (result.end_ns - result.start_ns) / 1e9)
        checked = self._over(run, sequences, result, guesses)
        made_by = {sequence.id: source for sequence, source in zip(sequences, sources, strict=True)}
        for draft in checked:
            self.checked[made_by[draft.id]] += draft.tokens
            self.accepted[made_by[draft.id]] += draft.accepted
        return checked

    def _took_steps(self, run: StartRun, sequences: list[LiveSequence], results: Sequence[StepResult]) -> None:
        """Take steps in which no sequence ended."""
        filled, seconds, waited_s = list[tuple[int, BlockKey]](), 0.0, 0.0
        for result in results:
            filled += self._take(sequences, result)
            its_s, its_wait_s = self._seconds(run, sequences, result)
            seconds, waited_s = seconds + its_s, waited_s + its_wait_s
        for sequence in sequences:
            try:
                if not sequence.request.ending:
                    sequence.send_new()
            except Exception:
                self._defect(sequence.request)
        self._post(RunProgress(run.step, len(results), seconds, tuple(filled), waited_s))
        if filled:
            self._notify()

    def _take(self, sequences: list[LiveSequence], result: StepResult) -> list[tuple[int, BlockKey]]:
        """Take a step's tokens; return the blocks that became full."""
        filled = []
        for index, (sequence, token) in enumerate(zip(sequences, result.sampled, strict=True)):
            assert token is not None, "the run would be over"
            if sequence.request.ending:
                continue
            try:
                filled += sequence.take_filled(self._block_size)
                sequence.append(token, result.logprobs.get(index))
            except Exception:
                self._defect(sequence.request)
        return filled

    def _over(
        self, run: StartRun, sequences: list[LiveSequence], result: StepResult, guesses: Sequence[Sequence[int]] = ()
    ) -> list[CheckedDraft]:
        """End the run after its last step; return which guesses that step checked."""
        if result.earlier:
            self._took_steps(run, sequences, result.earlier)
        told, index = _RunEnd(), 0
        if not result.aborted:
            chunks = [None] * len(run.batch) + list(run.chunks)
            parts = zip(sequences, guesses or [()] * len(sequences), chunks, strict=True)
            for sequence, guess, chunk in parts:
                prompt = sequence.request.prompt if chunk is not None else None
                if chunk is not None and prompt is not None and not prompt.over:
                    self._take_chunk(sequence, chunk, result, index, told)
                else:
                    self._take_last(sequence, guess, result, index, told)
                index += 1 + len(guess)
        seconds, waited_s = self._seconds(run, sequences, result)
        ended, filled = tuple(told.ended), tuple(told.filled)
        rest = tuple(told.candidates), waited_s, tuple(told.late), tuple(told.drafts), tuple(told.first_tokens)
        self._post(RunDone(run.step, result.aborted, seconds, ended, filled, 1, *rest))
        if ended or filled or run.chunks:
            self._notify(soon=bool(ended))  # a next turn of the conversation may follow at once
        return told.drafts

    def _take_chunk(
        self, sequence: LiveSequence, chunk: Chunk, result: StepResult, index: int, told: "_RunEnd"
    ) -> None:
        """Take a computed chunk of a whole prompt, and the first tokens behind the last one."""
        request, prompt = sequence.request, sequence.request.prompt
        assert prompt is not None
        if index in result.failed:
            self._abort(request, result.failed[index])
        if request.ending or index in result.failed:
            return
        try:
            prompt.computed(chunk, index, result)
            if chunk.sample:
                token = result.sampled[index]
                assert token is not None, "the last chunk samples"
                told.filled += sequence.take_filled(self._block_size)
                found = result.several.get(index, SampledCandidates((token,)))
                first = request.take_first_tokens(found, result.logprobs.get(index), self._max_tokens)
                told.first_tokens.append(first)
        except Exception:
            self._defect(request)

    def _take_last(
        self, sequence: LiveSequence, guess: Sequence[int], result: StepResult, index: int, told: "_RunEnd"
    ) -> None:
        """Take a sequence's tokens from a run's last step; the sequence's first part has this index."""
        request, found = sequence.request, result.sampled[index]
        if index in result.failed:
            self._abort(request, result.failed[index])
        if request.ending:
            return
        if index in result.late:
            told.late.append(sequence.id)
        if found is None:
            return
        try:
            if (search := request.search) is not None:
                told.filled += sequence.take_filled(self._block_size)
                candidates = search.propose(sequence.choice, result.several[index], self._max_tokens)
                told.candidates.append((sequence.id, candidates))
                return
            before, reason = len(sequence.tokens), 0
            for place in range(index, index + 1 + len(guess)):
                if (token := result.sampled[place]) is None:  # behind a right guess: computed again, as the next token
                    break
                told.filled += sequence.take_filled(self._block_size)
                sequence.append(token, result.logprobs.get(place))
                reason = sequence.check_finish(self._max_tokens)
                if reason or guess[place - index : place - index + 1] != [token]:
                    break
            if guess:
                told.drafts.append(CheckedDraft(sequence.id, len(guess), len(sequence.tokens) - before - 1))
            sequence.send_new()
        except Exception:
            self._defect(request)
            return
        if reason:
            told.ended.append((sequence.id, int(reason)))

    def _defect(self, request: LiveRequest) -> None:
        """End a request that cannot take or send tokens because of an internal error; others go on."""
        log.exception("tokens cannot be taken: the request ends", request=request.request_id)
        self._abort(request, "a defect: its tokens cannot be taken")
        request.ending = True  # at once: later tokens would follow a gap

    def _seconds(self, run: StartRun, sequences: list[LiveSequence], result: StepResult) -> tuple[float, float]:
        """Count a step; return its seconds since the run's step before, without pictures, and those waited."""
        self.steps += 1
        record_step_span(self._spans, run, sequences, result)
        begin_ns, self._last_ns = self._last_ns or result.start_ns, result.end_ns
        seconds = (result.end_ns - begin_ns - result.waited_ns) / 1e9
        self._histograms.pictures(result.pictures)
        self._histograms.step(seconds, len(sequences), len(sequences) + sum(chunk.count for chunk in run.chunks))
        return seconds - result.encode_s, result.waited_ns / 1e9


@frozen
class SourceFigures:
    """What `SOURCE_METRICS` read."""

    running: RunLoop
    source: DraftSource


SOURCE_METRICS: tuple[Metric[SourceFigures], ...] = (
    counter(
        "source_draft_tokens_total",
        "Guessed tokens that steps checked, by what made the guess: `text` (prompt and answer), `answers` (recent "
        "answers of the tenant), `model` (the draft model).",
        lambda figures: figures.running.checked[figures.source],
    ),
    counter(
        "source_accepted_tokens_total",
        "Guessed tokens that were right, by what made the guess.",
        lambda figures: figures.running.accepted[figures.source],
    ),
)


@dataclass(slots=True)
class _RunEnd:
    """What `RunDone` tells about a run's last step."""

    ended: list[tuple[int, int]] = field(default_factory=list)
    filled: list[tuple[int, BlockKey]] = field(default_factory=list)
    candidates: list[tuple[int, Candidates]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    drafts: list[CheckedDraft] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)


def record_step_span(spans: Recorder, run: StartRun, sequences: Sequence[LiveSequence], result: StepResult) -> None:
    """Record a span for a computed step."""
    if spans.enabled:
        spans.add(
            "decode.step",
            result.start_ns,
            result.end_ns,
            step=run.step,
            requests=[sequence.request.request_id for sequence in sequences],
            sequences=len(sequences),
            computed_again=sum(chunk.count for chunk in run.chunks),
        )
