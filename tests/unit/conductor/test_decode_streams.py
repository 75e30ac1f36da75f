"""The streams to decode instances: which are kept, and until when."""

import asyncio
from typing import Any

from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.rpc.channels import Channels
from moonpool.base.transport.send_queue import SendQueue
from moonpool.conductor.decode_streams import MAX_LOST, NewTokens, StepsPool, StepsStream
from moonpool.v1 import decode_pb2, kv_pb2
from tests.unit.base.transport.fakes import DECODE as SERVICE
from tests.unit.base.transport.fakes import FakeStreams, served

DECODE = kv_pb2.Instance(id="decode", epoch=1, address="127.0.0.1:1")


class Reopener:
    """Opens its stream again when it breaks, as a promise that is renewed just then does."""

    def __init__(self, stream: StepsStream) -> None:
        self._stream = stream

    def add_tokens(self, new: NewTokens) -> bool:
        raise AssertionError("there are none")

    def fail(self, error: MoonpoolError) -> None:
        self._stream.open()


async def test_a_stream_that_breaks_without_sequences_is_forgotten() -> None:
    async with Channels() as channels:
        pool = StepsPool(channels)
        stream = pool.get(DECODE)
        stream.open()
        stream.fail(StreamBroken("broken"))
        assert pool.get(DECODE) is not stream
        await pool.aclose()


async def test_a_stream_that_was_opened_again_while_it_broke_is_kept() -> None:
    async with Channels() as channels:
        pool = StepsPool(channels)
        stream = pool.get(DECODE)
        stream.open()
        stream.subscribe("sequence", Reopener(stream), kv_pb2.TransferTarget(transfer_id=7))
        stream.fail(StreamBroken("broken"))
        assert pool.get(DECODE) is stream
        await pool.aclose()


class Steps(FakeStreams):
    """A decode instance that keeps what it is told, and answers the cancels of some sequences."""

    def __init__(self, *answered: str) -> None:
        super().__init__()
        self.told: list[str] = []
        self._answered = answered

    async def Steps(self, requests: Any, context: Any) -> None:
        def handle(request: decode_pb2.StepsRequest, send_queue: SendQueue) -> None:
            kind = request.WhichOneof("message")
            assert kind is not None
            order = getattr(request, kind)
            self.told.append(f"{kind} {order.conductor.id if kind == 'hello' else order.request_id}")
            if kind == "cancel" and order.request_id in self._answered:
                ended = decode_pb2.SequenceCancelled(request_id=order.request_id)
                marker = decode_pb2.SequenceFailed(request_id="marker")
                send_queue.post(decode_pb2.StepsResponse(cancelled=[ended], failed=[marker]))

        await self.run(requests, context, handle, SendQueue())


class Failed(Reopener):
    """Notes when its sequence has failed."""

    def __init__(self, stream: StepsStream) -> None:
        super().__init__(stream)
        self.failed = asyncio.Event()

    def fail(self, error: MoonpoolError) -> None:
        self.failed.set()


async def test_what_a_broken_stream_may_not_have_told_is_cancelled_on_the_next_one() -> None:
    """Decode keeps what it has promised while this conductor is there, and the start may never have been read."""
    decode = Steps("answered")
    async with served((SERVICE, decode)) as (channels, address):
        pool, there = StepsPool(channels), kv_pb2.Instance(id="decode", epoch=1, address=address)
        pool.conductor.id = "conductor"
        stream, target = pool.get(there), kv_pb2.TransferTarget(transfer_id=7, generation=1)
        marker = Failed(stream)
        stream.subscribe("marker", marker, target)
        stream.subscribe("running", Failed(stream), target)
        stream.subscribe("over", Failed(stream), target)
        stream.unsubscribe("over")
        stream.cancel("answered", target)
        stream.cancel("unanswered", target)
        await decode.until(lambda: decode.told == ["hello conductor", "cancel answered", "cancel unanswered"])
        await marker.failed.wait()
        pool.lost(there)
        decode.told.clear()
        pool.get(there).open()
        await decode.until(lambda: len(decode.told) == 3)
        assert decode.told == ["hello conductor", "cancel unanswered", "cancel running"]
        await pool.aclose()


async def test_cancels_are_kept_of_so_many_lost_instances_and_of_none_that_has_left() -> None:
    async with Channels() as channels:
        pool, target = StepsPool(channels), kv_pb2.TransferTarget(transfer_id=7)
        instances = [kv_pb2.Instance(id=f"decode-{n}", epoch=1, address="127.0.0.1:1") for n in range(MAX_LOST + 2)]
        for instance in instances:
            pool.get(instance).cancel("sequence", target)
            pool.lost(instance)
        pool.left(instances[-1])
        fresh = pool.get(DECODE)
        fresh.open()
        for number, kept in ((0, 0), (1, 0), (2, 1), (MAX_LOST, 1), (MAX_LOST + 1, 0)):
            stream = pool.get(instances[number])
            stream.open()
            assert stream.unsent == fresh.unsent + kept, f"instance {number}"
        await pool.aclose()
