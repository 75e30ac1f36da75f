"""Put streams over a real server: transfers, frames, room, refusals."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.frames import pack_frames
from moonpool.base.kv.keys import pack_keys
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.v1 import kvstore_pb2
from tests.slices import slice_to_send
from tests.unit.kvstore.helpers import LAYOUT, data_of, keys_of, slice_of
from tests.unit.kvstore.rig import (
    KEYS,
    answer,
    frames_of,
    opened_put,
    put_open,
    rig,
)

A, B, C, D = KEYS[:4]


async def test_durable_is_acknowledged_after_visible(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        call = await opened_put(store, [A])
        for header, pieces in frames_of([A]):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        acks = [(await call.read()).ack for _ in range(2)]
        assert [(list(ack.blocks), ack.durability) for ack in acks] == [
            ([0], kvstore_pb2.DURABILITY_VISIBLE),
            ([0], kvstore_pb2.DURABILITY_DURABLE),
        ]
        again = await opened_put(store, [A], present=[0])
        ack = (await again.read()).ack
        assert (list(ack.blocks), ack.durability) == ([0], kvstore_pb2.DURABILITY_DURABLE)
        call.cancel()
        again.cancel()
        await store.at_rest()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": b"short"}, "keys: "),
        ({"layer_end": 4}, "layer_end: "),
        ({"head_begin": 2}, "head_end: "),
        ({"parent_keys": b"x" * 32 * 2}, "parent_keys: "),
        ({"keys": pack_keys(keys_of(65, "many")), "parent_keys": b""}, "keys: the transfer needs"),
    ],
)
async def test_a_wrong_transfer_is_refused_and_the_stream_goes_on(changes: dict[str, Any], reason: str) -> None:
    async with rig() as store:
        call, answer = await opened_put(store, [A], **changes)
        assert answer.refused.transfer == 1
        assert answer.refused.reason.startswith(reason)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [A]))))
        assert (await call.read()).opened.transfer == 2
        call.cancel()
        await store.at_rest()


async def test_bad_frames_end_their_transfer_only() -> None:
    async with rig() as store:
        call = await opened_put(store, [A, B])
        header, pieces = frames_of([A, B])[0]
        header.checksum ^= 1
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        refused = (await answer(call)).refused
        assert (refused.transfer, "checksum" in refused.reason) == (1, True)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))  # of no transfer: dropped
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [A]))))
        assert (await answer(call)).opened.transfer == 2
        header, pieces = frames_of([A], transfer=2, layers=range(1))[0]
        for _ in range(2):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        assert "come before" in (await answer(call)).refused.reason
        assert store.gauges()["dram_reserved_bytes"] == 0
        call.cancel()
        await store.at_rest()


async def test_two_processes_write_the_layers_of_a_block() -> None:
    async with rig() as store:
        low, _ = await opened_put(store, [A], layer_end=2)
        high, _ = await opened_put(store, [A], layer_begin=2)
        for call, layers in ((low, range(2)), (high, range(2, 3))):
            for header, pieces in frames_of([A], layers=layers):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            close = kvstore_pb2.PutClose(transfer=1)
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=close)))
        for call in (low, high):
            assert list((await call.read()).ack.blocks) == [0]
            call.cancel()
        assert await store.read([A]) == [data_of(A)]
        await store.at_rest()


async def test_a_writer_hears_of_blocks_that_another_finishes_and_need_not_send_them() -> None:
    async with rig() as store:
        call = await opened_put(store, [A, B])
        assert await store.put([A]) == (0, 1)
        ack = (await call.read()).ack
        assert (list(ack.blocks), ack.durability) == ([0], kvstore_pb2.DURABILITY_VISIBLE)
        slices = [slice_to_send(LAYOUT, layer, 1, slice_of(B, layer), key=B) for layer in range(3)]
        for header, pieces in pack_frames(1, 0, slices, LAYOUT):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=1))))
        assert list((await call.read()).ack.blocks) == [1]
        assert await store.read([A, B]) == [data_of(A), data_of(B)]
        call.cancel()
        await store.at_rest()


async def test_a_transfer_closed_too_early_is_refused() -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=1))))
        assert "before everything was sent" in (await call.read()).refused.reason
        call.cancel()
        await store.at_rest()


async def test_a_writer_that_vanishes_leaves_nothing() -> None:
    async with rig() as store:
        call = await opened_put(store, [A, B])
        header, pieces = frames_of([A, B], layers=range(2))[0]
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        call.cancel()
        await store.at_rest()
        assert await store.read([A]) == []


async def test_a_transfer_without_progress_is_ended() -> None:
    async with rig(transfer_timeout_s=0.05) as store:
        call = await opened_put(store, [A])
        assert "no progress" in (await call.read()).refused.reason
        call.cancel()
        await store.at_rest()
