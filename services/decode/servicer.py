"""The DecodeService contract: messages in, messages out. Translation only; what they mean is decided elsewhere."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool.cluster.instances import check_instance
from moonpool.cost import decode_step_seconds
from moonpool.errors import InvalidRequest, Overloaded, Unavailable, Unsupported
from moonpool.rpc.wire import PayloadMessage
from moonpool.rpc.writing import write_each
from moonpool.streams.outbox import STALL_S
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream, Write
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.receiver import Receiver
from services.decode.seats import Seat
from services.decode.steps import Subscriber
from services.decode.work import Work

MAX_STORES = 16

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer:
    """Serves one decode instance's work."""

    def __init__(self, work: Work, gauges: Gauges) -> None:
        self._work = work
        self._gauges = gauges

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """Promises room, or refuses."""
        work = self._work
        work.check_open()
        stores = _stores(request)
        if request.HasField("tbt_slo_s") and not request.tbt_slo_s > 0:
            raise InvalidRequest("tbt_slo_s", "must be above 0")
        arrival = work.plan.arrival(request.sequence)
        predicted = self._predicted_tbt_s(len(arrival.token_ids))
        if request.HasField("tbt_slo_s") and predicted > request.tbt_slo_s:
            raise Overloaded(
                f"a token every {predicted:.4g} s is predicted",
                reason="tbt_slo",
                predicted_tbt_s=predicted,
                slo_s=request.tbt_slo_s,
                retry_after_s=1.0,
            )
        seat = work.reserve(arrival, stores, time.monotonic())
        return decode_pb2.ReserveResponse(
            target=self._target(seat), lease_s=work.seats.lease_s, predicted_tbt_s=predicted
        )

    async def ReceiveKV(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], context: Context
    ) -> None:
        """Receives KV of many transfers from one prefill process."""
        await _ReceiveStream(self._work).run(requests, context)

    async def Steps(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context
    ) -> None:
        """Starts and cancels sequences; returns tokens."""
        await _StepsStream(self._work).run(requests, context)

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        """Everything the instance holds."""
        return decode_pb2.DecodeStatsResponse(instance=self._work.instance, gauges=self._gauges.read())

    def _predicted_tbt_s(self, tokens: int) -> float:
        """Seconds per step with one more sequence of so many tokens, and all that have been promised, in the batch."""
        work = self._work
        context = sum(len(seat.arrival.token_ids) for seat in work.seats if seat.sequence is None)
        context += work.scheduler.context_tokens + tokens
        sequences = min(len(work.seats) + 1, work.scheduler.max_batch)
        return decode_step_seconds(work.generator.tracker.speeds, sequences, context)

    def _target(self, seat: Seat) -> kv_pb2.TransferTarget:
        return kv_pb2.TransferTarget(
            decode=self._work.instance,
            transfer_id=seat.transfer.transfer_id,
            generation=seat.transfer.generation,
            held_blocks=seat.transfer.held_blocks,
        )


def _stores(request: decode_pb2.ReserveRequest) -> list[kv_pb2.Instance]:
    """The kvstores that the answer goes to."""
    stores = [request.write_back] if request.HasField("write_back") else []
    if stores:
        check_instance(request.write_back, "write_back")
    if len(request.replicas) > MAX_STORES:
        raise InvalidRequest("replicas", f"at most {MAX_STORES} kvstores")
    for index, replica in enumerate(request.replicas):
        check_instance(replica, f"replicas[{index}]")
    return [*stores, *request.replicas]


class _ReceiveStream(ServerStream[decode_pb2.ReceiveKVRequest]):
    """KV of many transfers from one prefill process."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.closing)
        self._work = work
        self._receiver: Receiver

    async def on_hello(self, message: decode_pb2.ReceiveKVRequest) -> None:
        """Takes the engine's own KV only."""
        work, generator = self._work, self._work.generator
        check_hello(message.hello, namespace=work.plan.namespace, layout=work.layout)
        self._receiver = Receiver(
            message.hello.sender,
            work.instance,
            work.seats,
            work.pool,
            generator.arrived,
            generator.end,
            generator.on_change,
        )
        self.outbox = self._receiver.outbox
        work.receivers.add(self._receiver)
        self._receiver.welcome()

    def on_message(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview) -> None:
        """Opens, frames and closes of transfers."""
        self._receiver.take(message, payload)

    def end(self) -> None:
        """What has not come whole will not come."""
        if self._receiver in self._work.receivers:
            self._work.receivers.discard(self._receiver)
            self._work.retire(self._receiver)


class _StepsStream(ServerStream[decode_pb2.StepsRequest]):
    """Starts and cancels from one conductor, tokens to it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.closing)
        self._work = work
        self._reader: Subscriber

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Any conductor is served."""
        self._reader = Subscriber(message.hello.conductor)
        self._work.subscribers.add(self._reader)

    def on_message(self, message: decode_pb2.StepsRequest, payload: memoryview) -> None:
        """One order."""
        match message.WhichOneof("message"):
            case "start":
                _start(message.start, self._reader, self._work)
            case "cancel":
                self._reader.cancelled(message.cancel.request_id, self._work.generator.cancel(message.cancel))
            case "resume":
                raise Unsupported("resuming a sequence is not built yet")
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    async def room(self) -> None:
        """Waits while too many answers were not read."""
        await self._reader.room()

    async def write_answers(self, write: Write) -> None:
        """Messages as they come, those that wait merged."""
        try:
            await write_each(write, self._reader.next, STALL_S)
        except TimeoutError:
            raise Unavailable(f"{self._reader.conductor.id} read nothing for {STALL_S:g} s") from None

    def on_closing(self) -> None:
        """What waits still goes out."""
        self.finish()

    def finish(self) -> None:
        """Nothing more will wait."""
        self._reader.close()

    def end(self) -> None:
        """The conductor's sequences end."""
        self._work.subscribers.discard(self._reader)
        self._work.generator.unsubscribe(self._reader)


def _start(message: decode_pb2.StartSequence, reader: Subscriber, work: Work) -> None:
    if work.generator.dead:
        reader.failed(message.request_id, work.generator.dead)
    elif not 0 <= message.first_token_id < work.plan.vocab_size:  # an engine must never meet such a token
        reader.failed(message.request_id, f"there is no token {message.first_token_id}")
    else:
        work.generator.start(reader, message)
