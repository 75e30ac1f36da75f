"""Writers that wait for room in DRAM, over a real server."""

import asyncio
from collections.abc import Sequence
from typing import Any

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.kv.keys import BlockKey
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.v1 import kvstore_pb2
from tests.unit.kvstore.helpers import BLOCK, data_of, keys_of
from tests.unit.kvstore.rig import KEYS, Rig, answer, failure, opened_put, put_open, putting, rig

A, B, C, D = KEYS[:4]


async def filling(store: Rig, keys: Sequence[BlockKey]) -> Any:
    """A stream whose transfer has brought the first layer of its blocks, so that they take room."""
    call = await opened_put(store, keys)
    await store.send(call, keys, layers=range(1))
    await store.until("dram_reserved_bytes", len(keys) * BLOCK)
    return call


async def close(call: Any, transfer: int = 1, *, aborted: bool = True) -> None:
    await call.write(
        PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=transfer, aborted=aborted)))
    )


async def test_half_a_megabyte_of_keys_evicts_no_block() -> None:
    many = keys_of(16384, "many")
    async with rig(dram_bytes=16384 * BLOCK) as store:
        await store.put(KEYS)
        async with putting(store) as call:
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(1, many))))
            assert (await answer(call)).opened.transfer == 1
            assert (store.gauges()["dram_evictions_total"], store.gauges()["dram_reserved_bytes"]) == (0, 0)
            assert await store.read(KEYS) == [data_of(key) for key in KEYS]
            await store.send(call, many[:2])
            assert list((await answer(call)).ack.blocks) == [0, 1]
            assert store.gauges()["dram_evictions_total"] == 0


async def test_frames_wait_for_room_in_order_and_are_then_written() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        calls = [await opened_put(store, [key]) for key in (C, D)]
        first = await filling(store, [A, B])
        for call, key in zip(calls, (C, D), strict=True):
            await store.send(call, [key])
            await close(call, aborted=False)
        await store.until("transfers_waiting_for_room", 2)
        await close(first)
        for call in calls:
            assert list((await answer(call)).ack.blocks) == [0]
        assert await store.read([C]) == [data_of(C)]
        assert await store.read([D]) == [data_of(D)]
        for call in (first, *calls):
            call.cancel()
        await store.at_rest()


async def test_frames_do_not_wait_for_ever() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=0.05) as store:
        waiting = await opened_put(store, [C])
        first = await filling(store, [A, B])
        await store.send(waiting, [C])
        refused = (await answer(waiting)).refused
        assert (refused.transfer, refused.reason) == (1, "no room within 0.05 s")
        await store.send(first, [A, B], layers=range(1, 3))  # what has its room goes on
        assert list((await answer(first)).ack.blocks) == [0, 1]
        first.cancel()
        waiting.cancel()
        await store.at_rest()


async def test_a_transfer_that_ends_while_its_frames_wait_leaves_nothing() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        waiting = await opened_put(store, [C])
        first = await filling(store, [A, B])
        await store.send(waiting, [C])
        await store.until("transfers_waiting_for_room", 1)
        await close(waiting)
        await store.until("transfers_waiting_for_room", 0)
        await store.until("put_transfers", 1)
        first.cancel()
        await store.until("put_transfers", 0)
        assert (await answer_credit(waiting)) == BLOCK
        waiting.cancel()
        await store.at_rest()


async def answer_credit(call: Any) -> int:
    """The next credit."""
    return int((await call.read()).credit.bytes)


async def test_transfers_wait_for_room_in_order() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        first = await filling(store, [A, B])
        async with putting(store, at_rest=False) as second:
            for transfer, key in ((1, C), (2, D)):
                await second.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(transfer, [key]))))
            await store.until("transfers_waiting_for_room", 2)
            await close(second)
            await store.until("transfers_waiting_for_room", 1)
            await close(first)
            assert (await answer(second)).opened.transfer == 2
            await store.send(second, [D], transfer=2, layers=range(1))
            await first.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(3, [A]))))
            assert (await answer(first)).opened.transfer == 3
            await store.send(first, [A], transfer=3, layers=range(1))
            await store.until("dram_reserved_bytes", 2 * BLOCK)
        first.cancel()
        await store.at_rest()


async def test_transfers_do_not_wait_for_ever() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=0.05) as store:
        first = await filling(store, [A, B])
        await first.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [C]))))
        refused = (await answer(first)).refused
        assert (refused.transfer, refused.reason) == (2, "no room within 0.05 s")
        first.cancel()
        await store.at_rest()


async def test_a_broken_or_closing_stream_frees_its_transfers() -> None:
    async with rig(drain_s=0.05, dram_bytes=2 * BLOCK, room_timeout_s=9) as store:
        blocker = await filling(store, [A, B])
        waiting = asyncio.ensure_future(store.put([C]))
        await store.until("transfers_waiting_for_room", 1)
        await blocker.write(PayloadMessage(kvstore_pb2.PutRequest()))
        assert isinstance(await failure(blocker), InvalidRequest)
        assert await waiting == (0, 1)
        late = await filling(store, [A, D])
        await late.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [B]))))
        await late.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(3, []))))
        assert (await late.read()).refused.transfer == 3
        assert len(store.service.rooms) == 1
        await store.service.finish()
        assert isinstance(await failure(late), Unavailable)
        await store.at_rest()
