"""A reader that stops reading stops its writers within the credits they have, whatever they have left to send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.inbound_transfer import TransferState
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.kv_transfer.store_writer import StoreWriter
from tests.slices import hashed
from tests.unit.base.kv_transfer.test_transfers import slices
from tests.unit.base.transport.fakes import DECODE, HELLO, LAYOUT, STORE, FakeDecode, FakeStore, content, served

SLICE = LAYOUT.slice_bytes(0)
WAIT_S = 60.0


class Paused:
    """The messages of a stream; after the first few, reading waits until `go` is set."""

    def __init__(self, requests: Any, messages: int, go: asyncio.Event) -> None:
        self._requests, self._left, self._go = requests, messages, go

    def __aiter__(self) -> Paused:
        return self

    async def __anext__(self) -> Any:
        if not self._left:
            await self._go.wait()
        self._left = max(0, self._left - 1)
        return await anext(self._requests)


class SlowDecode(FakeDecode):
    def __init__(self, *, window: int) -> None:
        super().__init__(window=window)
        self.go = asyncio.Event()

    async def ReceiveKV(self, requests: Any, context: Any) -> None:
        await super().ReceiveKV(Paused(requests, 2, self.go), context)  # hello and open


class SlowStore(FakeStore):
    def __init__(self, *, window: int) -> None:
        super().__init__(window=window)
        self.go = asyncio.Event()

    async def Put(self, requests: Any, context: Any) -> None:
        await super().Put(Paused(requests, 2, self.go), context)


@pytest.mark.parametrize("window", [2 * SLICE, 5 * SLICE])
async def test_a_transfer_waits_for_its_reader(window: int) -> None:
    decode = SlowDecode(window=window)
    blocks = 16
    target = decode.promise(1, blocks)
    async with served((DECODE, decode)) as (channels, address):
        sender = TransferSender(KVEndpoint(channels, address, HELLO, LAYOUT), frame_bytes=SLICE)
        transfer = await sender.open(target)
        work = asyncio.ensure_future(transfer.send(slices(range(LAYOUT.layers), range(blocks))))
        for _ in range(blocks):  # it gives way now and then, but waits for nothing but credits
            await asyncio.sleep(0)
        assert not work.done()
        assert sender.traffic.credits_out == transfer.sent_bytes == window
        decode.go.set()
        assert await asyncio.wait_for(work, WAIT_S) == LAYOUT.layers * blocks * SLICE
        transfer.close(aborted=False)
        await transfer.verdict(WAIT_S)
        assert decode.transfers[1].state is TransferState.COMPLETE
        await sender.aclose()


async def test_a_put_waits_for_its_store() -> None:
    store = SlowStore(window=3 * SLICE)
    async with served((STORE, store)) as (channels, address):
        writer = StoreWriter(KVEndpoint(channels, address, HELLO, LAYOUT), frame_bytes=SLICE)
        read: list[tuple[int, int]] = []
        waiting = asyncio.Event()

        def slice_of(layer: int, index: int) -> memoryview:
            read.append((layer, index))
            if len(read) == 4:  # the fourth slice finds no credits left
                waiting.set()
            return memoryview(content(layer, index))

        keys = [bytes([index]) * 32 for index in range(8)]
        work = asyncio.ensure_future(writer.put(keys, keys, "", hashed(slice_of), timeout_s=WAIT_S))
        async with asyncio.timeout(WAIT_S):
            await waiting.wait()
        await asyncio.sleep(0)
        assert not work.done()
        assert writer.traffic.credits_out == 3 * SLICE
        assert len(read) <= 5  # a frame is packed when the slice after it is looked at
        store.go.set()
        outcome = await work
        assert outcome.stored == 8
        await writer.aclose()
