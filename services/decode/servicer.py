"""The DecodeService contract: translates messages into calls of a `DecodeInstance` and back."""

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool.cluster.instances import check_instance
from moonpool.errors import DeadlineExceeded, InvalidRequest, Unavailable
from moonpool.rpc.wire import PayloadMessage
from moonpool.rpc.writing import write_each
from moonpool.streams.lanes.landing import Landing
from moonpool.streams.outbox import STALL_S
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream, Write
from moonpool.telemetry.gauges import Gauges
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.instance import DecodeInstance
from services.decode.live import LiveRequest
from services.decode.receiver import Receiver
from services.decode.said import known_tokens
from services.decode.subscriber import Subscriber, identity

log = get_logger(__name__)

MAX_STORES = 16
SECRET_BYTES = (16, 64)

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer:
    """Serves one decode instance's instance."""

    def __init__(self, instance: DecodeInstance, gauges: Gauges) -> None:
        self._instance = instance
        self._gauges = gauges

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """Promises room, or refuses."""
        instance = self._instance
        instance.check_open()
        stores = _stores(request)
        if request.HasField("tbt_slo_s") and not request.tbt_slo_s > 0:
            raise InvalidRequest("tbt_slo_s", "must be above 0")
        if not 0 <= request.starts_in_s < math.inf:
            raise InvalidRequest("starts_in_s", "must be finite and not negative")
        _check_secret(request)
        conductor = request.conductor if request.HasField("conductor") else None
        incoming = await instance.intake.read(request.sequence, "" if conductor is None else identity(conductor))
        instance.check_open()  # it may have taken a while
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("nobody waits for this promise any more")
        promised, predicted = instance.shell.reserve(
            incoming,
            stores,
            request.tbt_slo_s,
            conductor,
            request.starts_in_s,
            secret=request.resume_secret,
            fence=request.fence,
        )
        return decode_pb2.ReserveResponse(
            target=self._target(promised),
            lease_s=instance.core.config.lease_s,
            predicted_tbt_s=predicted,
            number=instance.shell.taken,
        )

    async def ReceiveKV(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], context: Context
    ) -> None:
        """Receives KV of many transfers from one prefill process."""
        await _ReceiveStream(self._instance).run(requests, context)

    async def ReadKV(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: Context
    ) -> None:
        """Another instance reads blocks of the pool."""
        await self._instance.reads.serve(requests, context)

    async def Steps(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context
    ) -> None:
        """Starts and cancels sequences; returns tokens."""
        await _StepsStream(self._instance).run(requests, context)

    async def Forget(  # noqa: N802
        self, request: kv_pb2.ForgetRequest, context: Context
    ) -> kv_pb2.ForgetResponse:
        """Deletes KV from the pool."""
        return await self._instance.forgetting.forget(request)

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        """Everything the instance holds."""
        return decode_pb2.DecodeStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())

    def _target(self, request: LiveRequest) -> kv_pb2.TransferTarget:
        return kv_pb2.TransferTarget(
            decode=self._instance.identity,
            transfer_id=request.transfer.transfer_id,
            generation=request.transfer.generation,
            held_blocks=request.transfer.held_blocks,
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


def _check_secret(request: decode_pb2.ReserveRequest) -> None:
    least, most = SECRET_BYTES
    if request.resume_secret and not least <= len(request.resume_secret) <= most:
        raise InvalidRequest("resume_secret", f"must have {least} to {most} bytes, or none")


class _ReceiveStream(ServerStream[decode_pb2.ReceiveKVRequest]):
    """KV of many transfers from one prefill process."""

    def __init__(self, instance: DecodeInstance) -> None:
        super().__init__(instance.closing, lanes=instance.lanes)
        self._instance = instance
        self._receiver: Receiver

    async def on_hello(self, message: decode_pb2.ReceiveKVRequest) -> None:
        """Takes the engine's own KV only."""
        instance = self._instance
        check_hello(message.hello, namespace=instance.setup.namespace, layout=instance.layout)
        self._receiver = Receiver(
            message.hello.sender,
            instance.identity,
            instance.shell,
            instance.pool,
            instance.carried_out.demanded,
            instance.beside,
        )
        self.outbox = self._receiver.outbox
        instance.receivers.add(self._receiver)
        self._receiver.welcome(self.offer_lane(message))

    def on_message(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview) -> None:
        """Opens, frames and closes of transfers."""
        self._receiver.take(message, payload)

    def place(self, message: decode_pb2.ReceiveKVRequest, nbytes: int) -> Landing | None:
        """Whole slices land in the pool."""
        return self._receiver.place(message, nbytes)

    def end(self) -> None:
        """What has not come whole will not come."""
        if self._receiver in self._instance.receivers:
            self._instance.receivers.discard(self._receiver)
            self._instance.retire(self._receiver)


class _StepsStream(ServerStream[decode_pb2.StepsRequest]):
    """Starts and cancels from one conductor, tokens to it."""

    def __init__(self, instance: DecodeInstance) -> None:
        super().__init__(instance.closing)
        self._instance = instance
        self._subscriber: Subscriber

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Any conductor is served."""
        self._subscriber = Subscriber(message.hello.conductor)
        self._instance.subscribers.add(self._subscriber)
        self._instance.shell.subscribe(self._subscriber)

    def on_message(self, message: decode_pb2.StepsRequest, payload: memoryview) -> None:
        """One order. A defect that it meets ends its request, and no other one."""
        order = message.WhichOneof("message")
        if order not in ("start", "cancel", "resume"):
            raise InvalidRequest("message", f"{order or 'nothing'} has no place in the middle of a stream")
        try:
            self._carry_out(message)
        except Exception:
            its = getattr(message, order)
            log.exception("an order cannot be carried out: its request ends", order=order, request=its.request_id)
            self._instance.shell.give_up(self._subscriber, its, f"a defect: its {order} cannot be carried out")

    def _carry_out(self, message: decode_pb2.StepsRequest) -> None:
        match message.WhichOneof("message"):
            case "start":
                _start(message.start, self._subscriber, self._instance)
            case "cancel" if message.cancel.HasField("choice"):
                self._instance.shell.stop(message.cancel)
            case "cancel":
                outcome = self._cancel(message.cancel)
                self._subscriber.cancelled(message.cancel.request_id, outcome)
            case "resume":
                self._instance.shell.resume(self._subscriber, message.resume)

    def _cancel(self, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        outcome = self._instance.shell.cancel(self._subscriber, message)
        if outcome != kv_pb2.CANCEL_OUTCOME_UNKNOWN or message.transfer_id:
            return outcome
        read = self._instance.intake.cancel(message.request_id, identity(self._subscriber.conductor))
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if read else outcome

    async def room(self) -> None:
        """Waits while too many answers were not read."""
        await self._subscriber.room()

    async def write_answers(self, write: Write) -> None:
        """Messages as they come, those that wait merged."""
        try:
            await write_each(write, self._subscriber.next, STALL_S)
        except TimeoutError:
            raise Unavailable(f"{self._subscriber.conductor.id} read nothing for {STALL_S:g} s") from None

    def on_closing(self) -> None:
        """What waits still goes out."""
        self.finish()

    def finish(self) -> None:
        """Nothing more will wait."""
        self._subscriber.close()

    def end(self) -> None:
        """The conductor's sequences end, or wait for another conductor."""
        self._instance.subscribers.discard(self._subscriber)
        self._instance.shell.unsubscribe(self._subscriber)


def _start(message: decode_pb2.StartSequence, subscriber: Subscriber, instance: DecodeInstance) -> None:
    vocab, further = instance.setup.vocab_size, message.further_token_ids
    tokens = [(message.first_token_id,), further, *known_tokens(message, 1 + len(further))]
    if instance.shell.dead:
        subscriber.failed(message.request_id, instance.shell.dead)
    elif bad := [token for told in tokens for token in told if not 0 <= token < vocab]:
        subscriber.failed(message.request_id, f"there is no token {bad[0]}")  # an engine must never meet one
    else:
        instance.shell.start(subscriber, message)
