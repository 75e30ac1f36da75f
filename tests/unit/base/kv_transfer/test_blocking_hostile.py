"""A direct connection whose store says what it likes: reads end as `None`, puts with an error."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from moonpool.base.errors import FrameError, StreamBroken, TransferFailed
from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.blocking import BlockingReader, BlockingWriter
from moonpool.base.kv_transfer.store_writer import BlocksToPut
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.blocking import BlockingConnection
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.framing import (
    FOUND,
    GET,
    LENGTH_PREFIX,
    ONE_SHOT_FLAG,
    OTHERWISE,
    STORED,
    OneShotMessage,
    PayloadExtent,
)
from moonpool.base.transport.regions import ExportedRegions, Mailbox, MappedRegion
from moonpool.base.transport.tcp import TcpTransport
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, data_of, keys_of, slice_of

KEYS = keys_of(2)
SLICES = [(layer, key) for layer in range(LAYOUT.layers) for key in KEYS]
HASHES = [bind(slice_hash(slice_of(key, layer)), key, layer) for layer, key in SLICES]
WHOLE = b"".join(slice_of(key, layer) for layer, key in SLICES)


def good(**changes: Any) -> OneShotMessage:
    """The proper answer to the first question, changed."""
    fields: dict[str, Any] = {"kind": FOUND, "number": 1, "blocks": 2, "numbers": HASHES}
    return OneShotMessage(**fields | changes)


PART = good(numbers=HASHES[:1]).encoded(LAYOUT.slice_bytes(0)) + WHOLE[: LAYOUT.slice_bytes(0)]


@contextmanager
def joined(mailbox: bytes = b"", *, spin_s: float = 0.0) -> Iterator[tuple[BlockingConnection, socket.socket]]:
    """A direct connection, and the socket of who plays the store; what the store has written to the mailbox."""
    near, far = socket.socketpair()
    readable: dict[int, MappedRegion] = {}
    if mailbox:
        box = Mailbox(len(mailbox))
        MappedRegion(box.fd, len(mailbox), writable=True).part(0, len(mailbox))[:] = mailbox
        readable[1] = box.region
        box.close()
    sock = FramedSocket(near)
    connection = BlockingConnection(
        ConnectionEnd(TcpTransport(), sock, ExportedRegions(()), readable, next(iter(readable), None)), spin_s=spin_s
    )
    try:
        yield connection, far
    finally:
        far.close()
        connection.close(StreamBroken("the test is over"))


def read(connection: BlockingConnection, timeout_s: float = 10.0) -> list[bytes] | None:
    memory = [bytearray(BLOCK) for _ in KEYS]
    handed: list[tuple[int, int]] = []

    def into(layer: int, index: int) -> memoryview:
        return memoryview(memory[index])[layer * LAYOUT.slice_bytes(0) :][: LAYOUT.slice_bytes(0)]

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        handed.append((layer, index))

    count = BlockingReader(connection, LAYOUT).read(KEYS, into=into, on_slice=take, timeout_s=timeout_s)
    assert len(handed) == LAYOUT.layers * (count or 0), "slices are handed out when all have come"
    return None if count is None else [bytes(each) for each in memory[:count]]


def put(
    connection: BlockingConnection, keys: list[BlockKey] = KEYS, timeout_s: float = 10.0, forgotten: Sequence[str] = ()
) -> int | None:
    def slice_at(layer: int, index: int) -> tuple[memoryview, int]:
        data = memoryview(slice_of(keys[index], layer))
        return data, slice_hash(data)

    blocks = BlocksToPut(keys, [NO_PARENT] * len(keys), "", slice_at, forgotten)
    outcome = BlockingWriter(connection, LAYOUT, None).put(blocks, timeout_s)
    return None if outcome is None else outcome.present


SAID: dict[str, bytes] = {
    "an ordinary message": LENGTH_PREFIX.pack(5, 0) + b"hello",
    "a message that is too long": LENGTH_PREFIX.pack(ONE_SHOT_FLAG | 1 << 20, 0),
    "a payload that is too long": LENGTH_PREFIX.pack(ONE_SHOT_FLAG | 40, 1 << 30),
    "nonsense": LENGTH_PREFIX.pack(ONE_SHOT_FLAG | 40, 0) + bytes(40),
    "another number": good(number=2).encoded(len(WHOLE)) + WHOLE,
    "another kind": OneShotMessage(STORED, 1).encoded(),
    "a question": OneShotMessage(GET, 1, keys=KEYS[0]).encoded(),
    "more blocks than were asked for": OneShotMessage(FOUND, 1, 3, numbers=HASHES).encoded(len(WHOLE)) + WHOLE,
    "fewer blocks than it brings": good(blocks=1).encoded(len(WHOLE)) + WHOLE,
    "a later part first": good(first=1, numbers=HASHES[1:]).encoded(len(WHOLE)) + WHOLE,
    "the same part twice": 2 * PART,
    "an empty part": PART + good(numbers=(), first=1).encoded(),
    "nothing of what it has": good(numbers=()).encoded(),
    "too little": good().encoded(len(WHOLE) - 1) + WHOLE[:-1],
    "another hash": good(numbers=[HASHES[0] ^ 1, *HASHES[1:]]).encoded(len(WHOLE)) + WHOLE,
    "other bytes": good().encoded(len(WHOLE)) + WHOLE[:-1] + b"?",
    "a region that is not there": good(extents=(PayloadExtent(3, len(WHOLE), 0),)).encoded(),
    "the end of a region": good(extents=(PayloadExtent(1, len(WHOLE), 1),)).encoded(),
    "a place far away": good(extents=(PayloadExtent(1, len(WHOLE), 1 << 63),)).encoded(),
    "too little of a region": good(extents=(PayloadExtent(1, len(WHOLE) - 1, 0),)).encoded(),
    "both ways at once": good(extents=(PayloadExtent(1, len(WHOLE), 0),)).encoded(1) + b"?",
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
async def test_what_is_not_an_answer_is_not_taken(what: str) -> None:
    with joined(WHOLE) as (connection, store):
        store.sendall(SAID[what])
        store.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(read, connection) is None
        assert connection.error is not None, "nobody knows what comes next on this connection"
        assert await asyncio.to_thread(read, connection) is None
    with joined() as (connection, store):
        store.sendall(SAID[what])
        store.shutdown(socket.SHUT_WR)
        if what == "another kind":
            assert await asyncio.to_thread(put, connection) == 0
        else:
            with pytest.raises(StreamBroken):
                await asyncio.to_thread(put, connection)
            assert connection.error is not None


@pytest.mark.parametrize("spin_s", [0.0, 10.0])
@pytest.mark.parametrize("shown", [True, False])
async def test_a_proper_answer_is_taken_however_it_comes(shown: bool, spin_s: float) -> None:
    """In many pieces, in two parts, with what the store does not bring at its end."""
    first, size = 4, 4 * LAYOUT.slice_bytes(0)
    places = ((PayloadExtent(1, size, 0),), (PayloadExtent(1, len(WHOLE) - size, size),)) if shown else ((), ())
    parts = [
        good(numbers=HASHES[:first], extents=places[0]),
        good(numbers=HASHES[first:], extents=places[1], first=first),
    ]
    data = [WHOLE[:size], WHOLE[size:]]
    if shown:
        said = parts[0].encoded() + parts[1].encoded()
    else:
        said = b"".join(part.encoded(len(each)) + each for part, each in zip(parts, data, strict=True))

    def play(store: socket.socket) -> None:
        for at in range(0, len(said), 100):
            store.sendall(said[at : at + 100])
        store.sendall(OneShotMessage(FOUND, 2).encoded() + OneShotMessage(OTHERWISE, 3).encoded())

    with joined(WHOLE if shown else b"", spin_s=spin_s) as (connection, store):
        playing = asyncio.create_task(asyncio.to_thread(play, store))
        assert await asyncio.to_thread(read, connection) == [data_of(key) for key in KEYS]
        await playing
        assert await asyncio.to_thread(read, connection) == []
        assert await asyncio.to_thread(read, connection) is None
        assert connection.error is None


async def test_a_store_that_does_not_answer_is_not_waited_for_longer_than_was_said() -> None:
    with joined() as (connection, _):
        with pytest.raises(TransferFailed, match="in time"):
            await asyncio.to_thread(read, connection, 0.0)
        assert connection.error is not None, "an answer may come still"
        assert await asyncio.to_thread(put, connection) is None


async def test_a_store_that_always_says_something_is_not_heard_for_longer_than_was_said() -> None:
    with joined() as (connection, store):
        store.sendall(good().encoded(len(WHOLE)) + WHOLE)
        with pytest.raises(TransferFailed, match="in time"):
            await asyncio.to_thread(read, connection, -1.0)
    with joined() as (connection, store):
        store.sendall(good(numbers=()).encoded())  # and the same again, for ever
        assert await asyncio.to_thread(read, connection) is None
        assert "not the next one" in str(connection.error)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10])
async def test_a_deadline_may_be_far_away(timeout_s: float) -> None:
    with joined() as (connection, store):
        putting = asyncio.create_task(asyncio.to_thread(put, connection, timeout_s=timeout_s))
        await asyncio.to_thread(store.recv, 1)
        store.sendall(OneShotMessage(STORED, 1).encoded())
        assert (await putting, connection.error) == (0, None)


async def test_a_put_that_names_more_deletions_than_fit_takes_a_transfer() -> None:
    with joined() as (connection, store):
        assert (
            await asyncio.to_thread(put, connection, forgotten=[f"deletion-{number}" for number in range(5000)]) is None
        )
        assert connection.error is None
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.recv(1)


async def test_a_connection_that_has_ended_keeps_nothing_of_the_caller() -> None:
    with joined() as (connection, store):
        store.sendall(good().encoded(len(WHOLE)) + WHOLE[:9])
        store.shutdown(socket.SHUT_WR)
        memory = bytearray(BLOCK * len(KEYS))

        def into(layer: int, index: int) -> memoryview:
            return memoryview(memory)[index * BLOCK + layer * LAYOUT.slice_bytes(0) :][: LAYOUT.slice_bytes(0)]

        arguments: dict[str, Any] = {"into": into, "on_slice": lambda *_: None, "timeout_s": 10.0}
        assert await asyncio.to_thread(BlockingReader(connection, LAYOUT).read, KEYS, **arguments) is None
        assert isinstance(connection.error, StreamBroken)
        memory.clear()  # raises as long as somebody refers to a part of it


async def ended(connection: BlockingConnection, store: socket.socket, end: Callable[[], None]) -> None:
    """A put under way fails when `end` is called."""
    putting = asyncio.create_task(asyncio.to_thread(put, connection))
    await asyncio.to_thread(store.recv, 1)
    end()
    with pytest.raises(StreamBroken):
        await putting


async def test_whatever_ends_a_connection_ends_the_exchange_on_it() -> None:
    with joined() as (connection, store):
        await ended(connection, store, store.close)
        assert await asyncio.to_thread(put, connection) is None
    with joined() as (connection, store):
        await ended(connection, store, lambda: connection.close(StreamBroken("the call has ended")))
        assert str(connection.error) == "the call has ended"


async def test_another_thread_does_not_wait_for_an_exchange() -> None:
    with joined() as (connection, store):
        putting = asyncio.create_task(asyncio.to_thread(put, connection))
        await asyncio.to_thread(store.recv, 1)
        assert await asyncio.to_thread(read, connection) is None
        assert await asyncio.to_thread(put, connection) is None
        store.sendall(OneShotMessage(STORED, 1, numbers=[0]).encoded())
        assert (await putting, connection.error) == (1, None)


async def test_a_store_that_reads_nothing_is_given_up() -> None:
    with joined() as (connection, store):
        store.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def flood() -> None:
            assert connection.begin(0.0)
            with connection:
                while True:
                    connection.ask(GET, 0, b"", payload=[[memoryview(bytes(1 << 20))]], follow=1 << 20)

        with pytest.raises(TransferFailed, match="in time"):
            await asyncio.to_thread(flood)
        assert connection.error is not None


def test_what_somebody_raises_within_an_exchange_ends_the_connection() -> None:
    def interrupted(layer: int, index: int) -> memoryview | None:
        raise KeyboardInterrupt

    async def run() -> None:
        with joined() as (connection, _):
            with pytest.raises(KeyboardInterrupt):
                BlockingReader(connection, LAYOUT).read(KEYS, into=interrupted, on_slice=lambda *_: None, timeout_s=1.0)
            assert str(connection.error) == "a call was given up"

    asyncio.run(run())


async def test_one_who_speaks_first_gets_no_direct_connection() -> None:
    near, far = socket.socketpair()
    sock = FramedSocket(near)
    far.sendall(b"hello")
    assert sock.peek(1) is not None
    with pytest.raises(FrameError, match="without being asked"):
        BlockingConnection(ConnectionEnd(TcpTransport(), sock, ExportedRegions(()), {}, None))
    assert far.recv(1) == b"", "it is closed"
    far.close()


@pytest.mark.parametrize(("layers", "most"), [(4, 4), (16, 1), (17, 0)])
async def test_a_read_takes_as_many_blocks_as_one_answer_may_have(layers: int, most: int) -> None:
    """4 MiB, in as many slices as a frame has."""
    layout = KVLayout.uniform(layers=layers, kv_heads=2, head_dim=64, block_size=256, dtype="float32")
    with joined() as (connection, _):
        assert BlockingReader(connection, layout).most == most
        thin = KVLayout.uniform(layers=512, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
        assert BlockingReader(connection, thin).most == 2
