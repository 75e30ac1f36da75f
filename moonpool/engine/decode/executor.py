"""Carries out the decode scheduler's actions: runs of steps, transfers, block I/O, and output to conductors."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import NoReturn

from moonpool.base.errors import InvalidRequest, MoonpoolError, Overloaded, TransferFailed, Unavailable
from moonpool.base.frozen import frozen
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from moonpool.base.runtime.driver import Driver
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.block_loader import BlockLoader, BlockRead
from moonpool.engine.decode.core.actions import (
    Action,
    AnswersRanked,
    AppendBlock,
    BeginPrompt,
    DropOutputLog,
    FenceConductor,
    FinishSequence,
    ForkSequences,
    RequestAborted,
    RequestAdopted,
    RequestFreed,
    RequestParked,
    ReservationGranted,
    ReservationRefused,
    SetBlockTable,
    StartRun,
    StopReceiving,
    StopRun,
    StoreBlock,
    SwapDrop,
    SwapIn,
    SwapOut,
)
from moonpool.engine.decode.core.block_budget import most_blocks
from moonpool.engine.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    ComputePrompt,
    EngineDied,
    Event,
    QueuePrompt,
    ReserveBlocks,
    StartDecoding,
    StreamClosed,
    StreamOpened,
    TransferComplete,
    TransferOpened,
    TransferProgress,
)
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.decode.draft_model import DraftModel
from moonpool.engine.decode.kv_io import BlockIo
from moonpool.engine.decode.live_requests import (
    LiveRequest,
    LiveRequestTable,
    search_rules_of,
    stores_of,
)
from moonpool.engine.decode.output import RequestOutput
from moonpool.engine.decode.output_log import OutputLog
from moonpool.engine.decode.recent_answers import RecentAnswers
from moonpool.engine.decode.run_loop import RunLoop
from moonpool.engine.decode.speculation import DraftPlanner
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.kv_service import PoolCalls
from moonpool.engine.request import IncomingRequest
from moonpool.engine.scheduler.prefix_sources import LoadBlocks
from moonpool.engine.subscriber import Order, Subscriber, conductor_identity
from moonpool.v1 import decode_pb2, kv_pb2

MAX_GENERATION = (1 << 32) - 1
PROGRESS_PER_LEASE = 8  # transfer progress reports per lease, instead of one per frame
log = get_logger(__name__)


@frozen
class Drafting:
    """How next tokens are guessed.

    Attributes:
        always: guesses are checked at any cost.
        ngram: guesses are looked up in prompt and answer.
        model: a small model that guesses if looking up found no guess; None = no small model.
        recent_tokens: tokens of recent answers that are looked in, at most; 0 = none.
    """

    always: bool = False
    ngram: bool = True
    model: DraftModel | None = None
    recent_tokens: int = 0


NGRAM_DRAFTING = Drafting()
"""Prompt look-up, if guesses pay."""


class DecodeExecutor:
    """Carries out the scheduler's actions, and posts events to the scheduler.

    Args:
        core: the scheduler.
        parts: engine, write-back, journal and the like.
        max_tokens: longest sequence the model takes.
        loading: reads prefixes of prompts.
        drafting: which guesses are made.

    Attributes:
        taken: reservations granted so far.
        pool: reads and deletions in the pool that others ask for.
        log: output of ended and parked requests.
        running: gives the engine runs.
        io: moves blocks out of the pool and back.
        recent: recent answers, for guesses; None = none are kept.
        empty: set while there is no request.
        dead: why no request is accepted any more; "" = requests are accepted.
    """

    def __init__(
        self,
        core: DecodeScheduler,
        parts: ExecutorParts,
        max_tokens: int,
        loading: BlockLoader,
        *,
        drafting: Drafting = NGRAM_DRAFTING,
    ) -> None:
        self.core = core
        self._clock, self._spans, self.notify = parts.clock, parts.spans, parts.notify
        self._engine, self._layout = parts.engine, parts.engine.layout
        self._max_tokens = max_tokens
        self._driver: Driver[Event, Action] = Driver(core, self._perform, clock=parts.clock, journal=parts.journal)
        self._live = LiveRequestTable()
        self._next = 1
        self._answers: dict[int, ReservationGranted | ReservationRefused] = {}
        self.taken = 0
        self.pool = PoolCalls(self._order_from_pool, self._post)
        self._streams: dict[Subscriber, int] = {}
        self._stream_numbers = itertools.count(1)
        self.log = OutputLog(self._live, self._streams)
        self.recent = RecentAnswers(drafting.recent_tokens, parts.clock) if drafting.recent_tokens else None
        drafts = DraftPlanner(
            core.settings.draft_tokens,
            lambda: core.tracker.speeds,
            always=drafting.always,
            ngram=drafting.ngram,
            recent=self.recent,
        )
        self.running = RunLoop(parts, self._live, max_tokens, self._driver.post, self.abort, drafts, drafting.model)
        self.io = BlockIo(parts, loading, self._post)
        self.empty = asyncio.Event()
        self.empty.set()
        self.dead = ""

    def __len__(self) -> int:
        return len(self._live.requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.requests.values()))

    def loras(self) -> set[bytes]:
        """Return all requests' LoRA adapters."""
        return {live.incoming.lora for live in self._live.requests.values()}

    @property
    def step_in_flight(self) -> bool:
        """Whether a run is in flight."""
        return self.core.planner.run_in_flight is not None

    def count(self, *states: TransferState) -> int:
        """Return requests that have not started, with a transfer in one of these states."""
        return sum(not live.started and live.transfer.state in states for live in self._live.requests.values())

    # --- requests --------------------------------------------------------------------------------------------------

    def reserve(self, incoming: IncomingRequest, asked: decode_pb2.ReserveRequest) -> tuple[LiveRequest, float]:
        """Reserve blocks for a request, as the checked message `asked` wants them.

        Returns:
            The request, and the predicted seconds between tokens.

        Raises:
            Overloaded: too few blocks are available now, or the time between tokens cannot be kept.
            InvalidRequest: the request can never fit, or no token is to be generated.
            Unavailable: the scheduler has stopped.
        """
        tokens, total = sequence_lengths(incoming, self.core.settings, self._max_tokens)
        if total <= tokens:
            if not asked.computes_prompt:
                raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
            total = tokens + 1  # the token behind the prompt ends the answer
        number, self._next = self._next, self._next + incoming.spec.width
        stores = stores_of(asked)
        event = ReserveBlocks(
            number,
            incoming.spec,
            total,
            asked.tbt_slo_s,
            conductor_identity(asked.conductor),
            len(stores),
            asked.starts_in_s,
            search_rules_of(incoming.sampling.params),
            resumable=bool(asked.resume_secret),
            fence=asked.fence,
            computes_prompt=asked.computes_prompt,
            reuse=not asked.computes_prompt or incoming.sampling.params.prompt_logprobs is None,
            max_queue_s=asked.max_queue_s if asked.HasField("max_queue_s") else None,
        )
        self._order(event)
        if (answer := self._answers.pop(number, None)) is None:
            raise Unavailable("the instance stops")
        if isinstance(answer, ReservationRefused):
            raise Overloaded(
                answer.why, reason=answer.reason, predicted_tbt_s=answer.tbt_s, slo_s=asked.tbt_slo_s, retry_after_s=1.0
            )
        transfer = inbound_transfer(number, self._layout, tokens, answer.held)
        output = RequestOutput(
            incoming.request_id, transfer.generation, asked.resume_secret, incoming.chain_root, answers=[]
        )
        live = LiveRequest(incoming, event, stores, transfer, output, self._clock())
        live.span = self._spans.begin("decode", asked.sequence.traceparent, request=incoming.request_id)
        self._live.add(live)
        self.taken += 1
        self.empty.clear()
        return live, answer.tbt_s

    def get(self, transfer_id: int, generation: int) -> LiveRequest | None:
        """Return a transfer's request; None if the request is unknown, has ended or has another generation."""
        live = self._live.requests.get(transfer_id)
        return live if live is not None and live.transfer.matches(generation) and not live.ending else None

    def open(self, live: LiveRequest, send_verdict: Callable[[InboundTransfer], None], *, older: bool) -> None:
        """Bind a transfer's blocks: slices may arrive from now on, and `send_verdict` reports the end.

        `older`: the KV may be older than a deletion of such blocks, so no block is kept.

        Raises:
            TransferFailed: the transfer was opened before, or has ended.
        """
        if live.transfer.state is not TransferState.PROMISED:
            raise TransferFailed(f"transfer {live.id} was opened before")
        self._order(TransferOpened(live.id, older))
        if not live.table:
            raise TransferFailed(f"transfer {live.id} is over")
        live.send_verdict = send_verdict

    def transfer_progress(self, live: LiveRequest) -> None:
        """Note that a part of a request's KV has arrived."""
        now = self._clock()
        if now - live.progress_at >= self.core.settings.lease_s / PROGRESS_PER_LEASE:
            live.progress_at = now
            self._driver.post(TransferProgress(live.id))

    def transfer_complete(self, live: LiveRequest) -> None:
        """Note that all of a request's KV has arrived. The scheduler is told once the KV is where steps compute."""
        self._spans.instant("transfer.complete", request=live.request_id, transfer=live.id)
        loading = self._engine.load()
        if loading is None:
            self._order(TransferComplete(live.id))
        else:
            loading.add_done_callback(lambda done: self._loaded(live, done))

    def _loaded(self, live: LiveRequest, done: "asyncio.Future[None]") -> None:
        if not done.cancelled() and done.exception() is None:  # else the engine has died
            self._post(TransferComplete(live.id))

    def abort(self, live: LiveRequest, why: str) -> None:
        """End a request early."""
        self._post(AbortRequest(live.id, why, live.transfer.leading))

    # --- conductors ------------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Note that a conductor has opened a stream."""
        number = self._streams[subscriber] = next(self._stream_numbers)
        self._post(StreamOpened(number, conductor_identity(subscriber.conductor)))

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Note that a conductor's stream has ended. Idempotent."""
        if (number := self._streams.pop(subscriber, None)) is not None:
            for live in self._live.requests.values():
                if live.subscriber is subscriber:
                    live.subscriber = None
            self._post(StreamClosed(number))

    def start(self, subscriber: Subscriber, message: decode_pb2.StartSequence) -> None:
        """Start a request with the answers' first tokens, or compute the prompt here."""
        live = self.get(message.transfer_id, message.generation)
        if live is None or live.request_id != message.request_id:
            why = f"there is no transfer {message.transfer_id} here (any more)"
            subscriber.failed(message.request_id, why, transfer=True)
        elif (error := self._live.start_error(live, message, subscriber)) is not None:
            subscriber.failed(message.request_id, error)
        else:
            live.subscriber, live.gather, stream = subscriber, message.gather, self._streams[subscriber]
            if message.compute_prompt:
                live.compute(message, self._clock())
                order: Event = ComputePrompt(live.id, stream, live.gather)
                if live.prompt is not None:
                    held, sources = tuple(message.held_blocks), live.prompt.kv_sources()
                    order = QueuePrompt(live.id, stream, live.gather, message.delay_s, held, sources)
                self._order(order)
                return
            finishes, candidates = live.begin(message, self._max_tokens)
            self._order(
                StartDecoding(live.id, stream, finishes[0], finishes[1:], candidates, *live.known, patient=live.gather)
            )

    def stop(self, message: decode_pb2.CancelSequence) -> None:
        """End one of a request's answers; for the conductor, the answer is complete; other answers continue."""
        live = self.get(message.transfer_id, message.generation)
        if live is not None and live.request_id == message.request_id and message.choice < len(live.sequences):
            live.sequences[message.choice].stopped = True
            if self.core.planner.run_in_flight is not None:
                self.running.cut(self.core.planner.run_in_flight.run.step)

    def resume(self, subscriber: Subscriber, message: decode_pb2.ResumeSequence) -> None:
        """Let a conductor take a request over, or read the retained output."""
        self._driver.settle()  # so that the scheduler knows all that the executor knows
        if self.log.knows(message):
            positions = message.from_position, *(position.from_position for position in message.further)
            self._order(AdoptRequest(message.transfer_id, self._streams[subscriber], message.fence, positions))
        else:
            subscriber.failed(message.request_id, "there is no such sequence here (any more)")

    def cancel(self, subscriber: Subscriber, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        """Cancel a request, unless another conductor has the request now; return how far the request was."""
        live = self.get(message.transfer_id, message.generation) or self._live.promised(message, subscriber)
        if live is None or live.request_id != message.request_id or live.subscriber not in (None, subscriber):
            return kv_pb2.CANCEL_OUTCOME_UNKNOWN
        before = live.transfer.state is TransferState.PROMISED
        live.subscriber = None
        self.abort(live, "cancelled")
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if before else kv_pb2.CANCEL_OUTCOME_IN_FLIGHT

    def give_up(
        self,
        subscriber: Subscriber,
        order: Order,
        why: str,
    ) -> None:
        """End the request if an order cannot be carried out, unless another conductor has the request."""
        live = self.get(order.transfer_id, order.generation)
        if live is not None and live.request_id == order.request_id and live.subscriber in (None, subscriber):
            live.subscriber = None
            self.abort(live, why)
        subscriber.failed(order.request_id, why)

    # --- the engine ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run steps until cancelled.

        Raises:
            Unavailable: the engine died and every request has failed.
        """
        try:
            await self.running.run()
        except MoonpoolError as error:
            self.die(f"the engine died: {error}")
            raise Unavailable(self.dead) from error
        finally:
            self.die("the instance stops")
            await self.io.quiet()

    async def failure(self) -> NoReturn:
        """Wait until the scheduler fails; raise Internal then."""
        await self._driver.failure()

    def close(self) -> None:
        """Take no more events, and close the journal."""
        self._driver.close()

    def die(self, why: str) -> None:
        """End every request. The engine must not compute any more."""
        if not self.dead:
            self.dead = why
            self.running.close()
            self.io.closed = True
            self._post(EngineDied(why))

    def _post(self, event: Event) -> None:
        self._driver.tell(event)
        self.notify()

    def _order(self, event: Event) -> None:
        """Carry out a peer's order; an error ends the request, the call or the stream."""
        self._driver.ask(event)
        self.notify()

    def _order_from_pool(self, event: DeleteKV | LendBlocks) -> None:
        if isinstance(event, DeleteKV) and self.recent is not None:
            self.recent.delete(event.selection, everything=event.everything, ttl_s=dict(event.ttl_s))
        self._order(event)

    def _perform(self, action: Action) -> None:
        match action:
            case StartRun():
                self.running.order(action)
            case StopRun(step, hurried):
                self.running.cut(step, hurried=hurried)
            case AppendBlock() | SetBlockTable() | BeginPrompt():
                self._note(action)
            case ReservationGranted(number) | ReservationRefused(number):
                self._answers[number] = action
            case StoreBlock(_, number):
                self.io.store(action, self._live.sequences[number])
            case FinishSequence() | ForkSequences() | AnswersRanked() | RequestAborted() | RequestFreed():
                self._report(action)
            case RequestAdopted() | FenceConductor() | RequestParked() | DropOutputLog():
                self.log.perform(action)
                self._recount()
            case SwapOut() | SwapIn() | SwapDrop():
                self.io.swap(action)
            case LoadBlocks() | CancelIo():
                self._load(action)
            case StopReceiving(_, number):
                self.io.stop(action, self._live.requests[number])
            case MoveSlots() | KVDeleted() | BlocksLent():
                self._move_or_answer(action)

    def _load(self, action: LoadBlocks | CancelIo) -> None:
        """Load a prompt's prefix, or stop loading."""
        if isinstance(action, CancelIo):
            self.io.cancel(action.io)
            return
        live = self._live.requests[action.id]
        assert live.prompt is not None, "only whole prompts are loaded"
        source = live.prompt.sources[action.source].instance
        self.io.load(action.io, BlockRead.of_prompt(action, live.incoming, source, live.prompt.note_load))

    def _note(self, action: AppendBlock | SetBlockTable | BeginPrompt) -> None:
        """Note what a sequence has now."""
        sequence = self._live.sequences[action.id]
        match action:
            case AppendBlock(_, block):
                sequence.table += (block,)
            case SetBlockTable(_, blocks):
                sequence.set_table(blocks)
            case BeginPrompt() if sequence.request.prompt is not None:
                sequence.request.prompt.told = action

    def _move_or_answer(self, action: MoveSlots | KVDeleted | BlocksLent) -> None:
        """Move window blocks in the pool, or take the answer to an order about the pool."""
        if isinstance(action, MoveSlots):
            self._engine.pool.move_slots(action.moves)
        else:
            self.pool.answered(action)

    def _report(self, action: FinishSequence | ForkSequences | AnswersRanked | RequestAborted | RequestFreed) -> None:
        """Report an answer's or a request's end. An internal error ends this request only."""
        if isinstance(action, RequestFreed):
            live = self._live.take(action.id)
            if live.span is not None:
                live.span.attributes["tokens"] = sum([max(0, sequence.output.length) for sequence in live.sequences])
                self._spans.end(live.span)
            self._gone(live, retained=action.retained)
            return
        sequences, requests, number = self._live.sequences, self._live.requests, action.id
        live = sequences[number].request if isinstance(action, FinishSequence) else requests[number]
        try:
            self._report_one(action, live)
        except Exception:
            log.exception("an answer cannot be told: its request ends", request=live.request_id)
            live.ending, subscriber, live.subscriber = True, live.subscriber, None
            if subscriber is not None:  # the scheduler may have freed the request already
                subscriber.failed(live.request_id, "a defect: its answer cannot be told")
            self.abort(live, "a defect: its answer cannot be told")

    def _report_one(
        self, action: FinishSequence | ForkSequences | AnswersRanked | RequestAborted, live: LiveRequest
    ) -> None:
        match action:
            case FinishSequence(number, reason):
                sequence = self._live.sequences[number]
                sequence.output.finish = kv_pb2.FinishReason.ValueType(reason)
                sequence.send_new()
            case ForkSequences() | AnswersRanked():
                live.advance_search(action, self._max_tokens)
            case RequestAborted(why=why):
                live.end(why)

    def _gone(self, live: LiveRequest, *, retained: bool) -> None:
        live.transfer.fail("ended")
        live.ending = True
        for sequence in live.sequences:
            self.running.forget(sequence)
        if retained:
            self.log.ended(live)
        self._recount()

    def _recount(self) -> None:
        """Update `empty` and notify, after a request came or went."""
        (self.empty.clear if self._live.requests else self.empty.set)()
        self.notify()


def sequence_lengths(incoming: IncomingRequest, config: DecodeSettings, max_tokens: int) -> tuple[int, int]:
    """Return number of tokens with KV that will arrive, and the most tokens in each sequence.

    Raises:
        InvalidRequest: the request can never fit, or no token is to be generated; names the field.
    """
    tokens, total = len(incoming.token_ids), incoming.sampling.total_tokens(max_tokens)
    if incoming.spec.width > config.max_num_seqs:
        field = "beam_width" if incoming.sampling.params.deferred else "n"
        raise InvalidRequest(f"sequence.sampling.{field}", f"this instance has {config.max_num_seqs} batch slots")
    needed = most_blocks(config, incoming.sampling.prompt_tokens, total, incoming.spec.width)
    if needed > config.num_blocks:
        have = f"this instance has {config.num_blocks}"
        raise InvalidRequest("sequence.sampling.max_tokens", f"needs {needed} blocks, {have}")
    windows = min(needed, incoming.spec.width * (config.window_blocks + 2)) if config.window_blocks else 0
    if windows > config.window_slots:
        have = f"this instance has {config.window_slots}"
        raise InvalidRequest("sequence.sampling.n", f"needs {windows} window blocks, {have}")
    return tokens, total


def inbound_transfer(number: int, layout: KVLayout, tokens: int, held: int) -> InboundTransfer:
    """Return the transfer for a request's KV; the leading `held` blocks are cached here."""
    blocks = layout.blocks_for(tokens)
    last = layout.valid_tokens(tokens, blocks - 1)
    return InboundTransfer(number, number % MAX_GENERATION + 1, layout, blocks, held, last)
