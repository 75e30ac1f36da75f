"""What the decode core decides is done here: steps, transfers, copies, write-back, and what conductors are told."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from moonpool.cluster import Notify
from moonpool.drive.driver import Driver
from moonpool.drive.journal import JournalWriter
from moonpool.engine.handle import Engine
from moonpool.engine.incoming import IncomingRequest
from moonpool.engine.pool_calls import PoolCalls
from moonpool.errors import MoonpoolError, Overloaded, TransferFailed, Unavailable
from moonpool.sched.forgetting import Forgot
from moonpool.sched.lending import Lent
from moonpool.streams.block_reader import BlockReader
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.copies import Copies
from services.decode.core.actions import (
    Action,
    Adopted,
    Cut,
    Ending,
    Fenced,
    Finish,
    Forget,
    Gone,
    Grew,
    Load,
    Parked,
    Promised,
    Ranked,
    Refused,
    Run,
    Select,
    StopReceiving,
    Store,
    SwapDrop,
    SwapIn,
    SwapOut,
    Table,
)
from services.decode.core.events import (
    Adopt,
    Arrived,
    Compute,
    Died,
    Event,
    Heard,
    Open,
    Reserve,
    Start,
    Stop,
    StreamClosed,
    StreamOpened,
)
from services.decode.core.machine import DecodeCore
from services.decode.limits import inbound, sequence_lengths
from services.decode.live import LiveRequest, LiveRequests, rules_of
from services.decode.running import Running
from services.decode.subscriber import Subscriber, identity
from services.decode.token_log import TokenLog

log = get_logger(__name__)

HEARD_PER_LEASE = 8  # the core is told that a transfer lives so often in a lease, not with every frame


class DecodeShell:
    """Drives the core of one instance.

    Args:
        core: decides.
        engine: runs the steps.
        max_tokens: longest sequence the model takes.
        write_back: takes the answers' full blocks.
        open_reader: makes the client of a kvstore at an address, from which preempted sequences come back.
        spans: where spans are recorded.
        notify: called when load or keys have changed.
        journal: records what the core was told.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        core: DecodeCore,
        engine: Engine,
        max_tokens: int,
        write_back: WriteBack,
        open_reader: Callable[[str], BlockReader],
        spans: Recorder,
        notify: Notify,
        journal: JournalWriter | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._clock = clock
        self._layout = engine.layout
        self._max_tokens = max_tokens
        self._spans = spans
        self.notify = notify
        self._driver: Driver[Event, Action] = Driver(core, self._perform, clock=clock, journal=journal)
        self._live = LiveRequests()
        self._next = 1
        self._answers: dict[int, Promised | Refused] = {}
        self.taken = 0
        """Promises given so far."""
        self.pool = PoolCalls(self._order, self._post)
        self._streams: dict[Subscriber, int] = {}
        self._stream_numbers = itertools.count(1)
        self.log = TokenLog(self._live, self._streams)
        self.running = Running(engine, self._live, max_tokens, spans, self._driver.post, self.end, notify)
        self.copies = Copies(engine, write_back, open_reader, self._post, clock)
        self.empty = asyncio.Event()
        self.empty.set()
        self.dead = ""

    def __len__(self) -> int:
        return len(self._live.requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.requests.values()))

    @property
    def step_in_flight(self) -> bool:
        """Whether the engine computes, or is about to."""
        return self.core.planner.flight is not None

    def count(self, *states: TransferState) -> int:
        """Requests that were not started and whose transfer is in one of these states."""
        return sum(not live.started and live.transfer.state in states for live in self._live.requests.values())

    # --- requests --------------------------------------------------------------------------------------------------

    def reserve(
        self,
        incoming: IncomingRequest,
        stores: Sequence[kv_pb2.Instance],
        tbt_slo_s: float,
        conductor: kv_pb2.Instance | None,
        starts_in_s: float,
        *,
        secret: bytes = b"",
        fence: int = 0,
    ) -> tuple[LiveRequest, float]:
        """Promises room; `tbt_slo_s` is to be kept from `starts_in_s` seconds on.

        Who knows the `secret`, if there is one, may resume the sequence with a higher `fence`.

        Returns:
            The request, and the predicted seconds between its tokens.

        Raises:
            Overloaded: there is no room now, or the time between tokens cannot be kept.
            InvalidRequest: it could never fit, or there is nothing to generate.
            Unavailable: the core has stopped.
        """
        tokens, total = sequence_lengths(incoming, self.core.config, self._max_tokens)
        number, self._next = self._next, self._next + incoming.width
        who = "" if conductor is None else identity(conductor)
        keys, prompt = tuple(incoming.keys), incoming.sampling.prompt_tokens
        width, targets, beams = incoming.width, len(stores), rules_of(incoming.sampling.params)
        asked = keys, tokens, prompt, total, tbt_slo_s, who, targets, width, starts_in_s
        kept = incoming.priority, incoming.tenant, incoming.transient, incoming.logprob_bytes
        self._order(Reserve(number, *asked, beams, bool(secret), fence, *kept))
        if (answer := self._answers.pop(number, None)) is None:
            raise Unavailable("the instance stops")
        if isinstance(answer, Refused):
            raise Overloaded(
                answer.why, reason=answer.reason, predicted_tbt_s=answer.tbt_s, slo_s=tbt_slo_s, retry_after_s=1.0
            )
        transfer = inbound(number, self._layout, tokens, answer.held)
        live = LiveRequest(incoming, stores, transfer, self._clock(), secret, who)
        self._live.add(live)
        self.taken += 1
        self.empty.clear()
        return live, answer.tbt_s

    def get(self, transfer_id: int, generation: int) -> LiveRequest | None:
        """The request of a transfer; None when it is unknown, has ended or has another generation."""
        live = self._live.requests.get(transfer_id)
        return live if live is not None and live.transfer.matches(generation) and not live.ending else None

    def open(self, live: LiveRequest, send_verdict: Callable[[InboundTransfer], None], *, older: bool) -> None:
        """Binds a transfer's blocks: slices may come from now on, and `send_verdict` says how that ended.

        `older`: what comes may be older than a deletion of such blocks, so nothing of it is kept.

        Raises:
            TransferFailed: it was opened before, or is over.
        """
        if live.transfer.state is not TransferState.PROMISED:
            raise TransferFailed(f"transfer {live.id} was opened before")
        self._order(Open(live.id, older))
        if not live.table:
            raise TransferFailed(f"transfer {live.id} is over")
        live.send_verdict = send_verdict

    def heard(self, live: LiveRequest) -> None:
        """Something of the transfer came."""
        now = self._clock()
        if now - live.heard_at >= self.core.config.lease_s / HEARD_PER_LEASE:
            live.heard_at = now
            self._driver.post(Heard(live.id))

    def arrived(self, live: LiveRequest) -> None:
        """All KV of a request has come."""
        self._spans.instant("transfer.complete", request=live.request_id, transfer=live.id)
        self._order(Arrived(live.id))

    def end(self, live: LiveRequest, why: str) -> None:
        """Ends a request early."""
        self._post(Stop(live.id, why, live.transfer.leading))

    # --- conductors ------------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """A conductor has opened a stream."""
        number = self._streams[subscriber] = next(self._stream_numbers)
        self._post(StreamOpened(number, identity(subscriber.conductor)))

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """A conductor's stream has ended; may be called again."""
        if (number := self._streams.pop(subscriber, None)) is not None:
            for live in self._live.requests.values():
                if live.subscriber is subscriber:
                    live.subscriber = None
            self._post(StreamClosed(number))

    def start(self, subscriber: Subscriber, message: decode_pb2.StartSequence) -> None:
        """Starts a request with its answers' first tokens, or lets its prompt be computed here."""
        live = self.get(message.transfer_id, message.generation)
        if live is None or live.request_id != message.request_id:
            why = f"there is no transfer {message.transfer_id} here (any more)"
            subscriber.failed(message.request_id, why, transfer=True)
        elif (misfit := self._live.misfit(live, message, subscriber)) is not None:
            subscriber.failed(message.request_id, misfit)
        else:
            live.subscriber, live.gather, stream = subscriber, message.gather, self._streams[subscriber]
            if message.compute_prompt:
                live.compute()
                self._order(Compute(live.id, stream, patient=live.gather))
                return
            finishes, candidates = live.begin(message, self._max_tokens)
            self._order(Start(live.id, stream, finishes[0], finishes[1:], candidates, *live.known, patient=live.gather))

    def stop(self, message: decode_pb2.CancelSequence) -> None:
        """One answer of a request is complete for its conductor; the others go on."""
        live = self.get(message.transfer_id, message.generation)
        if live is not None and live.request_id == message.request_id and message.choice < len(live.sequences):
            live.sequences[message.choice].stopped = True
            if self.core.planner.flight is not None:
                self.running.cut(self.core.planner.flight.run.step)

    def resume(self, subscriber: Subscriber, message: decode_pb2.ResumeSequence) -> None:
        """Lets a conductor have a sequence that was another's, or read what is kept of one."""
        self._driver.settle()  # so that the core knows what is known here
        if self.log.knows(message):
            positions = message.from_position, *(it.from_position for it in message.further)
            self._order(Adopt(message.transfer_id, self._streams[subscriber], message.fence, positions))
        else:
            subscriber.failed(message.request_id, "there is no such sequence here (any more)")

    def cancel(self, subscriber: Subscriber, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        """Cancels a request, unless another conductor has it now; returns the state in which it was."""
        live = self.get(message.transfer_id, message.generation) or self._live.promised(message, subscriber)
        if live is None or live.request_id != message.request_id or live.subscriber not in (None, subscriber):
            return kv_pb2.CANCEL_OUTCOME_UNKNOWN
        before = live.transfer.state is TransferState.PROMISED
        live.subscriber = None
        self.end(live, "cancelled")
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if before else kv_pb2.CANCEL_OUTCOME_IN_FLIGHT

    def give_up(
        self,
        subscriber: Subscriber,
        order: decode_pb2.StartSequence | decode_pb2.CancelSequence | decode_pb2.ResumeSequence,
        why: str,
    ) -> None:
        """An order cannot be carried out: its request ends, if no other conductor has it."""
        live = self.get(order.transfer_id, order.generation)
        if live is not None and live.request_id == order.request_id and live.subscriber in (None, subscriber):
            live.subscriber = None
            self.end(live, why)
        subscriber.failed(order.request_id, why)

    # --- the engine ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled.

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
            await self.copies.quiet()

    async def failure(self) -> NoReturn:
        """Waits until the core fails where no request is to blame; raises Internal then."""
        await self._driver.failure()

    def close(self) -> None:
        """Takes no more events; the journal is whole."""
        self._driver.close()

    def die(self, why: str) -> None:
        """Ends every request; the engine must not compute any more."""
        if not self.dead:
            self.dead = why
            self.running.close()
            self.copies.closed = True
            self._post(Died(why))

    def _post(self, event: Event) -> None:
        self._driver.tell(event)
        self.notify()

    def _order(self, event: Event) -> None:
        """Has done what a peer orders; raises what that meets, which ends the request, the call or the stream."""
        self._driver.ask(event)
        self.notify()

    def _perform(self, action: Action) -> None:
        match action:
            case Run():
                self.running.order(action)
            case Cut(step, hurried):
                self.running.cut(step, hurried=hurried)
            case Grew(number, block):
                self._live.sequences[number].table += (block,)
            case Table(number, blocks):
                self._live.sequences[number].bound(blocks)
            case Promised(number) | Refused(number):
                self._answers[number] = action
            case Store(_, number) | Load(_, number):
                self.copies.begin(action, self._live.sequences[number])
            case Finish() | Select() | Ranked() | Ending() | Gone():
                self._tell(action)
            case Adopted() | Fenced() | Parked() | Forget():
                self.log.perform(action)
                self._recount()
            case SwapOut() | SwapIn() | SwapDrop():
                self.copies.swap(action)
            case StopReceiving(_, number):
                self.copies.stop(action, self._live.requests[number])
            case Forgot() | Lent():
                self.pool.answered(action)

    def _tell(self, action: Finish | Select | Ranked | Ending | Gone) -> None:
        """An answer, or a request, is over or nearly so. A defect that this meets ends the request, and no other."""
        if isinstance(action, Gone):
            self._gone(self._live.take(action.id), logged=action.logged)
            return
        sequences, requests, number = self._live.sequences, self._live.requests, action.id
        live = sequences[number].request if isinstance(action, Finish) else requests[number]
        try:
            self._told(action, live)
        except Exception:
            log.exception("an answer cannot be told: its request ends", request=live.request_id)
            live.ending, subscriber, live.subscriber = True, live.subscriber, None
            if subscriber is not None:  # the core may be done with it already
                subscriber.failed(live.request_id, "a defect: its answer cannot be told")
            self.end(live, "a defect: its answer cannot be told")

    def _told(self, action: Finish | Select | Ranked | Ending, live: LiveRequest) -> None:
        match action:
            case Finish(number, reason):
                sequence = self._live.sequences[number]
                sequence.finish = kv_pb2.FinishReason.ValueType(reason)
                sequence.tell()
            case Select() | Ranked():
                live.follow(action, self._max_tokens)
            case Ending(why=why):
                live.end(why)

    def _gone(self, live: LiveRequest, *, logged: bool) -> None:
        live.transfer.fail("ended")
        live.ending = True
        if logged:
            self.log.ended(live)
        self._recount()

    def _recount(self) -> None:
        """The requests are others now."""
        (self.empty.clear if self._live.requests else self.empty.set)()
        self.notify()
