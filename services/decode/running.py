"""The runs that the core orders: what the engine is given of them, and what becomes of the tokens that it samples."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.cluster import Notify
from moonpool.engine.handle import Engine
from moonpool.kv.keys import BlockKey
from moonpool.sched.steps import Step, StepResult
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from services.decode.core.actions import Run
from services.decode.core.events import Candidates, StepDone, Stepped
from services.decode.live import LiveRequest, LiveRequests, LiveSequence
from services.decode.tracing import record_step

log = get_logger(__name__)

Ended = list[tuple[int, int]]


class Running:
    """Gives the engine one run after the other. While it computes a step, the tokens of the one before are told.

    Args:
        engine: runs the steps.
        live: the sequences.
        max_tokens: longest sequence the model takes.
        spans: where spans are recorded.
        post: tells the core.
        end: ends a request early.
        notify: called when load or keys have changed.

    Attributes:
        steps: so far.
    """

    def __init__(
        self,
        engine: Engine,
        live: LiveRequests,
        max_tokens: int,
        spans: Recorder,
        post: Callable[[Stepped | StepDone], None],
        end: Callable[[LiveRequest, str], None],
        notify: Notify,
    ) -> None:
        self._engine, self._live, self._max_tokens, self._spans = engine, live, max_tokens, spans
        self._post, self._end, self._notify = post, end, notify
        self._block_tokens = engine.layout.block_tokens
        self._order: Run | None = None
        self._wake = asyncio.Event()
        self._last_ns = 0
        self.steps = 0

    def order(self, run: Run) -> None:
        """The core wants a run, after the one that is over."""
        self._order = run
        self._wake.set()

    def cut(self, step: int, *, hurried: bool = False) -> None:
        """The run ends with the step that is being computed; see `Cut`."""
        self._engine.cut(step, hurried=hurried)

    def close(self) -> None:
        """Nothing is begun any more."""
        self._order = None

    async def run(self) -> None:
        """Runs what is ordered until cancelled.

        Raises:
            Unavailable: the engine died.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._order is not None:
                await self._run(self._order)

    async def _run(self, run: Run) -> None:
        self._order, self._last_ns = None, 0
        sequences = [self._live.sequences[number] for number in run.batch]
        steps = 1 if run.steps == 1 else min(run.steps, *(it.steady(self._max_tokens) for it in sequences))
        size = self._block_tokens
        parts = [it.step(len(it.tokens) - 1, 1, size, sample=True, steps=steps) for it in sequences]
        for chunk in run.chunks:
            sequences.append(self._live.sequences[chunk.id])
            parts.append(
                sequences[-1].step(chunk.start, chunk.count, size, sample=chunk.sample, full_hit=chunk.full_hit)
            )
        step = Step(run.step, tuple(parts), copies=run.copies, patient=run.patient, steps=steps)
        result = await self._engine.run(step, on_step=partial(self._goes_on, run, sequences))
        self._over(run, sequences, result)

    def _goes_on(self, run: Run, sequences: list[LiveSequence], result: StepResult) -> None:
        """Some of the run's steps but the last are over."""
        self._took_steps(run, sequences, (*result.earlier, result))

    def _took_steps(self, run: Run, sequences: list[LiveSequence], results: Sequence[StepResult]) -> None:
        """Steps are over with which nobody has ended."""
        filled, seconds, waited_s = list[tuple[int, BlockKey]](), 0.0, 0.0
        for result in results:
            filled += self._take(sequences, result)
            its_s, its_wait_s = self._seconds(run, sequences, result)
            seconds, waited_s = seconds + its_s, waited_s + its_wait_s
        for sequence in sequences:
            try:
                if not sequence.request.ending:
                    sequence.tell()
            except Exception:
                self._defect(sequence.request)
        self._post(Stepped(run.step, len(results), seconds, tuple(filled), waited_s))
        if filled:
            self._notify()

    def _take(self, sequences: list[LiveSequence], result: StepResult) -> list[tuple[int, BlockKey]]:
        """Takes a step's tokens; returns the blocks that it has filled."""
        filled = []
        for index, (sequence, token) in enumerate(zip(sequences, result.sampled, strict=True)):
            assert token is not None, "the run would be over"
            if sequence.request.ending:
                continue
            try:
                filled += sequence.filled(self._block_tokens)
                sequence.append(token, result.logprobs.get(index))
            except Exception:
                self._defect(sequence.request)
        return filled

    def _over(self, run: Run, sequences: list[LiveSequence], result: StepResult) -> None:
        if result.earlier:
            self._took_steps(run, sequences, result.earlier)
        ended: Ended = []
        filled = []
        candidates: list[tuple[int, Candidates]] = []
        for index, (sequence, token) in enumerate(zip(sequences, result.sampled, strict=not result.aborted)):
            if index in result.failed:
                self._end(sequence.request, result.failed[index])
            if token is None or sequence.request.ending:
                continue
            try:
                filled += sequence.filled(self._block_tokens)
                if (beams := sequence.request.beams) is not None:
                    found = beams.propose(sequence.choice, result.several[index], self._max_tokens)
                    candidates.append((sequence.id, found))
                    continue
                sequence.append(token, result.logprobs.get(index))
                reason = sequence.judge(self._max_tokens)
                sequence.tell()
            except Exception:
                self._defect(sequence.request)
                continue
            if reason:
                ended.append((sequence.id, int(reason)))
        seconds, waited_s = self._seconds(run, sequences, result)
        told = tuple(ended), tuple(filled), 1, tuple(candidates), waited_s
        self._post(StepDone(run.step, result.aborted, seconds, *told))
        if ended or filled or run.chunks:
            self._notify(soon=bool(ended))  # a next turn may follow an answer at once

    def _defect(self, request: LiveRequest) -> None:
        """A request cannot take or tell its tokens, for a defect of ours: it ends, and no other one."""
        log.exception("tokens cannot be taken: the request ends", request=request.request_id)
        self._end(request, "a defect: its tokens cannot be taken")
        request.ending = True  # now, also where the core hears of it later: what follows would have a gap before it

    def _seconds(self, run: Run, sequences: list[LiveSequence], result: StepResult) -> tuple[float, float]:
        """Counts a step; returns what it took, with the time since the one before it in its run, and what it waited."""
        self.steps += 1
        record_step(self._spans, run, sequences, result)
        begin_ns, self._last_ns = self._last_ns or result.start_ns, result.end_ns
        return (result.end_ns - begin_ns - result.waited_ns) / 1e9, result.waited_ns / 1e9
