"""Carries out the prefill scheduler's actions.

Steps, loads, transfers, write-back and answers; reports the results.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn

from moonpool.base.errors import Internal, InvalidRequest, MoonpoolError, Overloaded, TransferFailed, Unavailable
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.kv_transfer.sender import DamagedInTransfer
from moonpool.base.runtime.driver import Driver
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded
from moonpool.base.scheduling.steps import ENCODER, LayerDone, SequenceStep, Step, StepResult
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.block_loader import BlockLoader, BlockRead
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.kv_service import PoolCalls
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.kv_io import KVSender, ReplicationOrders
from moonpool.engine.prefill.live_requests import LivePrefill
from moonpool.engine.request import RequestRows
from moonpool.engine.scheduler.prefix_sources import LoadBlocks, LoadEnded
from moonpool.v1 import prefill_pb2

log = get_logger(__name__)
IoWork = Callable[[], Coroutine[Any, Any, events.IoResult]]
"""Begins I/O. Takes no coroutine: a task that is cancelled before the first step would never await a coroutine."""
_ABORTED_STEP = events.StepEnded(aborted=True, seconds=0.0)


class PrefillExecutor:
    """Drives one instance's core.

    Args:
        core: the scheduler.
        parts: engine, write-back, journal and the like.
        loading: reads prefixes.
        sending: sends KV to decode.

    Attributes:
        copying: replication orders from the conductor.
        pool: reads and deletions in the pool that others ask for.
        empty: set while there is no request.
    """

    def __init__(
        self,
        core: PrefillScheduler,
        parts: ExecutorParts,
        loading: BlockLoader,
        sending: KVSender,
    ) -> None:
        self._core = core
        self._engine, self._write_back = parts.engine, parts.write_back
        self._spans, self._histograms, self._notify = parts.spans, parts.histograms, parts.notify
        self._loading = loading
        self._sending = sending
        self._driver: Driver[events.Event | IoEnded[events.IoResult], actions.Action] = Driver(
            core, self._perform, clock=parts.clock, journal=parts.journal
        )
        self.copying = ReplicationOrders(loading, self._order)
        self._requests: dict[int, LivePrefill] = {}
        self._tasks: dict[int, asyncio.Task[events.IoResult]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._died = asyncio.Event()
        self._dead = "the engine is not running"
        self.pool = PoolCalls(self._order, self.post)
        self.empty = asyncio.Event()
        self.empty.set()

    def submit(self, request: LivePrefill) -> None:
        """Hand a request to the scheduler, which accepts or refuses the request."""
        if self._group is None:
            raise Unavailable(self._dead)
        self._requests[request.id] = request
        self.empty.clear()
        try:
            self._order(request.arrival())
        except Exception:  # the error ends only the call
            self.post(events.CancelPrefill(request.id))  # the core may have taken the request
            if request.id in self._requests:
                self._forget(request)
            raise

    def post(self, event: events.Event | IoEnded[events.IoResult]) -> None:
        """Hand an event to the scheduler."""
        self._driver.tell(event)
        self._notify()

    def _order(
        self, event: events.AddRequest | events.ReplicateBlocks | events.StopReplicating | DeleteKV | LendBlocks
    ) -> None:
        """Carry out a peer's order; an error ends the peer's call, replication or stream."""
        self._driver.ask(event)
        self._notify()

    async def failure(self) -> NoReturn:
        """Wait until the core fails where no request is to blame.

        Raises:
            Internal: then; every request has failed, as the core ends none any more.
        """
        try:
            await self._driver.failure()
        except Internal:
            self._group, self._dead = None, "the instance has failed"
            for request in self._requests.values():
                request.end(Unavailable(self._dead))
            raise

    def loras(self) -> set[bytes]:
        """LoRA adapters in use by requests that have not ended."""
        return {request.incoming.lora for request in self._requests.values()}

    def find(self, request_id: str) -> list[LivePrefill]:
        """Return requests with an id that have not ended."""
        return [request for request in self._requests.values() if request.request_id == request_id]

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            Unavailable: the engine died; every request has failed.
        """
        async with asyncio.TaskGroup() as group:
            self._group, self._dead = group, ""
            try:
                await self._died.wait()
            finally:
                self._group = None
                self._dead = self._dead or "the instance stops"
                self.post(events.StopAllRequests())
        raise Unavailable(self._dead)

    def close(self) -> None:
        """Take no more events."""
        self._driver.close()

    # --- actions ---------------------------------------------------------------------------------------------------

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.RunStep():
                self._start_step(action)
            case MoveSlots(moves):
                self._engine.pool.move_slots(moves)
            case actions.OpenKVGate() | actions.DropSequenceSlice() | actions.GiveUpStep():
                self._steer(action)
            case actions.WriteBackBlocks():
                self._put(action)
            case KVDeleted() | BlocksLent():
                self.pool.answered(action)
            case CancelIo():
                if (task := self._tasks.get(action.io)) is not None:
                    task.cancel()
            case actions.ReadReplica():
                self._begin(action.io, self.copying.work(action), LoadEnded(0))
            case actions.EndReplication(number):
                self.copying.ended(number)
            case actions.CloseTransfer():
                self._sending.close(action.id, aborted=action.aborted)
            case LoadBlocks() | actions.OpenTransfer() | actions.SendSlices() | actions.AwaitVerdict():
                self._move(action, self._requests[action.id])
            case _:
                self._answer(action, self._requests[action.id])

    def _steer(self, action: actions.OpenKVGate | actions.DropSequenceSlice | actions.GiveUpStep) -> None:
        """Open a gate in a step in flight, drops a slice, or give the step up."""
        match action:
            case actions.OpenKVGate():
                self._engine.open_gate(action.step, action.layer)
            case actions.DropSequenceSlice():
                self._engine.drop(action.step, action.index)
            case actions.GiveUpStep():
                self._engine.abort(action.step)

    def _move(
        self,
        action: LoadBlocks | actions.OpenTransfer | actions.SendSlices | actions.AwaitVerdict,
        request: LivePrefill,
    ) -> None:
        """Load or send KV."""
        match action:
            case LoadBlocks():
                loaded = partial(self._layer_loaded, action.io)
                source = request.sources[action.source].instance
                read = BlockRead.of_prompt(action, request.incoming, source, request.note_load)
                work: IoWork = partial(self._loading.load, read, loaded)
            case actions.OpenTransfer():
                work = partial(self._sending.open, request)
            case actions.SendSlices():
                work = partial(self._sending.send, request, action.pieces)
            case actions.AwaitVerdict():
                work = partial(self._sending.verdict, request, action.timeout_s)
        lost: events.IoResult = events.IoFailed()
        failed: events.IoResult = events.IoFailed()
        if isinstance(action, LoadBlocks):
            # The source of a load that was given up is fine.
            lost, failed = LoadEnded(0), LoadEnded(0, failed=True)
        self._begin(action.io, partial(_result_of, request, work, failed), lost)

    def _answer(self, action: actions.PrefillAnswer, request: LivePrefill) -> None:
        """Report to the conductor. An internal error ends this request only."""
        try:
            self._report(action, request)
        except Exception as defect:
            log.exception("an answer cannot be told: its request ends", request=request.request_id)
            request.end(Internal(f"the prefill failed: {defect!r}"))  # the request's later events are not read
            if not isinstance(action, actions.EndRequest | actions.RefuseRequest | actions.RefuseStaleRequest):
                self.post(events.CancelPrefill(request.id))
            elif self._requests.get(request.id) is request:
                self._forget(request)

    def _report(self, action: actions.PrefillAnswer, request: LivePrefill) -> None:
        match action:
            case actions.AcceptRequest():
                accepted = prefill_pb2.PrefillAccepted(predicted_start_s=action.predicted_start_s, number=action.id)
                request.report(prefill_pb2.PrefillResponse(accepted=accepted))
            case actions.RefuseRequest():
                request.end(self._refusal(action, request))
                self._forget(request)
            case actions.RefuseStaleRequest():
                request.stale(action.drain_s, action.taken)
                self._forget(request)
            case actions.ReportFirstToken():
                request.report(request.first_token(action))
            case actions.EndRequest():
                self._end(action, request)

    def _end(self, action: actions.EndRequest, request: LivePrefill) -> None:
        if action.outcome is actions.PrefillOutcome.DONE:
            finished = prefill_pb2.PrefillFinished(transfer_tail_s=action.tail_s, sent_bytes=action.sent_bytes)
            request.report(prefill_pb2.PrefillResponse(finished=finished))
            request.end()
        else:
            request.end(self._reason(action.outcome, request))
        self._forget(request)

    def _forget(self, request: LivePrefill) -> None:
        del self._requests[request.id]
        if not self._requests:
            self.empty.set()

    def _reason(self, outcome: actions.PrefillOutcome, request: LivePrefill) -> MoonpoolError:
        match outcome:
            case actions.PrefillOutcome.IO_FAILED | actions.PrefillOutcome.LEFT if request.error is not None:
                return request.error
            case actions.PrefillOutcome.STEP_GIVEN_UP:
                return Unavailable("the engine gave up a step")
            case actions.PrefillOutcome.STOPPED:
                return Unavailable(self._dead)
        return Unavailable("the prefill was cancelled")

    def _refusal(self, refused: actions.RefuseRequest, request: LivePrefill) -> MoonpoolError:
        match refused.why:
            case actions.RefusalReason.DRAINING:
                return Unavailable("the instance is draining")
            case actions.RefusalReason.STOPPED:
                return Unavailable(self._dead)
            case actions.RefusalReason.TOO_LONG:
                room = self._engine.blocks * self._engine.layout.block_size
                tokens = len(request.incoming.token_ids)
                return InvalidRequest("token_ids", f"{tokens} tokens do not fit this instance's {room}")
        waiting = f"{len(self._core.state.requests)} prompts wait"
        return Overloaded(waiting, reason="queue_full", retry_after_s=refused.retry_after_s)

    # --- I/O -------------------------------------------------------------------------------------------------------

    def _begin(self, io: int, work: IoWork, lost: events.IoResult) -> None:
        """Start I/O; `lost` is the result if the I/O is cancelled."""
        if self._group is None:
            self.post(IoEnded(io, lost))
            return
        task = self._tasks[io] = self._group.create_task(work())
        # Not a `finally` in the task: a task cancelled before the first step never reaches a `finally`.
        task.add_done_callback(lambda done: self._over(io, done, lost))

    def _over(self, io: int, task: "asyncio.Task[events.IoResult]", lost: events.IoResult) -> None:
        del self._tasks[io]
        failed = task.cancelled() or task.exception() is not None
        self.post(IoEnded(io, lost if failed else task.result()))

    def _layer_loaded(self, io: int, layer: int) -> None:
        self._driver.tell(events.LayerLoaded(io, layer))

    def _put(self, order: actions.WriteBackBlocks) -> None:
        """Hand blocks to the write-back, as many as the queue takes."""
        incoming = self._requests[order.id].incoming
        store = self._requests[order.id].copies[order.copy]
        end = order.first + self._write_back.room(store, len(order.blocks))
        if end == order.first:
            self.post(IoEnded(order.io, events.IoDone()))
            return
        blocks = order.blocks[: end - order.first]
        keys, parents = incoming.spec.keys[order.first : end], incoming.parents()[order.first : end]
        over: IoEnded[events.IoResult] = IoEnded(order.io, events.IoDone())
        windowed = [index - order.first for index in order.windowed if index < end]
        trace = self._spans.traceparent_of(incoming.request_id) or self._requests[order.id].asked.sequence.traceparent
        self._write_back.submit(
            store, keys, parents, incoming.spec.tenant, blocks, lambda _: self.post(over), windowed, trace
        )

    # --- steps -----------------------------------------------------------------------------------------------------

    def _start_step(self, order: actions.RunStep) -> None:
        """Begin a step. If the step cannot be made into a message, only the step's requests end."""
        try:
            step = self._step(order)
        except Exception as error:
            log.exception("a step could not be made", step=order.io)
            for request in (self._requests[chunk.id] for chunk in order.chunks if chunk.id in self._requests):
                request.error = Internal(f"the step could not be made: {error!r}")
                self.post(events.CancelPrefill(request.id))
            self.post(IoEnded(order.io, _ABORTED_STEP))
            return
        rows = [self._requests[chunk.id].incoming.rows for chunk in order.chunks]  # requests may end before the step
        self._begin(order.io, partial(self._run_step, order, step, rows), _ABORTED_STEP)

    def _step(self, order: actions.RunStep) -> Step:
        sequences = tuple(self._sequence(chunk) for chunk in order.chunks)
        return Step(order.io, sequences, order.gated, layer_events=True)

    async def _run_step(
        self, order: actions.RunStep, step: Step, rows: Sequence[RequestRows | None]
    ) -> events.IoResult:
        told: list[StepResult] = []
        try:
            result = await self._engine.run(
                step, on_layer=self._layer_done, on_tokens=partial(self._tokens_sampled, order, told)
            )
        except MoonpoolError as error:
            self._die(f"the engine died: {error}")
            return _ABORTED_STEP
        self._record(order, result)
        seconds = (result.end_ns - result.start_ns) / 1e9
        self._note_pictures(order, result, rows)
        if not result.aborted:
            if not told:
                self._take(order, result)
            self._histograms.step(seconds, len(order.chunks), sum(chunk.end - chunk.start for chunk in order.chunks))
        encoded = sum(picture.tokens for picture in result.pictures if picture.source == ENCODER)
        return events.StepEnded(result.aborted, seconds - result.encode_s, result.share, encoded, result.encode_s)

    def _tokens_sampled(self, order: actions.RunStep, told: list[StepResult], result: StepResult) -> None:
        """Take a step's results before the step is over; `told` has them then."""
        told.append(result)
        self._take(order, result)
        self.post(events.TokensSampled(order.io))

    def _take(self, order: actions.RunStep, result: StepResult) -> None:
        for index, chunk in enumerate(order.chunks):
            if (request := self._requests.get(chunk.id)) is not None:
                request.computed(chunk, index, result)
                if request.error is not None:
                    self.post(events.CancelPrefill(request.id))

    def _sequence(self, chunk: actions.ChunkOrder) -> SequenceStep:
        incoming = self._requests[chunk.id].incoming
        media = incoming.media_in(chunk.start, chunk.end)
        return SequenceStep(
            token_ids=tokens_to_bytes(incoming.token_ids[chunk.start : chunk.end]),
            start=chunk.start,
            block_table=chunk.blocks,
            sample=incoming.sampling.at(incoming.token_ids) if chunk.last else None,
            scored=incoming.sampling.scored(incoming.token_ids, chunk.start, chunk.end),
            full_hit=chunk.full_hit,
            lora=incoming.lora,
            history=self._requests[chunk.id].history,
            media=media,
            picture_rows=incoming.rows_for(media),
            rope_shift=incoming.rope_shift(chunk.start),
        )

    def _layer_done(self, done: LayerDone) -> None:
        self._spans.add("engine.layer", done.start_ns, done.end_ns, step=done.step_id, layer=done.layer)
        self._driver.tell(events.LayerComputed(done.step_id, done.layer))

    def _record(self, order: actions.RunStep, result: StepResult) -> None:
        if self._spans.enabled:
            requests = [self._requests.get(chunk.id) for chunk in order.chunks]
            self._spans.add(
                "step",
                result.start_ns,
                result.end_ns,
                step=order.io,
                requests=[request.request_id if request is not None else "" for request in requests],
                tokens=sum(chunk.end - chunk.start for chunk in order.chunks),
                gated=order.gated,
                aborted=result.aborted,
                encode_s=result.encode_s,
            )

    def _note_pictures(self, order: actions.RunStep, result: StepResult, rows: Sequence[RequestRows | None]) -> None:
        self._histograms.pictures(result.pictures)
        for index, encoded in enumerate(rows):
            if encoded is not None:
                encoded.computed(index, result.pictures)
        start_ns = result.start_ns
        for picture in result.pictures:
            request = self._requests.get(order.chunks[picture.index].id) if picture.index < len(order.chunks) else None
            name = "" if request is None else request.request_id
            told = {"request": name, "tokens": picture.tokens, "source": picture.source}
            self._spans.add("encode", start_ns, start_ns + picture.ns, step=order.io, **told)
            start_ns += picture.ns

    def _die(self, reason: str) -> None:
        if not self._dead:
            self._dead = reason
            log.error("engine died", reason=reason)
            self._died.set()
            self.post(events.StopAllRequests())


async def _result_of(request: LivePrefill, work: IoWork, failed: events.IoResult) -> events.IoResult:
    """Return the I/O's result; notes an error with the request. A defect costs this request, not the instance."""
    try:
        return await work()
    except DamagedInTransfer as error:
        request.error = TransferFailed(str(error))
        return events.IoFailed(error.block)
    except MoonpoolError as error:
        request.error = error
    except Exception as error:
        log.exception("a request failed", request=request.request_id)
        request.error = Internal(f"the prefill failed: {error!r}")
    return failed
