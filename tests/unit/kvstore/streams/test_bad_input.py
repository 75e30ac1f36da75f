"""What no proper client sends: it costs its transfer or its stream, nobody else, and all memory comes back."""

import asyncio
from typing import Any

import pytest

from moonpool.base.kv.frames import MAX_FRAME_SLICES, checksum, pack_frames
from moonpool.base.kv.keys import pack_keys
from moonpool.base.kv.layout import MAX_SLICE_BYTES, KVLayout
from moonpool.base.rpc.messages import MESSAGE_BYTES, PayloadMessage
from moonpool.kvstore.core.put_transfer import PORTION_BLOCKS
from moonpool.kvstore.core.read_leases import PORTION_KEYS
from moonpool.kvstore.put_stream import MAX_UNFINISHED_BYTES
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.slices import hashed, slice_to_send
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, data_of, keys_of, slice_of
from tests.unit.kvstore.rig import Rig, answer, frames_of, opened_put, put_open, rig

KEYS = keys_of(8)
A, B = KEYS[:2]
MANY = pytest.mark.parametrize("transfers", [500, pytest.param(10_000, marks=pytest.mark.slow)])
OPEN = 100


async def all_back(store: Rig) -> None:
    """Nothing is held, and the memory of unfinished blocks is free."""
    await store.at_rest()
    dram = store.service.store.tiers.dram
    assert dram.arena.resident_bytes - dram.arena.free_bytes == dram.block_bytes
    assert await store.put([B]) in ((0, 1), (1, 0))


def frame(**changes: Any) -> tuple[kv_pb2.FrameHeader, memoryview]:
    """The first layer of A, changed, with the checksum that makes it a proper frame again."""
    header, pieces = frames_of([A], layers=range(1))[0]
    payload = b"".join(pieces)
    size = changes.pop("size", None)
    if size is not None:
        payload = (payload * 3)[:size]
    for name, value in changes.items():
        setattr(header.runs[0], name, value)
    header.checksum = checksum(header)
    return header, memoryview(payload)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": LAYOUT.slice_bytes(0) - 1}, "its runs need"),
        ({"size": LAYOUT.slice_bytes(0) + 1}, "its runs need"),
        ({"size": 0}, "its runs need"),
        ({"layer": 3}, "no such layer"),
        ({"layer": (1 << 32) - 1}, "no such layer"),
        ({"block_count": 0}, "no blocks"),
        ({"block_count": (1 << 32) - 1}, "its runs need"),
        ({"first_block": 1}, "1"),
        ({"first_block": (1 << 32) - 1}, "429"),
        ({"block_count": 2, "size": 2 * LAYOUT.slice_bytes(0)}, "1"),
        ({"head_end": 3}, "no such heads"),
        ({"valid_tokens": 15}, "only full blocks"),
        ({"valid_tokens": 17}, "valid tokens"),
    ],
)
async def test_an_improper_frame_ends_its_transfer(changes: dict[str, Any], says: str) -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        header, payload = frame(**changes)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), payload))
        refused = (await answer(call)).refused
        assert refused.transfer == 1
        assert says in refused.reason
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [A]))))
        for header, pieces in frames_of([A], transfer=2):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        while not (message := await answer(call)).HasField("ack"):
            assert message.opened.transfer == 2
        assert await store.read([A]) == [data_of(A)]
        call.cancel()
        await all_back(store)


async def test_a_gap_is_no_block() -> None:
    async with rig() as store:
        call = await opened_put(store, [A, B])
        for layers in (range(1), range(2, 3)):
            header, pieces = frames_of([A], layers=layers)[0]
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=1))))
        assert "before everything was sent" in (await answer(call)).refused.reason
        assert await store.read([A]) == []
        call.cancel()
        await all_back(store)


async def test_a_large_message_of_nothing_useful_is_refused() -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        header, _ = frame()
        large = memoryview(bytes(MESSAGE_BYTES - 1024))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), large))
        assert "its runs need" in (await answer(call)).refused.reason
        call.cancel()
        await all_back(store)


@pytest.mark.parametrize("together", [False, True])
async def test_a_frame_that_completes_many_blocks_lets_others_have_turns(together: bool) -> None:
    """Blocks become visible in portions; a frame with so many that came with its transfer's opening is dropped."""
    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="bfloat16")
    many = keys_of(MAX_FRAME_SLICES, "many")
    slices = [slice_to_send(layout, 0, index, bytes(layout.slice_bytes(0)), key=key) for index, key in enumerate(many)]
    [(header, pieces)] = pack_frames(1, 0, slices, layout)
    async with rig() as store:
        call = store.open_stream("Put")
        hello = kv_pb2.StreamHello(namespace=FORMAT.namespace, layout=layout.to_proto())
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=hello)))
        assert (await call.read()).HasField("welcome")
        opening = kvstore_pb2.PutOpen(transfer=1, keys=pack_keys(many), layer_end=1, head_end=1)
        if together:
            opening.frame.CopyFrom(header)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces if together else ()))
        assert (await answer(call)).opened == kvstore_pb2.PutOpened(transfer=1)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=1))))
        acks = [list((await answer(call)).ack.blocks) for _ in range(len(many) // PORTION_BLOCKS)]
        assert [len(blocks) for blocks in acks] == [PORTION_BLOCKS] * len(acks)
        assert [block for blocks in acks for block in blocks] == list(range(len(many)))
        assert store.service.store.tiers.match(many) == len(many)
        call.cancel()
        await all_back(store)


async def test_a_transfer_that_ends_between_the_parts_of_its_frame_leaves_nothing() -> None:
    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="bfloat16")
    many = keys_of(MAX_FRAME_SLICES, "many")
    slices = [slice_to_send(layout, 0, index, bytes(layout.slice_bytes(0)), key=key) for index, key in enumerate(many)]
    [(header, pieces)] = pack_frames(1, 0, slices, layout)
    async with rig() as store:
        call = store.open_stream("Put")
        hello = kv_pb2.StreamHello(namespace=FORMAT.namespace, layout=layout.to_proto())
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=hello)))
        opening = kvstore_pb2.PutOpen(transfer=1, keys=pack_keys(many), layer_end=1, head_end=1)
        close = kvstore_pb2.PutClose(transfer=1, aborted=True)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening)))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=close)))
        credits_back = 0
        while credits_back < sum(piece.nbytes for piece in pieces):
            credits_back += (await call.read()).credit.bytes
        call.cancel()
        await all_back(store)


async def test_a_read_of_many_blocks_is_opened_in_portions() -> None:
    many = keys_of(PORTION_KEYS + 2, "many")
    async with rig(dram_bytes=len(many) * BLOCK) as store:
        writer = store.writer()
        await writer.put(many, many, "", hashed(lambda layer, index: slice_of(many[index], layer)), timeout_s=30)
        await writer.aclose()
        assert await store.read(many) == [data_of(key) for key in many]
        call = store.open_stream("Get")
        await call.write(kvstore_pb2.GetRequest(hello=store.hello()))
        opening = kv_pb2.ReadOpen(transfer=1, keys=pack_keys(many), layer_end=3, head_end=2)
        await call.write(kvstore_pb2.GetRequest(open=opening))
        await call.write(kvstore_pb2.GetRequest(close=kv_pb2.ReadClose(transfer=1)))
        call.cancel()
        await all_back(store)


async def test_slices_that_come_in_part_only_are_bounded() -> None:
    """Each transfer sends three of the four heads of a slice of 16 MiB, and no more."""
    layout = KVLayout.uniform(layers=1, kv_heads=4, head_dim=4096, block_size=128, dtype="float32")
    assert layout.slice_bytes(0) == MAX_SLICE_BYTES
    piece = memoryview(bytes(layout.share_bytes(0)))
    fits = MAX_UNFINISHED_BYTES // (3 * layout.share_bytes(0))
    async with rig(dram_bytes=8 * layout.block_bytes) as store:
        call = store.open_stream("Put")
        hello = kv_pb2.StreamHello(namespace=FORMAT.namespace, layout=layout.to_proto())
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=hello)))
        for transfer in range(fits + 1):
            opening = kvstore_pb2.PutOpen(transfer=transfer, keys=KEYS[0], layer_end=1, head_end=4)
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening)))
            for head in range(3):
                run = kv_pb2.SliceRun(block_count=1, head_begin=head, head_end=head + 1, valid_tokens=128)
                header = kv_pb2.FrameHeader(transfer=transfer, runs=[run], slice_hashes=[1])
                header.checksum = checksum(header)
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), piece))
        while not (message := await answer(call)).HasField("refused"):
            assert message.WhichOneof("message") in ("welcome", "opened")
        assert (message.refused.transfer, message.refused.code) == (fits, "kvstore_memory")
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=0, aborted=True))))
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(fits + 1, [B], range(1)))))
        assert (await answer(call)).opened.transfer == fits + 1
        call.cancel()
        await store.at_rest()


@MANY
async def test_so_many_writing_transfers_are_bounded_and_refused_clearly(transfers: int) -> None:
    async with rig(max_transfers=OPEN, dram_bytes=2 * OPEN * BLOCK) as store:
        call = store.open_stream("Put")
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
        await call.read()
        keys = keys_of(transfers, "many")
        answers: dict[int, Any] = {}

        async def read() -> None:
            while len(answers) < transfers:
                message = await answer(call)
                kind = message.WhichOneof("message")
                answers[getattr(message, kind).transfer] = message

        reading = asyncio.ensure_future(read())
        for transfer, key in enumerate(keys):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(transfer, [key]))))
        async with asyncio.timeout(60):
            await reading
        opened = [message for message in answers.values() if message.HasField("opened")]
        refused = [message.refused for message in answers.values() if message.HasField("refused")]
        assert (len(opened), len(refused)) == (OPEN, transfers - OPEN)
        assert {(each.code, each.reason) for each in refused} == {("kvstore_transfers", "too many writing transfers")}
        assert all(each.retry_after_s > 0 for each in refused)
        assert store.gauges()["put_transfers"] == OPEN
        call.cancel()
        await all_back(store)


@MANY
async def test_so_many_reading_transfers_are_bounded(transfers: int) -> None:
    async with rig(max_transfers=OPEN) as store:
        await store.put([A])
        call = store.open_stream("Get")
        await call.write(kvstore_pb2.GetRequest(hello=store.hello()))
        await call.read()
        hits, over = 0, 0

        async def read() -> None:
            nonlocal hits, over
            while hits + over < transfers:
                message = (await call.read()).message
                if message.HasField("opened"):
                    hits, over = hits + bool(message.opened.blocks), over + (not message.opened.blocks)

        reading = asyncio.ensure_future(read())
        opening: dict[str, Any] = {"keys": pack_keys([A]), "layer_end": 3, "head_end": 2}
        for transfer in range(transfers):
            await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=transfer, **opening)))
        async with asyncio.timeout(60):
            await reading
        assert hits == OPEN
        assert store.gauges()["stream_tasks"] <= 1024
        call.cancel()
        await all_back(store)


async def test_transfers_that_are_abandoned_leave_nothing() -> None:
    """Streams are cut in the middle of transfers, again and again; DRAM holds one transfer only."""
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        for round_ in range(20):
            call = await opened_put(store, [A, B])
            for header, pieces in frames_of([A, B], layers=range(round_ % 3)):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            call.cancel()
            await store.at_rest()
        assert await store.read([A]) == []
        await all_back(store)
