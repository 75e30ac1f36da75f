"""Transfers that come in one message with their opening."""

import asyncio
from typing import Any

import pytest

from moonpool.base.rpc.messages import PayloadMessage
from moonpool.v1 import kvstore_pb2
from tests.unit.kvstore.helpers import BLOCK, data_of
from tests.unit.kvstore.rig import (
    KEYS,
    answer,
    frames_of,
    opened_get,
    put_open,
    put_whole,
    putting,
    rig,
)

A, B, C, D = KEYS[:4]


async def test_a_transfer_in_one_message_is_answered_in_one() -> None:
    async with rig() as store, putting(store) as call:
        for transfer, present in ((1, []), (2, [0, 1])):
            response = await put_whole(call, [A, B], transfer)
            opened = kvstore_pb2.PutOpened(transfer=transfer, present=present, taken=True)
            assert response == kvstore_pb2.PutResponse(opened=opened, credit_bytes=2 * BLOCK)
        assert store.gauges()["put_transfers"] == 0
        assert await store.read([A, B]) == [data_of(A), data_of(B)]


@pytest.mark.parametrize(("header", "reason"), [({"transfer": 9}, "frame.transfer: "), ({"checksum": 1}, "checksum")])
async def test_a_bad_transfer_in_one_message_is_refused(header: dict[str, Any], reason: str) -> None:
    async with rig() as store, putting(store) as call:
        refused = (await put_whole(call, [A, B], **header)).refused
        assert refused.transfer == 1
        assert reason in refused.reason
        assert (await put_whole(call, [A, B], 2)).opened.taken


async def test_a_part_of_a_transfer_in_one_message_is_refused() -> None:
    async with rig() as store, putting(store) as call:
        [(frame, pieces)] = frames_of([A])
        opening = put_open(1, [A, B])
        opening.frame.CopyFrom(frame)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
        assert (await answer(call)).refused.reason == "frame: is not all of the transfer"
        assert (await put_whole(call, [A, B], 2)).opened == kvstore_pb2.PutOpened(transfer=2, taken=True)


async def test_a_damaged_transfer_in_one_message_leaves_nothing() -> None:
    async with rig() as store, putting(store) as call:
        [(frame, pieces)] = frames_of([A, B])
        opening = put_open(1, [A, B])
        opening.frame.CopyFrom(frame)
        damaged = bytearray(b"".join(pieces))
        damaged[-1] ^= 1
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), bytes(damaged)))
        assert (await answer(call)).refused.code == "bad_frame"
        assert store.gauges()["dram_reserved_bytes"] == 0
        assert await store.read([A, B]) == []
        assert (await put_whole(call, [A], 2)).opened.taken


async def test_blocks_that_another_transfer_writes_end_with_those_that_came_whole() -> None:
    async with rig() as store, putting(store) as call:
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(1, [B, C]))))
        assert (await answer(call)).HasField("opened")
        for number, keys, present in ((2, [A, B], []), (3, [A, C], [0])):
            assert list((await put_whole(call, keys, number)).ack.blocks) == [number - 2]
            opened = kvstore_pb2.PutOpened(transfer=number, present=present, taken=True)
            assert (await answer(call)).opened == opened
        assert await store.read([A, B, C]) == [data_of(A), data_of(B), data_of(C)]


async def test_a_writer_of_some_layers_is_asked_for_its_frames() -> None:
    async with rig() as store, putting(store) as call:
        [(frame, pieces)] = frames_of([A], layers=range(2))
        opening = put_open(1, [A], range(2))
        opening.frame.CopyFrom(frame)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
        opened = (await answer(call)).opened
        assert (opened.transfer, opened.taken) == (1, False)
        assert store.gauges()["put_transfers"] == 1


async def test_a_transfer_in_one_message_that_finds_no_room_is_opened_later() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        await store.put([A, B])
        holding = await opened_get(store)
        assert (await holding.read()).message.opened.blocks == 2
        async with putting(store) as call:
            asking = asyncio.ensure_future(put_whole(call, [C]))
            await store.until("transfers_waiting_for_room", 1)
            holding.cancel()
            response = await asking
            assert (response.opened.transfer, response.opened.taken) == (1, False)
            for header, pieces in frames_of([C]):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            assert list((await answer(call)).ack.blocks) == [0]
