"""The step loop: sequences whose KV is whole get their next token, step by step, until they end.

Owns when a sequence joins the batch, what its end means (identity of the answer's blocks, write-back, everything given
back), and who is told. Knows nothing of gRPC.
"""

import asyncio
import time
from array import array
from collections.abc import Callable

from moonpool.cost import SpeedTracker
from moonpool.engine.handle import Engine, StepResult
from moonpool.errors import MoonpoolError, Unavailable
from moonpool.sched.batch_scheduler import GOES_ON, BatchScheduler, DecodeSequence, StepPlan
from moonpool.streams.transfer import TransferState
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.seats import Seat, Seats
from services.decode.steps import Subscriber

log = get_logger(__name__)


class Generator:
    """Generates tokens for the seats whose KV has come and whose first token is known.

    Args:
        engine: runs the steps.
        scheduler: the batch.
        seats: whose turn it is.
        write_back: takes the answer's full blocks.
        spans: where spans are recorded.
        on_change: load or keys have changed.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: BatchScheduler,
        seats: Seats,
        write_back: WriteBack,
        spans: Recorder,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._seats = seats
        self._write_back = write_back
        self._spans = spans
        self.on_change = on_change
        self._wake = asyncio.Event()
        self._generating: dict[str, Seat] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.tracker = SpeedTracker(engine.speeds)
        self.dead = ""
        self.steps = 0

    # --- what happens to seats -------------------------------------------------------------------------------------

    def taken(self, seat: Seat) -> None:
        """Somebody got a seat."""
        self.empty.clear()
        self.on_change()

    def start(self, reader: Subscriber, message: decode_pb2.StartSequence) -> None:
        """The conductor knows the first token. The sequence joins the batch when its KV is whole."""
        seat = self._seats.get(message.transfer_id, message.generation)
        if seat is None or seat.arrival.request_id != message.request_id:
            reader.failed(message.request_id, f"there is no transfer {message.transfer_id} here (any more)")
            return
        if seat.first_token is not None:
            reader.failed(message.request_id, f"transfer {message.transfer_id} was started before")
            return
        if any(other.reader is reader and other.arrival.request_id == message.request_id for other in self._seats):
            reader.failed(message.request_id, "a sequence of this id is running already")
            return
        seat.first_token, seat.reader = message.first_token_id, reader
        self.on_change()
        self._join(seat)

    def arrived(self, seat: Seat) -> None:
        """All KV of a seat has come."""
        self._spans.instant("transfer.complete", request=seat.arrival.request_id, transfer=seat.transfer.transfer_id)
        self.on_change()
        self._join(seat)

    def cancel(self, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        """The request is wanted no more. Returns what the cancel met."""
        seat = self._seats.get(message.transfer_id, message.generation)
        if seat is None or seat.arrival.request_id != message.request_id:
            return kv_pb2.CANCEL_OUTCOME_UNKNOWN
        before = seat.transfer.state is TransferState.PROMISED
        seat.reader = None
        self.end(seat, "cancelled")
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if before else kv_pb2.CANCEL_OUTCOME_IN_FLIGHT

    def unsubscribe(self, reader: Subscriber) -> None:
        """A conductor has gone: nobody wants its sequences."""
        for seat in self._seats:
            if seat.reader is reader:
                seat.reader = None
                self.end(seat, "the conductor's stream ended")

    def end(self, seat: Seat, reason: str) -> None:
        """Ends a seat before its time; one in a running step leaves when the step is done."""
        if seat.sequence is None:
            self._fail(seat, reason)
            return
        if seat.reader is not None:
            seat.reader.failed(seat.arrival.request_id, reason)
            seat.reader = None
        if self._scheduler.remove(seat.key) is not None:
            self._leave(seat)
        self.on_change()

    def _fail(self, seat: Seat, reason: str) -> None:
        """Ends a seat that is not generating."""
        seat.transfer.fail(reason)
        if seat.source is not None and not seat.complete:
            seat.source.verdict(seat.transfer)
        if seat.reader is not None:
            seat.reader.failed(seat.arrival.request_id, reason)
        self._leave(seat)

    def _join(self, seat: Seat) -> None:
        """Hands the sequence to the batch once both its KV and its first token are there."""
        if seat.first_token is None or not seat.complete:
            return
        arrival = seat.arrival
        tokens = array("i", arrival.token_ids)
        tokens.append(seat.first_token)
        history = arrival.history(tokens)
        seat.sequence = DecodeSequence(seat.key, tokens, seat.block_table, arrival.sampling, history)
        reason = self._scheduler.admit(seat.sequence)
        if reason != GOES_ON:
            self._tell(seat, seat.sequence.output_tokens, [], reason)
            self._leave(seat)
            return
        self._generating[seat.key] = seat
        self._wake.set()

    def _tell(
        self, seat: Seat, position: int, token_ids: list[int], reason: kv_pb2.FinishReason.ValueType
    ) -> Subscriber | None:
        if seat.reader is not None:
            seat.reader.tokens(seat.arrival.request_id, position, token_ids, reason)
            seat.reader.flush()
        return seat.reader

    def _leave(self, seat: Seat) -> None:
        """Gives everything back; what generation has filled is kept for reuse, and stored."""
        self._generating.pop(seat.key, None)
        keys, parents, blocks = self._seats.register_answer(seat)
        for store in seat.stores if blocks and not self.dead else ():
            room = self._write_back.room(store, len(blocks))
            if room:
                self._scheduler.blocks.acquire(blocks[:room])
                self._write_back.submit(store, keys[:room], parents[:room], seat.arrival.tenant, blocks[:room])
        self._seats.leave(seat)
        if not len(self._seats):
            self.empty.set()
        self.on_change()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled.

        Raises:
            Unavailable: the engine died; every seat has failed and nothing can be done here any more.
        """
        try:
            while True:
                plan = self._scheduler.plan()
                if plan is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                result = await self._engine.run(plan.step)
                self._done(plan, result)
        except MoonpoolError as error:
            self.die(f"the engine died: {error}")
            raise Unavailable(self.dead) from error

    def die(self, reason: str) -> None:
        """Ends every seat: nothing can be computed any more, and the engine is quiet for ever."""
        if self.dead:
            return
        self.dead = reason
        if self._scheduler.step_in_flight is not None:
            for sequence in self._scheduler.step_done((), aborted=True).removed:
                self._leave(self._generating[sequence.request_id])
        for seat in self._seats:
            self.end(seat, reason)

    def _done(self, plan: StepPlan, result: StepResult) -> None:
        outcome = self._scheduler.step_done(result.sampled, aborted=result.aborted)
        self.steps += 1
        self._record(plan, result)
        for sequence in outcome.removed:
            self._leave(self._generating[sequence.request_id])
        for token in outcome.tokens:
            seat = self._generating[token.sequence.request_id]
            self._tell(seat, token.position, [token.token_id], token.finish_reason)
            if token.finish_reason != GOES_ON:
                self._leave(seat)

    def _record(self, plan: StepPlan, result: StepResult) -> None:
        seconds = (result.end_ns - result.start_ns) / 1e9
        if not result.aborted:
            self.tracker.observe_decode(len(plan.sequences), plan.context_tokens, seconds)
        if self._spans.enabled:
            requests = [self._request_of(sequence) for sequence in plan.sequences]
            self._spans.add(
                "decode.step",
                result.start_ns,
                result.end_ns,
                step=plan.step.step_id,
                requests=requests,
                sequences=len(requests),
            )

    def _request_of(self, sequence: DecodeSequence) -> str:
        return self._generating[sequence.request_id].arrival.request_id


async def watch_leases(seats: Seats, generator: Generator, wake: asyncio.Event) -> None:
    """Ends seats of which nothing is heard for longer than their lease; until cancelled.

    Args:
        seats: with their leases.
        generator: ends them.
        wake: set when the first seat is taken; all leases have one length, so that a later seat never expires earlier.
    """
    while True:
        due = seats.next_expiry()
        wake.clear()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                await wake.wait()
        except TimeoutError:
            now = time.monotonic()
            for seat in seats.expired(now):
                log.warning("lease over", request=seat.arrival.request_id, transfer=seat.transfer.transfer_id)
                generator.end(seat, f"nothing was heard of the transfer for {seats.lease_s:g} s")
