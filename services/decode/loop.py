"""The decode loop: sequences whose KV is complete get their next token, step by step, until they end."""

import asyncio
import time
from array import array
from collections.abc import Callable

from moonpool.cost import SpeedTracker
from moonpool.engine.handle import Engine
from moonpool.errors import MoonpoolError, Unavailable
from moonpool.sched.batch_scheduler import GOES_ON, BatchScheduler, DecodeSequence, DecodeStep
from moonpool.sched.steps import StepResult
from moonpool.streams.transfer import TransferState
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.requests import DecodeRequest, RequestTable
from services.decode.subscriber import Subscriber

log = get_logger(__name__)


class DecodeLoop:
    """Generates tokens for the requests whose KV has come and whose first token is known.

    Args:
        engine: runs the steps.
        scheduler: the batch.
        requests: all requests of the instance.
        write_back: takes the answer's full blocks.
        spans: where spans are recorded.
        notify: called when load or keys have changed.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: BatchScheduler,
        requests: RequestTable,
        write_back: WriteBack,
        spans: Recorder,
        notify: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._requests = requests
        self._write_back = write_back
        self._spans = spans
        self.notify = notify
        self._wake = asyncio.Event()
        self._generating: dict[str, DecodeRequest] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.tracker = SpeedTracker(engine.speeds)
        self.dead = ""
        self.steps = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def added(self) -> None:
        """A request was added to the table."""
        self.empty.clear()
        self.notify()

    def start(self, subscriber: Subscriber, message: decode_pb2.StartSequence) -> None:
        """Starts a request with its first token; the sequence joins the batch when its KV is complete."""
        request = self._requests.get(message.transfer_id, message.generation)
        if request is None or request.incoming.request_id != message.request_id:
            subscriber.failed(message.request_id, f"there is no transfer {message.transfer_id} here (any more)")
            return
        if request.first_token is not None:
            subscriber.failed(message.request_id, f"transfer {message.transfer_id} was started before")
            return
        if any(
            other.subscriber is subscriber and other.incoming.request_id == message.request_id
            for other in self._requests
        ):
            subscriber.failed(message.request_id, "a sequence of this id is running already")
            return
        request.first_token, request.subscriber = message.first_token_id, subscriber
        self.notify()
        self._join(request)

    def arrived(self, request: DecodeRequest) -> None:
        """All KV of a request has come."""
        self._spans.instant(
            "transfer.complete", request=request.incoming.request_id, transfer=request.transfer.transfer_id
        )
        self.notify()
        self._join(request)

    def cancel(self, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        """Cancels a request; returns the state in which it was."""
        request = self._requests.get(message.transfer_id, message.generation)
        if request is None or request.incoming.request_id != message.request_id:
            return kv_pb2.CANCEL_OUTCOME_UNKNOWN
        before = request.transfer.state is TransferState.PROMISED
        request.subscriber = None
        self.end(request, "cancelled")
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if before else kv_pb2.CANCEL_OUTCOME_IN_FLIGHT

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Ends all requests of a conductor whose stream has ended."""
        for request in self._requests:
            if request.subscriber is subscriber:
                request.subscriber = None
                self.end(request, "the conductor's stream ended")

    def end(self, request: DecodeRequest, reason: str) -> None:
        """Ends a request early; one in a running step is removed when the step is done."""
        if request.sequence is None:
            self._fail(request, reason)
            return
        if request.subscriber is not None:
            request.subscriber.failed(request.incoming.request_id, reason)
            request.subscriber = None
        if self._scheduler.remove(request.key) is not None:
            self._remove(request)
        self.notify()

    def _fail(self, request: DecodeRequest, reason: str) -> None:
        """Ends a request that is not generating."""
        request.transfer.fail(reason)
        if request.send_verdict is not None and not request.complete:
            request.send_verdict(request.transfer)
        if request.subscriber is not None:
            request.subscriber.failed(request.incoming.request_id, reason)
        self._remove(request)

    def _join(self, request: DecodeRequest) -> None:
        """Hands the sequence to the batch once both its KV and its first token are known."""
        if request.first_token is None or not request.complete:
            return
        incoming = request.incoming
        tokens = array("i", incoming.token_ids)
        tokens.append(request.first_token)
        history = incoming.history(tokens)
        request.sequence = DecodeSequence(request.key, tokens, request.block_table, incoming.sampling, history)
        reason = self._scheduler.admit(request.sequence)
        if reason != GOES_ON:
            self._tell(request, request.sequence.output_tokens, [], reason)
            self._remove(request)
            return
        self._generating[request.key] = request
        self._wake.set()

    def _tell(
        self, request: DecodeRequest, position: int, token_ids: list[int], reason: kv_pb2.FinishReason.ValueType
    ) -> Subscriber | None:
        if request.subscriber is not None:
            request.subscriber.tokens(request.incoming.request_id, position, token_ids, reason)
            request.subscriber.flush()
        return request.subscriber

    def _remove(self, request: DecodeRequest) -> None:
        """Removes a request; full blocks of its answer stay cached and are written back to the kvstores."""
        self._generating.pop(request.key, None)
        keys, parents, blocks = self._requests.register_answer(request)
        for store in request.stores if blocks and not self.dead else ():
            room = self._write_back.room(store, len(blocks))
            if room:
                self._scheduler.blocks.acquire(blocks[:room])
                self._write_back.submit(store, keys[:room], parents[:room], request.incoming.tenant, blocks[:room])
        self._requests.remove(request)
        if not len(self._requests):
            self.empty.set()
        self.notify()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled.

        Raises:
            Unavailable: the engine died and every request has failed.
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
        """Ends every request; the engine must not compute any more."""
        if self.dead:
            return
        self.dead = reason
        if self._scheduler.step_in_flight is not None:
            for sequence in self._scheduler.step_done((), aborted=True).removed:
                self._remove(self._generating[sequence.request_id])
        for request in self._requests:
            self.end(request, reason)

    def _done(self, plan: DecodeStep, result: StepResult) -> None:
        outcome = self._scheduler.step_done(result.sampled, aborted=result.aborted)
        self.steps += 1
        self._record(plan, result)
        for sequence in outcome.removed:
            self._remove(self._generating[sequence.request_id])
        for token in outcome.tokens:
            request = self._generating[token.sequence.request_id]
            self._tell(request, token.position, [token.token_id], token.finish_reason)
            if token.finish_reason != GOES_ON:
                self._remove(request)

    def _record(self, plan: DecodeStep, result: StepResult) -> None:
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
        return self._generating[sequence.request_id].incoming.request_id


async def watch_leases(requests: RequestTable, loop: DecodeLoop, wake: asyncio.Event) -> None:
    """Ends requests whose lease is over; runs until cancelled.

    Args:
        requests: with their leases.
        loop: ends them.
        wake: set when a request is added. All leases have one length, so a later one never ends earlier.
    """
    while True:
        due = requests.next_expiry()
        wake.clear()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                await wake.wait()
        except TimeoutError:
            now = time.monotonic()
            for request in requests.expired(now):
                log.warning("lease is over", request=request.incoming.request_id, transfer=request.transfer.transfer_id)
                loop.end(request, f"no frame of the transfer came for {requests.lease_s:g} s")
