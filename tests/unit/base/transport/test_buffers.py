"""Payloads that land where they are to lie."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.errors import StreamBroken
from moonpool.base.kv.frames import FRAME_BYTES, SliceRun, pack_frames, whole_runs
from moonpool.base.kv.keys import slice_hash
from moonpool.base.transport.connection import ReceiveCallbacks
from moonpool.base.transport.payloads import BorrowedBuffer, FilledBuffer, ReceiveBuffer, ReceivedPayload
from moonpool.v1 import kvstore_pb2
from tests.slices import slice_to_send
from tests.unit.base.transport.pairs import LAYOUT, REQUEST, RESPONSE, pair, pool_of, read

SIZE = LAYOUT.slice_bytes(0)


def nothing(intact: int, error: Exception | None) -> None:
    """Nobody waits for it."""


def targets(*sizes: int) -> tuple[bytearray, list[memoryview]]:
    """Memory, and parts of it so long, one behind the other."""
    memory = bytearray(sum(sizes))
    view, parts, at = memoryview(memory), [], 0
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return memory, parts


@pytest.mark.parametrize("mapped", [True, False])
async def test_a_payload_lands_in_its_targets(mapped: bool) -> None:
    pool = pool_of()
    memory, parts = targets(SIZE // 2, 2 * SIZE, SIZE // 2)
    data = b"\x01" * SIZE + b"\x14" * SIZE + b"\x12" * SIZE
    hashes = [slice_hash(data[: SIZE // 2]), slice_hash(data[SIZE // 2 : -SIZE // 2]), slice_hash(data[-SIZE // 2 :])]
    asked: list[int] = []

    def place(message: kvstore_pb2.PutRequest, nbytes: int) -> ReceiveBuffer | None:
        asked.append(nbytes)
        return ReceiveBuffer(parts, hashes, lambda: True, nothing) if nbytes == 3 * SIZE else None

    async with pair(pool if mapped else None) as connection:
        for intact in (3, 1):
            hashes[1] ^= intact == 1  # the second is not what was sent
            connection.held([pool.slice(0, 0), pool.slice(1, 3), pool.slice(1, 1)])
            message, payload = await read(connection.server, place)
            assert isinstance(payload, FilledBuffer)
            assert (message, payload.intact) == (REQUEST, intact)
            assert memory[: len(data) if intact == 3 else SIZE // 2] == data[: len(data) if intact == 3 else SIZE // 2]
        connection.held([pool.slice(0, 1)])
        _, payload = await read(connection.server, place)
        assert isinstance(payload, memoryview)
        assert bytes(payload) == b"\x02" * SIZE
        assert asked == [3 * SIZE, 3 * SIZE, SIZE]
    pool.close()


async def test_a_payload_in_a_region_is_borrowed_until_it_is_returned() -> None:
    pool = pool_of()
    seen: list[tuple[bytes, bool]] = []
    all_seen = asyncio.Event()
    async with pair(pool) as connection:

        def take(message: kvstore_pb2.PutRequest, payload: ReceivedPayload) -> None:
            if isinstance(payload, BorrowedBuffer):
                seen.append((bytes(payload.data), held.done.done()))
                payload.return_buffer()
            else:
                assert isinstance(payload, memoryview)  # it came over the socket
                seen.append((bytes(payload), False))
                if len(seen) == 2:
                    all_seen.set()

        serving = asyncio.ensure_future(connection.server.run(ReceiveCallbacks(take, borrow=True)))
        reading = asyncio.ensure_future(read(connection.client))  # takes the words that they were pulled
        for slices in ([(0, 0)], [(0, 0), (1, 3)]):
            held = connection.held([pool.slice(*place) for place in slices])
            await held.done
            assert seen.pop() == (b"".join(bytes(pool.slice(*place)) for place in slices), False)
        held = connection.held([memoryview(b"x" * SIZE)])
        await held.done
        await connection.server.write(RESPONSE)
        assert (await reading)[0] == RESPONSE
        await connection.client.write(REQUEST)
        await all_seen.wait()
        assert seen == [(b"x" * SIZE, False), (b"", False)]
        connection.server.close(StreamBroken("over"))
        assert str(await serving) == "over"
    pool.close()


async def test_nothing_is_written_to_memory_that_is_another_s_by_now() -> None:
    """A lease that ends while a payload is on its way: the rest is dropped, and what follows is read."""
    half = 2 << 20
    memory, parts = targets(half, half)
    seen: list[bytes] = []

    def live() -> bool:
        seen.append(bytes(memory))
        return len(seen) < 3

    async with pair() as connection:
        connection.held([memoryview(b"x" * 2 * half)])
        _, payload = await read(
            connection.server, lambda _, nbytes: ReceiveBuffer(parts, (0, 0), live, nothing) if nbytes else None
        )
        assert isinstance(payload, FilledBuffer)
        assert payload.intact == 0
        assert (len(seen), seen[0][:1], seen[2][:1]) == (3, b"\0", b"x")
        assert memory == seen[2]
        await connection.tasks[-1]
        await connection.client.write(REQUEST)
        assert (await read(connection.server))[0] == REQUEST


def test_frames_of_whole_slices_are_told_apart_from_those_that_must_be_opened() -> None:
    slices = [
        slice_to_send(LAYOUT, layer, block, bytes([layer + block] * SIZE)) for layer in (0, 1) for block in (2, 3)
    ]
    [(header, pieces)] = pack_frames(4, 1, slices, LAYOUT, FRAME_BYTES)
    nbytes = sum(piece.nbytes for piece in pieces)
    tokens, heads = LAYOUT.block_size, LAYOUT.head_shares
    assert whole_runs(header, nbytes, LAYOUT) == [
        (SliceRun(0, 2, 2, 0, heads, tokens), [slices[0].hash, slices[1].hash]),
        (SliceRun(1, 2, 2, 0, heads, tokens), [slices[2].hash, slices[3].hash]),
    ]
    assert whole_runs(header, nbytes - 1, LAYOUT) is None
    [(part, _), *_] = pack_frames(4, 1, slices, LAYOUT, LAYOUT.share_bytes(0))
    assert whole_runs(part, LAYOUT.share_bytes(0), LAYOUT) is None
    for change in ("generation", "transfer"):
        header.ClearField(change)
        assert whole_runs(header, nbytes, LAYOUT) is None
