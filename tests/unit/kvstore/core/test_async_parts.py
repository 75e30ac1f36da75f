"""The parts that need an event loop: the writer, layer-major reading, waiting for room, watching."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.cluster import HeldKeys
from moonpool.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.kv.parts import PARTS
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.streams.layers import LayerReader, Lost, ReadAhead
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.streams.watch import Journal, Unreported
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import FORMAT, LAYOUT, RECORD, Driven, data_of, in_part, keys_of, open_ssd

KEYS = keys_of(6)
A, B, C = KEYS[:3]


@asynccontextmanager
async def writing(driven: Driven) -> AsyncIterator[WriteBehind]:
    backend = driven.store.holdings.backend
    assert backend is not None
    writer = WriteBehind(driven.store.writes, backend)
    driven.store.writes.on_work = writer.wake
    task = asyncio.ensure_future(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.wait({task})
        await writer.aclose()
        backend.close()


async def test_the_writer_makes_durable_what_is_visible(tmp_path: Path) -> None:
    driven = Driven(open_ssd(tmp_path))
    async with writing(driven) as writer:
        driven.put(KEYS[:4])
        assert await writer.drain(10)
        driven.put(KEYS[4:])
        assert await writer.drain(10)
        assert {key for keys in driven.durable for key in keys} == set(KEYS)
        assert driven.store.writes.pending == 0
    ssd = open_ssd(tmp_path)
    assert set(ssd) == set(KEYS)
    ssd.close()


async def test_a_failing_device_stops_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    driven = Driven(open_ssd(tmp_path, files=files))
    async with writing(driven) as writer:
        files.fail("sync", OSError(5, "Input/output error"))
        driven.put([A])
        assert await writer.drain(10)
        files.mend()
        assert driven.durable == []
        driven.put([B])
        assert await writer.drain(10)
        assert driven.durable == [(B,)]
        assert driven.read([A, B]) == [data_of(A), data_of(B)]


class Reading:
    """Walks a lease and keeps what came."""

    def __init__(self, driven: Driven, *, group_bytes: int, ahead: int = 1 << 20) -> None:
        self.driven = driven
        self.pool = ThreadPoolExecutor(2)
        self.ahead = ReadAhead(ahead)
        self.group_bytes = group_bytes
        self.order: list[list[tuple[int, int]]] = []
        self.lost: list[int] = []

    async def all(self, keys: list[BlockKey], layers: range = range(3), *, promote: bool = False) -> list[bytes]:
        lease = self.driven.store.reads.open(keys, FORMAT, promote=promote)
        reader = LayerReader(
            self.driven.store.reads, lease, layers, self.pool, self.ahead, group_bytes=self.group_bytes
        )
        out: dict[int, bytes] = {}
        blocks = lease.blocks
        async for group in reader.groups():
            if isinstance(group, Lost):
                self.lost.append(group.block)
                blocks = group.block
                continue
            self.order.append([(cell.layer, cell.block) for cell in group])
            for cell in group:
                out[cell.block] = out.get(cell.block, b"") + cell.data
        reader.close()
        reader.close()
        self.pool.shutdown()
        assert self.ahead._free == 1 << 20
        return [out[index] for index in range(blocks)]


async def test_reading_is_layer_major_in_groups() -> None:
    driven = Driven()
    driven.store.writes.close(driven.put(KEYS[:3]))
    reading = Reading(driven, group_bytes=2 * LAYOUT.slice_bytes)
    assert await reading.all(KEYS, range(1, 3)) == [data_of(key)[LAYOUT.slice_bytes :] for key in KEYS[:3]]
    assert reading.order == [[(1, 0), (1, 1)], [(1, 2), (2, 0)], [(2, 1), (2, 2)]]
    driven.store.check_invariants()


async def test_a_large_layer_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.streams.layers.LAYER_BREAK_BYTES", LAYOUT.slice_bytes)
    driven = Driven()
    driven.store.writes.close(driven.put(KEYS[:2]))
    reading = Reading(driven, group_bytes=1 << 20)
    await reading.all(KEYS[:2])
    assert reading.order == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], [(2, 0), (2, 1)]]


@pytest.mark.parametrize("promote", [False, True])
async def test_cold_blocks_are_read_in_threads(tmp_path: Path, promote: bool) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.holdings.backend is not None
    first.store.holdings.backend.close()
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    driven.store.writes.close(driven.put([KEYS[4]]))
    driven.flush()
    reading = Reading(driven, group_bytes=2 * LAYOUT.slice_bytes)
    assert await reading.all(KEYS[:5], promote=promote) == [data_of(key) for key in KEYS[:5]]
    assert [cell for group in reading.order for cell in group] == [
        (layer, block) for layer in range(3) for block in range(5)
    ]
    assert set(driven.store.holdings.dram) == (set(KEYS[:5]) if promote else {KEYS[4]})
    driven.store.check_invariants()
    ssd.close()


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_bad_slice_ends_the_prefix_before_its_block(tmp_path: Path, layer: int) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.holdings.backend is not None
    first.store.holdings.backend.close()
    segment = next((tmp_path / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[2 * RECORD + 4096 + layer * LAYOUT.slice_bytes] ^= 1
    segment.write_bytes(data)
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    reading = Reading(driven, group_bytes=4 * LAYOUT.slice_bytes)
    assert await reading.all(KEYS[:4], promote=True) == [data_of(A), data_of(B)]
    assert reading.lost == [2]
    assert driven.removed == [C]
    assert {A, B} <= set(driven.store.holdings.dram)
    assert C not in driven.store.holdings
    driven.store.check_invariants()
    ssd.close()


async def test_a_reader_that_leaves_gives_everything_back(tmp_path: Path) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.holdings.backend is not None
    first.store.holdings.backend.close()
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    pool = ThreadPoolExecutor(1)
    ahead = ReadAhead(1 << 20)
    lease = driven.store.reads.open(KEYS[:4], FORMAT, promote=True)
    closed = asyncio.Event()
    reader = LayerReader(
        driven.store.reads, lease, range(3), pool, ahead, on_closed=closed.set, group_bytes=LAYOUT.slice_bytes
    )
    groups = reader.groups()
    await anext(groups)
    reader.close()
    async with asyncio.timeout(10):
        await closed.wait()
    assert (driven.store.reads.leases, ahead._free) == (0, 1 << 20)
    driven.store.check_invariants()
    pool.shutdown()
    ssd.close()


class Rooms:
    """Room for some things."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.undone: list[int] = []

    def attempt(self, size: int) -> int | None:
        if size > self.free:
            return None
        self.free -= size
        return size

    def undo(self, size: int) -> None:
        self.free += size
        self.undone.append(size)


async def test_room_is_given_first_come_first_served() -> None:
    rooms, queue = Rooms(1), RoomQueue(2)
    assert await queue.get(lambda: rooms.attempt(1), rooms.undo, 1) == 1
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 10))
    small = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await queue.get(lambda: rooms.attempt(1), rooms.undo, 10)
    rooms.free = 2
    queue.poke()
    await asyncio.sleep(0)
    assert not small.done()
    rooms.free = 4
    queue.poke()
    assert list(await asyncio.gather(large, small)) == [3, 1]
    assert len(queue) == 0


async def test_who_waits_in_one_lane_keeps_nobody_in_another() -> None:
    rooms, queue = Rooms(1), RoomQueue(9)
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 10, lane="t"))
    await asyncio.sleep(0)
    assert (queue.waits("t"), queue.waits()) == (True, False)
    assert await queue.get(lambda: rooms.attempt(1), rooms.undo, 10) == 1
    other = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    assert len(queue) == 2
    rooms.free = 1
    queue.poke()
    assert await other == 1
    rooms.free = 3
    queue.poke()
    assert await large == 3
    assert not queue.waits("t")


async def test_waiting_for_room_ends_and_lets_others_pass() -> None:
    rooms, queue = Rooms(1), RoomQueue(9)
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 0.01))
    small = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    with pytest.raises(DeadlineExceeded, match="no room within"):
        await large
    assert await small == 1


async def test_room_that_comes_too_late_is_given_back() -> None:
    rooms, queue = Rooms(0), RoomQueue(9)
    waiting = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    rooms.free = 1
    queue.poke()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (rooms.free, rooms.undone) == (1, [1])


async def test_an_attempt_that_fails_fails_its_owner_only() -> None:
    queue = RoomQueue(9)
    answers: list[object] = [None]

    def attempt() -> int | None:
        if not answers:
            raise InvalidRequest("keys", "no")
        return answers.pop()  # type: ignore[return-value]

    waiting = asyncio.ensure_future(queue.get(attempt, lambda _: None, 10))
    await asyncio.sleep(0)
    queue.poke()
    with pytest.raises(InvalidRequest):
        await waiting
    assert len(queue) == 0


class Watched:
    """A set of keys and its journal."""

    def __init__(self, **limits: int) -> None:
        self.keys: dict[BlockKey, None] = {}
        self.journal = Journal(HeldKeys(PARTS, lambda number: in_part(self.keys, number)), 7, **limits)

    def change(self, stored: list[BlockKey], removed: list[BlockKey]) -> None:
        for key in stored:
            self.keys[key] = None
        for key in removed:
            del self.keys[key]
        self.journal.changed(stored, removed)


async def test_a_watcher_gets_a_snapshot_and_then_changes() -> None:
    watched = Watched()
    watched.change([A, B], [])
    watched.change([C], [A])
    events = watched.journal.watch(0, 0)
    first = await anext(events)
    assert (first.snapshot_begin, first.snapshot_end, first.sequence) == (True, True, 1)
    assert set(unpack_keys(first.stored_keys)) == {B, C}
    watched.change([A], [])
    watched.change([], [A])
    watched.change([], [B])
    second = await anext(events)
    assert (second.sequence, second.snapshot_begin) == (2, False)
    assert unpack_keys(second.stored_keys) == []
    assert set(unpack_keys(second.removed_keys)) == {A, B}
    assert watched.journal.watchers == 1
    await events.aclose()
    assert watched.journal.watchers == 0


async def test_an_empty_store_has_an_empty_snapshot() -> None:
    first = await anext(Watched().journal.watch(0, 0))
    assert (first.snapshot_begin, first.snapshot_end, first.sequence, first.stored_keys) == (True, True, 0, b"")


async def test_a_large_snapshot_comes_in_pages() -> None:
    watched = Watched(keys_per_page=4)
    watched.change(KEYS, [])
    events = watched.journal.watch(0, 0)
    pages = [await anext(events), await anext(events)]
    assert [(p.sequence, p.snapshot_begin, p.snapshot_end) for p in pages] == [(1, True, False), (1, False, True)]
    told = [unpack_keys(page.stored_keys) for page in pages]
    assert [len(keys) for keys in told] == [4, len(KEYS) - 4]
    assert {*told[0], *told[1]} == set(KEYS)


async def test_a_watcher_that_knows_the_incarnation_gets_what_it_missed() -> None:
    watched = Watched(journal_messages=2)
    for key in KEYS[:4]:
        watched.change([key], [])
        await asyncio.sleep(0)
    for incarnation, after, replayed in ((7, 2, [3, 4]), (7, 4, []), (7, 1, None), (7, 5, None), (8, 4, None)):
        events = watched.journal.watch(incarnation, after)
        if replayed is None:
            assert (await anext(events)).snapshot_begin
        else:
            assert [(await anext(events)).sequence for _ in replayed] == replayed
        await events.aclose()


async def test_the_journal_is_bounded_in_bytes_too() -> None:
    watched = Watched(journal_bytes=100)
    for keys in (KEYS[:1], KEYS[1:2], KEYS[2:3], KEYS[3:]):
        watched.change(keys, [])
        await asyncio.sleep(0)
    assert [message.sequence for message in watched.journal._kept] == [4]
    for key in KEYS[:4]:
        watched.change([], [key])
        await asyncio.sleep(0)
    assert [message.sequence for message in watched.journal._kept] == [6, 7, 8]
    events = watched.journal.watch(7, 5)
    assert (await anext(events)).sequence == 6
    await events.aclose()


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.streams.watch.MAX_WATCHERS", 1)
    watched = Watched()
    first, second = watched.journal.watch(0, 0), watched.journal.watch(0, 0)
    await anext(first)
    with pytest.raises(Overloaded, match="too many watchers"):
        await anext(second)
    await first.aclose()
    assert (await anext(watched.journal.watch(0, 0))).snapshot_end


async def test_a_slow_watcher_is_cut_off() -> None:
    watched = Watched(watcher_messages=2)
    events = watched.journal.watch(0, 0)
    await anext(events)
    for key in KEYS[:3]:
        watched.change([key], [])
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too slow"):
        await anext(events)
    assert watched.journal.watchers == 0


async def test_closing_ends_the_watching() -> None:
    watched = Watched()
    events = watched.journal.watch(0, 0)
    await anext(events)
    coming = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    watched.journal.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await coming


def test_unreported_changes_are_net_and_bounded_while_nobody_listens() -> None:
    joined = True
    changes = Unreported(lambda: joined, max_keys=2)
    changes.changed([A, B], [])
    changes.changed([C], [A])
    assert changes.take() == ([B, C], [A])
    assert changes.take() == ([], [])
    joined = False
    changes.changed(KEYS, [])
    assert changes.take() == ([], [])
