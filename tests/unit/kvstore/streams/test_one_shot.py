"""Brief messages at a store: what they do, what takes a transfer instead, and peers that do not keep to anything."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import FrameError, PermissionDenied, StreamBroken
from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey, bind, pack_keys, slice_hash
from moonpool.base.kv.values import value_key
from moonpool.base.kv_transfer.blocking import BlockingReader, BlockingWriter
from moonpool.base.kv_transfer.store_writer import BlocksToPut
from moonpool.base.transport.blocking import BlockingConnection, BlockingStream
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framing import (
    GET,
    ONE_SHOT_BYTES,
    OTHERWISE,
    PUT,
    STORED,
    OneShotMessage,
    PayloadExtent,
    trailing_hashes,
)
from moonpool.base.transport.regions import SharedMemory
from moonpool.base.transport.registry import open_transports
from moonpool.kvstore.get_stream import GetStream
from moonpool.kvstore.put_stream import PutStream
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.pairs import transport_settings
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, OTHER_FORMAT, data_of, keys_of, slice_of
from tests.unit.kvstore.rig import KEYS, Rig, rig

ONE_SHOT_TRANSPORTS = ["local", "tcp", "tls"]
TIMEOUT_S = 60.0


@asynccontextmanager
async def storing(folder: Path, connection: str, **settings: Any) -> AsyncIterator[Rig]:
    async with rig(**transport_settings(connection, folder), **settings) as store:
        store.dialer = TransportDialer(open_transports(TransportConfig(**transport_settings(connection, folder))))
        yield store
        await store.at_rest()


@asynccontextmanager
async def opened(
    store: Rig, method: str, staging: SharedMemory | None = None, **options: Any
) -> AsyncIterator[tuple[BlockingStream[Any, Any], BlockingConnection]]:
    """A direct connection to the store's Put or Get."""
    assert store.dialer is not None
    hello = getattr(kvstore_pb2, f"{method}Request")(hello=store.hello())
    store.dialer.fill(hello.hello)
    share = () if staging is None else (staging.shared,)
    connect = lambda: store.open_stream(method)  # noqa: E731
    stream: BlockingStream[Any, Any] = BlockingStream("store", connect, hello, store.dialer, share=share, **options)
    connection = await stream.open()
    assert connection is not None
    yield stream, connection
    await stream.aclose()


@asynccontextmanager
async def reading(store: Rig) -> AsyncIterator[tuple[BlockingStream[Any, Any], BlockingConnection]]:
    async with opened(store, "Get", mailbox_bytes=1 << 16) as both:
        yield both


async def read(connection: BlockingConnection, keys: Sequence[BlockKey]) -> list[bytes] | None:
    """What `BlockingReader` reads; every other slice has no place of its own."""
    memory = [bytearray(BLOCK) for _ in keys]

    def place(layer: int, index: int) -> memoryview:
        return memoryview(memory[index])[layer * LAYOUT.slice_bytes(0) :][: LAYOUT.slice_bytes(0)]

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        assert value == slice_hash(data)
        place(layer, index)[:] = data

    into = lambda layer, index: None if index % 2 else place(layer, index)  # noqa: E731
    reader = BlockingReader(connection, LAYOUT)
    count = await asyncio.to_thread(reader.read, keys, into=into, on_slice=take, timeout_s=TIMEOUT_S)
    return None if count is None else [bytes(each) for each in memory[:count]]


async def write(connection: BlockingConnection, keys: Sequence[BlockKey], staging: SharedMemory | None) -> int | None:
    def slice_at(layer: int, index: int) -> tuple[memoryview, int]:
        data = memoryview(slice_of(keys[index], layer))
        return data, slice_hash(data)

    writer = BlockingWriter(connection, LAYOUT, staging)
    blocks = BlocksToPut(keys, [NO_PARENT] * len(keys), "", slice_at)
    outcome = await asyncio.to_thread(writer.put, blocks, TIMEOUT_S)
    return None if outcome is None else outcome.present


def following(fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `BlockingConnection.ask` for a message whose payload follows in one go."""
    parts = fields.get("payload", [])
    return fields | {"payload": [parts], "follow": sum(part.nbytes for part in parts)}


async def ask(connection: BlockingConnection, *message: Any, **fields: Any) -> OneShotMessage:
    """One exchange with what may not be proper; its payload is left."""

    def exchange() -> OneShotMessage:
        assert connection.begin(TIMEOUT_S)
        with connection:
            return connection.answer(connection.ask(*message, **following(fields)))[0]

    return await asyncio.to_thread(exchange)


def put_of(blocks: Sequence[BlockKey], **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A put whose payload follows it."""
    cells = [(layer, key) for layer in range(LAYOUT.layers) for key in blocks]
    payload = [memoryview(slice_of(key, layer)) for layer, key in cells]
    hashes = [bind(slice_hash(data), key, layer) for data, (layer, key) in zip(payload, cells, strict=True)]
    fields: dict[str, Any] = {"keys": pack_keys([*blocks, *blocks]), "numbers": hashes, "payload": payload}
    return (PUT, len(blocks)), fields | changes


async def test_hashes_may_come_with_the_message_or_behind_the_payload(sockets: Path) -> None:
    async with storing(sockets, "tcp") as store, opened(store, "Put") as (_, connection):
        for at, behind in enumerate((False, True)):
            message, fields = put_of(KEYS[2 * at : 2 * at + 2])
            hashes = fields["numbers"]
            if behind:
                wrong = fields | {"payload": [*fields["payload"], trailing_hashes([hashes[0] ^ 1, *hashes[1:]])]}
                assert (await ask(connection, *message, **wrong | {"numbers": []})).kind == OTHERWISE
                fields |= {"numbers": [], "payload": [*fields["payload"], trailing_hashes(hashes)]}
            assert (await ask(connection, *message, **fields)).kind == STORED
        assert await store.read(KEYS[:4]) == [data_of(key) for key in KEYS[:4]]


@pytest.mark.parametrize("connection", ONE_SHOT_TRANSPORTS)
async def test_blocks_come_back_as_they_were_put(sockets: Path, connection: str) -> None:
    staging = SharedMemory(ONE_SHOT_BYTES) if connection == "local" else None
    async with storing(sockets, connection) as store:
        async with opened(store, "Put", staging) as (_, puts), reading(store) as (_, gets):
            assert (puts.name, gets.name) == (connection, connection)
            assert await write(puts, KEYS[:3], staging) == 0
            assert await write(puts, KEYS[:4], staging) == 3
            for _ in range(3):  # more in all than the mailbox has room for at once
                assert await read(gets, KEYS) == [data_of(key) for key in KEYS[:4]]
            assert await read(gets, keys_of(2, "none")) == []
            await store.put(KEYS)  # in the usual way
            assert await read(gets, KEYS) == [data_of(key) for key in KEYS]
        reads = store.service.store.reads
        assert (reads.dram_hits, reads.misses) == (3 * 4 + len(KEYS), 3 * 4 + 2)


async def test_slices_are_read_from_shared_memory_where_they_lie_whatever_their_order(sockets: Path) -> None:
    """Extents that lie one behind the other are joined; those that lie one before the other are not."""
    shared = SharedMemory(4 * BLOCK)
    memory, places = shared.shared.data, dict[tuple[int, int], memoryview]()
    free = len(memory)
    for layer, index in itertools.product(range(LAYOUT.layers), range(4)):
        data = slice_of(KEYS[index], layer)
        places[layer, index] = memory[free - len(data) : free]
        places[layer, index][:] = data
        free -= len(data)
    slice_at = lambda layer, index: (places[layer, index], slice_hash(places[layer, index]))  # noqa: E731
    async with storing(sockets, "local") as store, opened(store, "Put", shared) as (_, connection):
        writer = BlockingWriter(connection, LAYOUT, shared)
        outcome = await asyncio.to_thread(writer.put, BlocksToPut(KEYS[:4], [NO_PARENT] * 4, "", slice_at), TIMEOUT_S)
        assert outcome is not None
        assert (outcome.present, outcome.stored) == (0, 4)
        assert await store.read(KEYS[:4]) == [data_of(key) for key in KEYS[:4]]


async def test_a_mailbox_without_room_is_no_hindrance(sockets: Path) -> None:
    async with storing(sockets, "local") as store:
        await store.put(KEYS)
        async with opened(store, "Get", mailbox_bytes=2 * BLOCK) as (_, connection):
            assert await read(connection, KEYS) == [data_of(key) for key in KEYS]
            assert await read(connection, KEYS[:2]) == [data_of(key) for key in KEYS[:2]]


async def test_what_takes_a_transfer_changes_nothing(sockets: Path) -> None:
    async with storing(sockets, "tcp", dram_bytes=4 * BLOCK) as store, opened(store, "Put") as (_, connection):
        await store.put(KEYS[:1])
        selection = kv_pb2.Selection(tenants=["ann"])
        await store.stub.Forget(kv_pb2.ForgetRequest(deletions=[kv_pb2.Deletion(id="d", selection=selection)]))
        anns = kvstore_pb2.PutOpen(tenant="ann").SerializeToString()
        damaged = [memoryview(bytes(LAYOUT.slice_bytes(0)))] * LAYOUT.layers
        cases: list[tuple[list[BlockKey], dict[str, Any]]] = [
            (KEYS[1:2], {"payload": damaged}),
            (KEYS[1:2], {"payload": damaged[:2]}),
            (KEYS[1:2], {"numbers": []}),
            (KEYS[1:2], {"keys": KEYS[1] + KEYS[2] + KEYS[3]}),
            (KEYS[1:2], {"rest": anns}),
            (KEYS[1:2], {"rest": b"\xff"}),
            ([KEYS[1]] * 2, {}),
            ([], {}),
            (KEYS[1:6], {}),
        ]
        for keys, changes in cases:
            message, fields = put_of(keys, **changes)
            assert (await ask(connection, *message, **fields)).kind == OTHERWISE, changes
        assert store.gauges()["dram_blocks"] == 1
        message, fields = put_of(KEYS[:2], rest=kvstore_pb2.PutOpen(tenant="ann", forgotten=["d"]).SerializeToString())
        stored = await ask(connection, *message, **fields)
        assert (stored.kind, stored.numbers) == (STORED, (0,))


async def test_blocks_of_another_format_are_neither_replaced_nor_read(sockets: Path) -> None:
    async with storing(sockets, "tcp") as store, opened(store, "Put") as (_, puts), reading(store) as (_, gets):
        other = store.writer(OTHER_FORMAT)

        def slice_at(layer: int, index: int) -> tuple[memoryview, int]:
            data = memoryview(slice_of(KEYS[0], layer))
            return data, slice_hash(data)

        await other.put(KEYS[:1], [NO_PARENT], "", slice_at, timeout_s=TIMEOUT_S)
        await other.aclose()
        assert await write(puts, KEYS[:1], None) is None
        assert await read(gets, KEYS[:1]) == []


async def test_what_is_not_in_memory_takes_a_transfer(sockets: Path, tmp_path: Path) -> None:
    async with storing(sockets, "tcp", data_dir=tmp_path, dram_bytes=2 * BLOCK) as store:
        await store.put(KEYS[:2])
        await store.durable()
        await store.put(KEYS[2:4])
        async with reading(store) as (_, connection):
            assert await read(connection, KEYS[:1]) is None
            assert await read(connection, KEYS[2:4]) == [data_of(key) for key in KEYS[2:4]]
        await store.durable()


async def test_a_damaged_block_takes_a_transfer_which_reports_it(sockets: Path) -> None:
    async with storing(sockets, "local") as store:
        await store.put(KEYS[:2])
        block = store.service.store.tiers.dram.get(KEYS[1])
        assert block is not None
        block.data[70] ^= 1
        async with reading(store) as (_, connection):
            assert await read(connection, KEYS[:2]) is None
            assert connection.error is not None
            assert await read(connection, KEYS[:2]) is None


async def test_a_tenant_has_its_own_keys_only(sockets: Path) -> None:
    async with storing(sockets, "tcp") as store:
        servicer, closing = store.service.servicer, asyncio.Event()
        streams: list[GetStream | PutStream] = [GetStream(servicer.get, closing), PutStream(servicer.put, closing)]
        for stream in streams:
            stream.format, stream.tenant = FORMAT, "ann"
            with pytest.raises(PermissionDenied, match="keys of its own tenant only"):
                list(stream.on_one_shot(OneShotMessage(GET, 1, 1, keys=KEYS[0]), memoryview(b"")))
        others = kvstore_pb2.PutOpen(tenant="bob").SerializeToString()
        own = value_key(FORMAT.namespace, "ann", b"k")
        with pytest.raises(PermissionDenied):
            list(streams[1].on_one_shot(OneShotMessage(PUT, 1, 1, keys=own + NO_PARENT, rest=others), memoryview(b"")))


IMPROPER = [
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(1, BLOCK, ONE_SHOT_BYTES - BLOCK + 1),)),
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(1, BLOCK, 1 << 63),)),
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(2, BLOCK, 0),)),
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(0, BLOCK, 0),)),
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(1, 1, 0),) * 2000),
    OneShotMessage(PUT, 1, 1, extents=(PayloadExtent(1, ONE_SHOT_BYTES, 0),) * 3),
    OneShotMessage(GET, 1, 1, keys=KEYS[0], pulled=1),
    OneShotMessage(9, 1, 1),
    OneShotMessage(GET, 1, 1, keys=KEYS[0]),
    OneShotMessage(STORED, 1),
]


async def test_a_put_on_a_connection_of_reads_ends_it(sockets: Path) -> None:
    async with storing(sockets, "tcp") as store, reading(store) as (stream, connection):
        message, fields = put_of([])
        with pytest.raises(StreamBroken):
            await ask(connection, *message, **fields)
        async with asyncio.timeout(TIMEOUT_S):
            await stream.ended()


async def test_what_is_improper_ends_its_connection_only(sockets: Path) -> None:
    staging = SharedMemory(ONE_SHOT_BYTES)

    async def try_(store: Rig, message: OneShotMessage) -> None:
        async with opened(store, "Put", staging) as (stream, connection):
            for _ in range(message.pulled):
                connection.pulled()
            fields = {"keys": message.keys, "extents": message.extents}
            with pytest.raises(StreamBroken):
                await ask(connection, message.kind, message.blocks, **fields)
            async with asyncio.timeout(TIMEOUT_S):
                await stream.ended()

    async with storing(sockets, "local") as store, opened(store, "Put", staging) as (_, connection):
        await asyncio.gather(*(try_(store, message) for message in IMPROPER))
        assert await write(connection, KEYS[:1], staging) == 0
        assert store.gauges()["dram_blocks"] == 1


def nonsense(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A message that a store may make nothing of, or something."""
    blocks = rng.choices([*KEYS, *keys_of(4, "x")], k=rng.randrange(4))
    message, fields = put_of(blocks)
    kind, count = message
    places = [PayloadExtent(rng.randrange(3), rng.randrange(2 * BLOCK), rng.randrange(2 * BLOCK)) for _ in range(2)]
    changes: dict[str, Any] = {
        "keys": rng.choice([pack_keys(blocks), rng.randbytes(32 * rng.randrange(3)), fields["keys"]]),
        "numbers": [rng.getrandbits(64) for _ in range(rng.randrange(8))],
        "extents": places[rng.randrange(3) :],
        "rest": rng.randbytes(rng.randrange(5)),
        "payload": [memoryview(rng.randbytes(rng.randrange(BLOCK)))],
    }
    chosen = rng.sample(sorted(changes), rng.randrange(4))
    fields |= {name: changes[name] for name in chosen}
    return (rng.choice([kind, kind, GET, rng.randrange(1, 6)]), rng.choice([count, rng.randrange(5)])), fields


@pytest.mark.slow
async def test_nonsense_is_answered_or_ends_its_connection(sockets: Path) -> None:
    seed = 5
    print("seed", seed)
    rng, staging = random.Random(seed), SharedMemory(ONE_SHOT_BYTES)
    answered = ended = 0
    async with storing(sockets, "local", dram_bytes=6 * BLOCK) as store:
        while answered + ended < 120:
            method = rng.choice(["Put", "Get"])
            options: dict[str, Any] = {"staging": staging} if method == "Put" else {"mailbox_bytes": 1 << 16}
            async with opened(store, method, **options) as (_, connection):
                for _ in range(20):
                    message, fields = nonsense(rng)
                    try:
                        await ask(connection, *message, **fields)
                        answered += 1
                    except (StreamBroken, FrameError):  # parts of an answer that nobody took are no next one
                        ended += 1
                        break
        assert min(answered, ended) > 10, (answered, ended)
        await store.put(KEYS[:2])
        assert await store.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]


async def test_who_does_not_read_its_answers_is_not_read_either(sockets: Path) -> None:
    """It gets what the system takes at once; then short answers only, and then nothing."""
    async with storing(sockets, "tcp") as store, reading(store) as (_, connection):
        await store.put(KEYS)

        def flood() -> None:
            assert connection.begin(0.2)
            with connection:
                while True:
                    connection.ask(GET, len(KEYS), keys=pack_keys(KEYS))

        with pytest.raises(Exception, match="in time"):
            await asyncio.to_thread(flood)
        assert store.service.streams.traffic.unsent <= 1024 + 1


async def test_who_leaves_in_the_middle_leaves_nothing(sockets: Path) -> None:
    async with storing(sockets, "tcp") as store, opened(store, "Put") as (stream, connection):

        def begin() -> None:
            assert connection.begin(TIMEOUT_S)
            with connection:
                message, fields = put_of(KEYS[:2])
                connection.ask(*message, **following(fields | {"payload": [memoryview(bytes(BLOCK))]}))
                connection.ask(GET, 0, b"")
                raise FrameError("enough")

        with pytest.raises(FrameError, match="enough"):
            await asyncio.to_thread(begin)
        async with asyncio.timeout(TIMEOUT_S):
            await stream.ended()
        assert store.gauges()["dram_reserved_bytes"] == 0


async def test_a_connection_ends_with_its_call_and_an_exchange_with_its_connection(sockets: Path) -> None:
    async with storing(sockets, "local") as store, reading(store) as (stream, connection):
        await store.put(KEYS[:1])
        stream.break_(StreamBroken("cut"))
        assert await read(connection, KEYS[:1]) is None
        assert str(connection.error) == "cut"
