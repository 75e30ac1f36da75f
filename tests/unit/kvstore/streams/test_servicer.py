"""The service over a real server and the real clients."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from moonpool.errors import (
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    Unavailable,
)
from moonpool.kv.frames import FrameOpener, pack_frames, split_run
from moonpool.kv.keys import BlockKey, pack_keys, unpack_keys
from moonpool.rpc.channels import Channels, payload_stream
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.server import serving
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.store_reader import StoreReader
from moonpool.streams.store_writer import StoreWriter
from moonpool.telemetry.gauges import restless
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from services.kvstore.config import KVStoreConfig
from services.kvstore.service import KVStoreService, open_ssd
from tests.slices import hashed, slice_to_send
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, OTHER_FORMAT, RECORD, data_of, keys_of, slice_of

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]
PARENTS = [BlockKey(bytes(32)), *KEYS]


@dataclass
class Rig:
    """A running store and its clients."""

    service: KVStoreService
    channels: Channels
    address: str

    def hello(self, block_format: Any = FORMAT) -> kv_pb2.StreamHello:
        return kv_pb2.StreamHello(namespace=block_format.namespace, layout=block_format.layout.to_proto())

    def writer(self, block_format: Any = FORMAT) -> StoreWriter:
        return StoreWriter(self.channels, self.address, self.hello(block_format), LAYOUT)

    def reader(self, block_format: Any = FORMAT) -> StoreReader:
        return StoreReader(self.channels, self.address, self.hello(block_format), LAYOUT)

    @property
    def stub(self) -> Any:
        return KVStoreServiceStub(self.channels.get(self.address))

    def open_stream(self, method: str) -> Any:
        request, response = getattr(kvstore_pb2, f"{method}Request"), getattr(kvstore_pb2, f"{method}Response")
        return payload_stream(
            self.channels.get(self.address), "moonpool.v1.KVStoreService", method, request, response
        )()

    async def put(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        writer = self.writer()
        try:
            outcome = await writer.put(
                keys, PARENTS[: len(keys)], "", hashed(lambda layer, i: slice_of(keys[i], layer)), timeout_s=10
            )
        finally:
            await writer.aclose()
        return outcome.present, outcome.stored

    async def read(self, keys: Sequence[BlockKey], layers: range = range(3), block_format: Any = FORMAT) -> list[bytes]:
        reader = self.reader(block_format)
        out: dict[int, bytes] = {}

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            out[index] = out.get(index, b"") + data

        done: list[int] = []
        try:
            count = await reader.read(keys, layers=layers, on_slice=take, on_layer=done.append, timeout_s=10)
        finally:
            await reader.aclose()
        assert done == (list(layers) if count else [])
        return [out[index] for index in range(count)]

    async def durable(self) -> None:
        assert self.service.writer is not None
        assert await self.service.writer.drain(10)

    def gauges(self) -> dict[str, float]:
        return {gauge.name: gauge.value for gauge in self.service.gauges.read()}

    async def until(self, gauge: str, value: float) -> None:
        """Waits until a gauge has a value; every look costs a call, so that the store's own work goes on."""
        async with asyncio.timeout(10):
            while self.gauges()[gauge] != value:
                await self.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())

    async def at_rest(self) -> None:
        """Waits until streams that clients have left are gone, then checks that nothing is held."""
        async with asyncio.timeout(10):
            await self.service.servicer.quiet.wait()
            await self.service.idle.wait()
        assert self.service.writer is None or await self.service.writer.drain(10)
        assert restless(self.service.gauges.read()) == {}
        self.service.store.check_invariants()


@asynccontextmanager
async def rig(data_dir: Path | None = None, **settings: Any) -> AsyncIterator[Rig]:
    config = KVStoreConfig(
        data_dir=data_dir, **{"dram_bytes": 64 * BLOCK, "ssd_bytes": 1 << 20, "drain_s": 5} | settings
    )
    instance = kv_pb2.Instance(id="kvstore-0", incarnation=9, kind=kv_pb2.INSTANCE_KIND_KVSTORE)
    service = KVStoreService(config, open_ssd(config), instance)
    async with (
        service.running(),
        serving("127.0.0.1:0", [service.contract], grace_s=0) as server,
        Channels() as channels,
    ):
        yield Rig(service, channels, server.address)


async def test_what_was_put_is_read_layer_by_layer(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        assert await store.put(KEYS[:5]) == (0, 5)
        assert await store.put(KEYS[:6]) == (5, 1)
        assert await store.read(KEYS) == [data_of(key) for key in KEYS[:6]]
        assert await store.read(KEYS[:2], range(1, 2)) == [slice_of(key, 1) for key in KEYS[:2]]
        assert (await store.stub.MatchPrefix(kvstore_pb2.MatchPrefixRequest(keys=pack_keys(KEYS)))).blocks == 6
        await store.durable()
        await store.at_rest()
        assert store.gauges()["ssd_blocks"] == 6
    async with rig(tmp_path) as store:
        assert store.gauges()["dram_blocks"] == 0
        assert await store.read(KEYS) == [data_of(key) for key in KEYS[:6]]
        await store.at_rest()
        assert (store.gauges()["dram_blocks"], store.gauges()["ssd_hits_total"]) == (6, 6)
        assert await store.put(KEYS[:6]) == (6, 0)


async def test_closing_makes_visible_blocks_durable(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put(KEYS[:3])
    async with rig(tmp_path) as store:
        assert await store.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]


async def test_a_store_without_a_disk() -> None:
    async with rig(dram_bytes=2 * BLOCK) as store:
        for key in KEYS[:3]:
            await store.put([key])
        assert [len(await store.read([key])) for key in KEYS[:3]] == [0, 1, 1]
        await store.at_rest()
        assert (store.gauges()["dram_evictions_total"], "ssd_blocks" in store.gauges()) == (1, False)


async def test_another_namespace_is_a_miss() -> None:
    async with rig() as store:
        await store.put([A])
        assert await store.read([A], block_format=OTHER_FORMAT) == []
        assert await store.read([B, A]) == []


async def test_a_corrupted_block_is_a_miss_and_watchers_hear_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put(KEYS[:3])
    segment = next((tmp_path / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[RECORD + 4096 + 5] ^= 4
    segment.write_bytes(data)
    async with rig(tmp_path) as store:
        watch = store.stub.Watch(kvstore_pb2.WatchRequest())
        first = await watch.read()
        assert (first.incarnation, first.events.snapshot_begin, first.events.snapshot_end) == (9, True, True)
        assert set(unpack_keys(first.events.stored_keys)) == set(KEYS[:3])
        assert await store.read(KEYS[:3]) == [data_of(A)]
        change = await watch.read()
        assert (change.events.sequence, unpack_keys(change.events.removed_keys)) == (1, [B])
        assert store.gauges()["bad_blocks_total"] == 1
        await store.put(KEYS[:3])
        assert unpack_keys((await watch.read()).events.stored_keys) == [B]
        assert await store.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]
        watch.cancel()
        await store.durable()
        await store.at_rest()


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


def frames_of(keys: Sequence[BlockKey], session: int = 1, layers: range = range(3)) -> list[tuple[Any, Any]]:
    slices = [
        slice_to_send(LAYOUT, layer, index, slice_of(key, layer), key=key)
        for layer in layers
        for index, key in enumerate(keys)
    ]
    return list(pack_frames(session, 0, slices, LAYOUT))


async def opened_put(store: Rig, blocks: Sequence[BlockKey], present: Sequence[int] = (), **changes: Any) -> Any:
    """A raw Put stream with one session."""
    call = store.open_stream("Put")
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
    assert (await call.read()).welcome.credit_bytes == store.service.config.window_bytes
    opening: dict[str, Any] = {
        "session": 1, "keys": pack_keys(blocks), "layer_end": 3, "head_end": 2, "parent_keys": pack_keys(blocks),
    }  # fmt: skip
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=kvstore_pb2.PutOpen(**opening | changes))))
    answer = await call.read()
    if not changes:
        assert list(answer.opened.present) == list(present)
        return call
    return call, answer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": b"short"}, "keys: "),
        ({"layer_end": 4}, "layer_end: "),
        ({"head_begin": 2}, "head_end: "),
        ({"parent_keys": b"x" * 32 * 2}, "parent_keys: "),
        ({"keys": pack_keys(keys_of(65, "many")), "parent_keys": b""}, "keys: the session needs"),
    ],
)
async def test_a_wrong_session_is_refused_and_the_stream_goes_on(changes: dict[str, Any], reason: str) -> None:
    async with rig() as store:
        call, answer = await opened_put(store, [A], **changes)
        assert answer.refused.session == 1
        assert answer.refused.reason.startswith(reason)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [A]))))
        assert (await call.read()).opened.session == 2
        call.cancel()
        await store.at_rest()


def put_open(session: int, keys: Sequence[BlockKey], layers: range = range(3)) -> kvstore_pb2.PutOpen:
    return kvstore_pb2.PutOpen(
        session=session, keys=pack_keys(keys), layer_begin=layers.start, layer_end=layers.stop, head_end=2
    )


async def answer(call: Any) -> Any:
    """The next message that is no credit: those of a store without sessions come at once."""
    while (message := await call.read()).HasField("credit"):
        pass
    return message


async def test_bad_frames_end_their_session_only() -> None:
    async with rig() as store:
        call = await opened_put(store, [A, B])
        header, pieces = frames_of([A, B])[0]
        header.checksum ^= 1
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        refused = (await answer(call)).refused
        assert (refused.session, "checksum" in refused.reason) == (1, True)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))  # of no session: dropped
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [A]))))
        assert (await answer(call)).opened.session == 2
        header, pieces = frames_of([A], session=2, layers=range(1))[0]
        for _ in range(2):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        assert "come before" in (await answer(call)).refused.reason
        assert store.gauges()["dram_reserved_bytes"] == 0
        call.cancel()
        await store.at_rest()


async def put_whole(call: Any, keys: Sequence[BlockKey], number: int = 1, **header: Any) -> Any:
    """A session that comes with its opening; the answer."""
    [(frame, pieces)] = frames_of(keys, session=number)
    for name, value in header.items():
        setattr(frame, name, value)
    opening = put_open(number, keys)
    opening.frame.CopyFrom(frame)
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
    return await answer(call)


@asynccontextmanager
async def putting(store: Rig) -> AsyncIterator[Any]:
    call = store.open_stream("Put")
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
    assert (await call.read()).HasField("welcome")
    yield call
    call.cancel()
    await store.at_rest()


async def test_a_session_in_one_message_is_answered_in_one() -> None:
    async with rig() as store, putting(store) as call:
        for session, present in ((1, []), (2, [0, 1])):
            response = await put_whole(call, [A, B], session)
            opened = kvstore_pb2.PutOpened(session=session, present=present, taken=True)
            assert response == kvstore_pb2.PutResponse(opened=opened, credit_bytes=2 * BLOCK)
        assert store.gauges()["put_sessions"] == 0
        assert await store.read([A, B]) == [data_of(A), data_of(B)]


@pytest.mark.parametrize(("header", "reason"), [({"session": 9}, "frame.session: "), ({"checksum": 1}, "checksum")])
async def test_a_bad_session_in_one_message_is_refused(header: dict[str, Any], reason: str) -> None:
    async with rig() as store, putting(store) as call:
        refused = (await put_whole(call, [A, B], **header)).refused
        assert refused.session == 1
        assert reason in refused.reason
        assert (await put_whole(call, [A, B], 2)).opened.taken


async def test_a_part_of_a_session_in_one_message_is_refused() -> None:
    async with rig() as store, putting(store) as call:
        [(frame, pieces)] = frames_of([A])
        opening = put_open(1, [A, B])
        opening.frame.CopyFrom(frame)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
        assert (await answer(call)).refused.reason == "frame: is not all of the session"
        assert (await put_whole(call, [A, B], 2)).opened.present == [0]


async def test_a_writer_of_some_layers_is_asked_for_its_frames() -> None:
    async with rig() as store, putting(store) as call:
        [(frame, pieces)] = frames_of([A], layers=range(2))
        opening = put_open(1, [A], range(2))
        opening.frame.CopyFrom(frame)
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
        opened = (await answer(call)).opened
        assert (opened.session, opened.taken) == (1, False)
        assert store.gauges()["put_sessions"] == 1


async def test_a_session_in_one_message_that_finds_no_room_is_opened_later() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        await store.put([A, B])
        holding = await opened_get(store)
        assert (await holding.read()).message.opened.blocks == 2
        async with putting(store) as call:
            asking = asyncio.ensure_future(put_whole(call, [C]))
            await store.until("sessions_waiting_for_room", 1)
            holding.cancel()
            response = await asking
            assert (response.opened.session, response.opened.taken) == (1, False)
            for header, pieces in frames_of([C]):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            assert list((await answer(call)).ack.blocks) == [0]


async def test_two_processes_write_the_layers_of_a_block() -> None:
    async with rig() as store:
        low, _ = await opened_put(store, [A], layer_end=2)
        high, _ = await opened_put(store, [A], layer_begin=2)
        for call, layers in ((low, range(2)), (high, range(2, 3))):
            for header, pieces in frames_of([A], layers=layers):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            close = kvstore_pb2.PutClose(session=1)
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
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(session=1))))
        assert list((await call.read()).ack.blocks) == [1]
        assert await store.read([A, B]) == [data_of(A), data_of(B)]
        call.cancel()
        await store.at_rest()


async def test_a_session_closed_too_early_is_refused() -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(session=1))))
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


async def test_a_session_without_progress_is_ended() -> None:
    async with rig(session_timeout_s=0.05) as store:
        call = await opened_put(store, [A])
        assert "no progress" in (await call.read()).refused.reason
        call.cancel()
        await store.at_rest()


async def test_a_session_that_waits_for_room_uses_what_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(dram_bytes=3 * BLOCK, room_timeout_s=10) as store:
        await store.put([A])
        first = await opened_put(store, [B, C])
        used: list[list[BlockKey]] = []
        touch = store.service.store.holdings.touch

        def noting(chain: Sequence[BlockKey]) -> None:
            used.append(list(chain))
            touch(chain)

        monkeypatch.setattr(store.service.store.holdings, "touch", noting)
        second = store.open_stream("Put")
        await second.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
        await second.read()
        await second.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(1, [A, *KEYS[3:5]]))))
        await store.until("sessions_waiting_for_room", 1)
        for _ in range(3):
            store.service.rooms.poke()
        close = kvstore_pb2.PutClose(session=1, aborted=True)
        await first.write(PayloadMessage(kvstore_pb2.PutRequest(close=close)))
        assert list((await second.read()).opened.present) == [0]
        assert used == [[A]]
        for call in (first, second):
            call.cancel()
        await store.at_rest()


async def test_writers_wait_for_room_in_order_and_not_for_ever() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=2.0) as store:
        first = await opened_put(store, [A, B])
        second = store.open_stream("Put")
        await second.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
        await second.read()
        for session, key in ((1, C), (2, D)):
            await second.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(session, [key]))))
        await store.until("sessions_waiting_for_room", 2)
        await second.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(session=1, aborted=True))))
        await store.until("sessions_waiting_for_room", 1)
        close = kvstore_pb2.PutClose(session=1, aborted=True)
        await first.write(PayloadMessage(kvstore_pb2.PutRequest(close=close)))
        assert (await second.read()).opened.session == 2
        await first.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(3, [A, B]))))
        refused = (await first.read()).refused
        assert refused.session == 3
        assert refused.reason.startswith("no room within 2")
        first.cancel()
        second.cancel()
        await store.at_rest()


@pytest.mark.parametrize("method", ["Put", "Get"])
async def test_a_stream_must_begin_with_a_proper_hello(method: str) -> None:
    async with rig() as store:
        wrong_layout = kv_pb2.StreamHello(namespace=b"n" * 32, layout=kv_pb2.KVLayout(layers=1))
        request = getattr(kvstore_pb2, f"{method}Request")
        for message, kind in (
            (request(), InvalidRequest),
            (request(hello=kv_pb2.StreamHello(layout=LAYOUT.to_proto())), Mismatch),
            (request(hello=wrong_layout), Mismatch),
        ):
            call = store.open_stream(method)
            await call.write(PayloadMessage(message) if method == "Put" else message)
            assert isinstance(await failure(call), kind)
        await store.at_rest()


async def failure(call: Any) -> MoonpoolError | None:
    """What a stream ends with."""
    try:
        answer = await call.read()
        while answer is not grpc.aio.EOF:
            answer = await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def opened_get(store: Rig, **fields: Any) -> Any:
    call = store.open_stream("Get")
    await call.write(kvstore_pb2.GetRequest(hello=store.hello()))
    assert (await call.read()).message.HasField("welcome")
    opening: dict[str, Any] = {"session": 1, "keys": pack_keys(KEYS), "layer_end": 3, "head_end": 2}
    await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(**opening | fields)))
    return call


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"keys": b"x"}, "keys"),
        ({"layer_end": 4}, "layer_end"),
        ({"layer_begin": 3}, "layer_end"),
        ({"head_end": 3}, "head_end"),
        ({"head_begin": 2}, "head_end"),
        ({"keys": bytes(32 * 16385)}, "keys"),
    ],
)
async def test_an_impossible_read_ends_the_stream(fields: dict[str, Any], named: str) -> None:
    async with rig() as store:
        error = await failure(await opened_get(store, **fields))
        assert isinstance(error, InvalidRequest)
        assert error.field == named
        await store.at_rest()


async def test_a_reader_without_credits_gets_nothing_and_is_given_up() -> None:
    async with rig(session_timeout_s=0.05) as store:
        await store.put(KEYS[:3])
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 3
        assert (await call.read()).message.HasField("done")
        call.cancel()
        await store.at_rest()


async def test_a_small_read_is_answered_in_one_message_where_nothing_is_to_wait_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put([A, B])
        await store.durable()
        call = await opened_get(store, takes_frame=True)  # no credits yet: piece by piece
        response = (await call.read()).message
        assert (response.opened.blocks, response.opened.HasField("frame")) == (2, False)
        await call.write(kvstore_pb2.GetRequest(credit=kv_pb2.Credit(bytes=1 << 20)))
        while not (await call.read()).message.HasField("done"):
            pass
        opening = kv_pb2.ReadOpen(session=2, keys=pack_keys(KEYS[:3]), layer_end=3, head_end=2, takes_frame=True)
        await call.write(kvstore_pb2.GetRequest(open=opening, credit_bytes=2 * BLOCK))
        received = await call.read()
        assert received.message.opened.blocks == 2
        runs = FrameOpener(LAYOUT, keys=[A, B]).open(received.message.opened.frame, received.payload)
        data = {(run.layer, index): bytes(part) for run, d, _ in runs for index, _, part in split_run(run, d, LAYOUT)}
        for index, key in enumerate([A, B]):
            assert b"".join(data[layer, index] for layer in range(3)) == data_of(key)
        assert store.gauges()["get_sessions"] == 0
        call.cancel()
        await store.at_rest()
    async with rig(tmp_path) as store:  # from the disk: layer by layer
        call = await opened_get(store, takes_frame=True)
        response = (await call.read()).message
        assert (response.opened.blocks, response.opened.HasField("frame")) == (2, False)
        call.cancel()
        await store.at_rest()


async def test_a_reader_holds_its_blocks_until_it_leaves() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        await store.put([A, B])
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 2
        assert store.gauges()["dram_held_bytes"] == 2 * BLOCK
        writing = asyncio.ensure_future(store.put([C]))
        await call.write(kvstore_pb2.GetRequest(close=kv_pb2.ReadClose(session=1)))
        assert await writing == (0, 1)
        call.cancel()
        await store.at_rest()


async def test_many_reads_share_a_stream(tmp_path: Path) -> None:
    async with rig(tmp_path, read_ahead_bytes=1) as store:
        await store.put(KEYS)
    async with rig(tmp_path, read_ahead_bytes=1, dram_bytes=2 * BLOCK) as store:
        reader = store.reader()

        async def one(count: int) -> list[bytes]:
            out: dict[int, bytes] = {}

            def take(layer: int, index: int, data: memoryview, value: int) -> None:
                out[index] = out.get(index, b"") + data

            blocks = await reader.read(
                KEYS[:count], layers=range(3), on_slice=take, on_layer=lambda _: None, timeout_s=10
            )
            return [out[index] for index in range(blocks)]

        counts = [8, 1, 5, 8, 3, 8]
        for count, blocks in zip(counts, await asyncio.gather(*map(one, counts)), strict=True):
            assert blocks == [data_of(key) for key in KEYS[:count]]
        await reader.aclose()
        await store.at_rest()


async def test_a_watcher_resumes_where_it_was() -> None:
    async with rig() as store:
        await store.put([A])
        await store.put([B])
        watch = store.stub.Watch(kvstore_pb2.WatchRequest(incarnation=9, after_sequence=1))
        message = await watch.read()
        assert (message.events.sequence, unpack_keys(message.events.stored_keys)) == (2, [B])
        watch.cancel()
        await store.at_rest()


async def test_stats_tell_what_is_held() -> None:
    async with rig() as store:
        await store.put([A, B])
        answer = await store.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())
        assert answer.instance.id == "kvstore-0"
        gauges = {gauge.name: gauge.value for gauge in answer.gauges}
        assert (gauges["dram_blocks"], gauges["dram_bytes"], gauges["blocks_put_total"]) == (2, 2 * BLOCK, 2)


async def test_closing_ends_streams_but_not_before_their_sessions() -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        watch = store.stub.Watch(kvstore_pb2.WatchRequest())
        await watch.read()
        finishing = asyncio.ensure_future(store.service.finish())
        for header, pieces in frames_of([A]):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        assert list((await call.read()).ack.blocks) == [0]
        assert not finishing.done()
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(session=1))))
        await finishing
        assert isinstance(await failure(call), Unavailable)
        assert isinstance(await failure(watch), Unavailable)
        await store.at_rest()


async def test_a_broken_or_closing_stream_frees_its_sessions() -> None:
    async with rig(drain_s=0.05, dram_bytes=2 * BLOCK, room_timeout_s=9) as store:
        blocker = await opened_put(store, [A, B])
        waiting = asyncio.ensure_future(store.put([C]))
        await blocker.write(PayloadMessage(kvstore_pb2.PutRequest()))
        assert isinstance(await failure(blocker), InvalidRequest)
        assert await waiting == (0, 1)
        late, _ = await opened_put(store, [A, D], parent_keys=b"")
        await late.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(2, [B]))))
        await late.write(PayloadMessage(kvstore_pb2.PutRequest(open=put_open(3, []))))
        assert (await late.read()).refused.session == 3
        assert len(store.service.rooms) == 1
        await store.service.finish()
        assert isinstance(await failure(late), Unavailable)
        await store.at_rest()
