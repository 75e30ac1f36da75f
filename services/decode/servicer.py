"""The DecodeService contract: translates messages into calls of a `DecodeInstance` and back."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc.aio

from moonpool.cluster.instances import check_instance
from moonpool.cost import decode_step_seconds
from moonpool.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, Unsupported
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.outbox import STALL_S
from moonpool.streams.receiving import check_hello
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.instance import DecodeInstance
from services.decode.receiver import Receiver
from services.decode.requests import DecodeRequest
from services.decode.subscriber import Subscriber

HELLO_TIMEOUT_S = 10.0
MAX_STORES = 16

M = TypeVar("M")
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
        incoming = instance.setup.incoming(request.sequence)
        predicted = self._predicted_tbt_s(len(incoming.token_ids))
        if request.HasField("tbt_slo_s") and predicted > request.tbt_slo_s:
            raise Overloaded(
                f"a token every {predicted:.4g} s is predicted",
                reason="tbt_slo",
                predicted_tbt_s=predicted,
                slo_s=request.tbt_slo_s,
                retry_after_s=1.0,
            )
        promised = instance.reserve(incoming, stores, time.monotonic())
        return decode_pb2.ReserveResponse(
            target=self._target(promised), lease_s=instance.requests.lease_s, predicted_tbt_s=predicted
        )

    async def ReceiveKV(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], context: Context
    ) -> None:
        """Receives KV of many transfers from one prefill process."""
        instance = self._instance
        first = await _first(requests)
        if first is None:
            return
        if first.message.WhichOneof("message") != "hello":
            raise InvalidRequest("hello", "must be the first message of a stream")
        hello = first.message.hello
        check_hello(hello, namespace=instance.setup.namespace, layout=instance.layout)
        loop = instance.loop
        receiver = Receiver(
            hello.sender, instance.identity, instance.requests, instance.pool, loop.arrived, loop.end, loop.notify
        )
        instance.receivers.add(receiver)
        try:
            receiver.welcome()
            await _until_first(
                _receive(requests, receiver), receiver.outbox.drain(context.write), instance.closing.wait()
            )
        finally:
            instance.receivers.discard(receiver)
            instance.retire(receiver)

    async def Steps(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context
    ) -> None:
        """Starts and cancels sequences; returns tokens."""
        instance = self._instance
        first = await _first(requests)
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("hello", "must be the first message of a stream")
        subscriber = Subscriber(first.hello.conductor)
        instance.subscribers.add(subscriber)
        try:
            await _until_first(_obey(requests, subscriber, instance), _tell(subscriber, context))
        finally:
            instance.subscribers.discard(subscriber)
            instance.loop.unsubscribe(subscriber)

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        """Everything the instance holds."""
        return decode_pb2.DecodeStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())

    def _predicted_tbt_s(self, tokens: int) -> float:
        """Seconds per step with one more sequence of so many tokens, and all that have been promised, in the batch."""
        instance = self._instance
        context = sum(len(request.incoming.token_ids) for request in instance.requests if request.sequence is None)
        context += instance.scheduler.context_tokens + tokens
        sequences = min(len(instance.requests) + 1, instance.scheduler.max_batch)
        return decode_step_seconds(instance.loop.tracker.speeds, sequences, context)

    def _target(self, request: DecodeRequest) -> kv_pb2.TransferTarget:
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


async def _receive(requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], receiver: Receiver) -> None:
    async for request in requests:
        payload = request.payload
        assert isinstance(payload, memoryview), "received payloads are views"
        receiver.take(request.message, payload)


async def _obey(
    requests: AsyncIterator[decode_pb2.StepsRequest], subscriber: Subscriber, instance: DecodeInstance
) -> None:
    async for request in requests:
        await subscriber.room()
        match request.WhichOneof("message"):
            case "start":
                _start(request.start, subscriber, instance)
            case "cancel":
                subscriber.cancelled(request.cancel.request_id, instance.loop.cancel(request.cancel))
            case "resume":
                raise Unsupported("resuming a sequence is not built yet")
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")


def _start(message: decode_pb2.StartSequence, subscriber: Subscriber, instance: DecodeInstance) -> None:
    if instance.loop.dead:
        subscriber.failed(message.request_id, instance.loop.dead)
    elif not 0 <= message.first_token_id < instance.setup.vocab_size:  # an engine must never meet such a token
        subscriber.failed(message.request_id, f"there is no token {message.first_token_id}")
    else:
        instance.loop.start(subscriber, message)


async def _tell(subscriber: Subscriber, context: Context) -> None:
    while (message := await subscriber.next()) is not None:
        try:
            async with asyncio.timeout(STALL_S):
                await context.write(message)
        except TimeoutError:
            raise Unavailable(f"{subscriber.conductor.id} read nothing for {STALL_S:g} s") from None


async def _first(requests: AsyncIterator[M]) -> M | None:
    """The first message of a stream, None when there is none."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no hello came within {HELLO_TIMEOUT_S:g} s") from None


async def _until_first(*coroutines: Awaitable[object]) -> None:
    """Runs coroutines until the first has ended, cancels the others, and raises what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
