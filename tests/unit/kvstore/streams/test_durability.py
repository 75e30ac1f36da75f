"""What a writer hears of durability over a stream when the SSD tier does not take its blocks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from moonpool.base.rpc.messages import PayloadMessage
from moonpool.kvstore.memory_wait_queue import MemoryWaitQueue
from moonpool.kvstore.put_stream import PutResources, PutStream
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.kvstore.helpers import FORMAT, LAYOUT, Driven, keys_of, open_ssd
from tests.unit.kvstore.rig import frames_of, put_open

A, B = keys_of(2)


class Peer:
    """A writer whose messages are given, and the answers it gets."""

    def __init__(self, driven: Driven, *, transfer_timeout_s: float) -> None:
        instance = kv_pb2.Instance(id="store")
        resources = PutResources(driven.store.writes, MemoryWaitQueue(9), instance, 1 << 20, transfer_timeout_s, 1.0)
        self.messages: asyncio.Queue[kvstore_pb2.PutRequest | tuple[Any, Any] | None] = asyncio.Queue()
        self.answers: asyncio.Queue[kvstore_pb2.PutResponse] = asyncio.Queue()
        self.stream = asyncio.ensure_future(PutStream(resources, asyncio.Event()).run(self._requests(), self._write))

    async def _write(self, message: Any) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.answers.put(kvstore_pb2.PutResponse.FromString(data))

    async def _requests(self) -> AsyncIterator[PayloadMessage[kvstore_pb2.PutRequest]]:
        hello = kv_pb2.StreamHello(namespace=FORMAT.namespace, layout=LAYOUT.to_proto())
        yield PayloadMessage(kvstore_pb2.PutRequest(hello=hello))
        while (message := await self.messages.get()) is not None:
            if isinstance(message, tuple):
                header, pieces = message
                yield PayloadMessage(kvstore_pb2.PutRequest(frame=header), memoryview(b"".join(pieces)))
            else:
                yield PayloadMessage(message)

    async def put(self, number: int, keys: list[Any]) -> None:
        await self.messages.put(kvstore_pb2.PutRequest(open=put_open(number, keys)))
        for frame in frames_of(keys, number):
            await self.messages.put(frame)

    async def answer(self, kind: str) -> Any:
        """The next answer of a kind."""
        async with asyncio.timeout(60):
            while (message := await self.answers.get()).WhichOneof("message") != kind:
                pass
        return getattr(message, kind)

    async def leave(self) -> None:
        await self.messages.put(None)
        await self.stream


async def test_a_transfer_whose_blocks_do_not_become_durable_is_told_so_when_it_ends(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    peer = Peer(driven, transfer_timeout_s=0.2)
    await peer.put(1, [A])
    assert (await peer.answer("ack")).durability == kvstore_pb2.DURABILITY_VISIBLE
    refused = await peer.answer("refused")
    assert (refused.transfer, "not become durable" in refused.reason) == (1, True)
    await peer.leave()
    assert len(driven.store.writes.awaiting) == 0
    ssd.close()


async def test_a_writer_that_puts_again_after_an_error_hears_durable(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    peer = Peer(driven, transfer_timeout_s=60)
    await peer.put(1, [A])
    await peer.answer("ack")
    assert driven.store.writes.queue.next_plan() is not None
    driven.store.writes.queue.plan_done(OSError(5, "Input/output error"))
    await peer.messages.put(kvstore_pb2.PutRequest(open=put_open(2, [A])))
    opened = await peer.answer("opened")
    assert (opened.transfer, list(opened.present)) == (2, [0])
    driven.flush()
    told = [await peer.answer("ack") for _ in range(2)]
    assert {(each.transfer, each.durability) for each in told} == {
        (1, kvstore_pb2.DURABILITY_DURABLE),
        (2, kvstore_pb2.DURABILITY_DURABLE),
    }
    await peer.leave()
    ssd.close()
