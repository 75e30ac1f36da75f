"""Layer-major reading: order, pieces, memory, and what is lost on the way."""

import asyncio
import errno
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import Overloaded
from moonpool.base.kv.blocks import BlockFormat, BlockInfo, DramBlock
from moonpool.base.kv.file_io import FileSpan, ReadOutcome
from moonpool.base.kv.layout import KVLayout
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.core.read_leases import LeasedBlock, ReadLease
from moonpool.kvstore.dram.arena import Arena
from moonpool.kvstore.layer_reader import LayerReader, LostBlock
from moonpool.kvstore.ssd.reader import SsdReader
from moonpool.kvstore.ssd.records import BadRecordError
from tests.examples import examples
from tests.unit.kvstore.helpers import data_of, keys_of, slice_of

SHAPE = KVLayout.uniform(layers=9, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
SLICE = SHAPE.slice_bytes(0)
FORMAT = BlockFormat(b"n" * 32, SHAPE)
KEYS = keys_of(9)


class FakeReader:
    """A block on a device, some layer of which may be bad; notes what it is asked for.

    It is a segment, and the files, of its own; offsets are layers.
    """

    format = FORMAT
    info: BlockInfo | None = None
    hashes = range(SHAPE.layers)
    unread_bytes = 0
    path = Path()

    def __init__(
        self, index: int, bad: int | None, asked: list[tuple[int, int, int]], error: OSError | None = None
    ) -> None:
        self.key = KEYS[index]
        self.files = self.segment = self
        self._index, self._bad, self._asked = index, bad, asked
        self._error = error

    def spans(self, first: int, out: memoryview, start: memoryview) -> list[FileSpan]:
        self._asked.append((self._index, first, len(out) // SLICE))
        return [FileSpan(first, out)]

    def read(self, path: Path, spans: Sequence[FileSpan]) -> ReadOutcome:
        (first, out, _), *others = spans
        assert not others
        count = len(out) // SLICE
        if self._error is not None and self._bad in range(first, first + count):
            return ReadOutcome(0, [], self._error)
        out[:] = b"".join(slice_of(self.key, layer, SHAPE) for layer in range(first, first + count))
        return ReadOutcome(1, [0] * count)

    def check(self, first: int, out: memoryview, hashes: Sequence[int], start: memoryview) -> None:
        if self._bad in range(first, first + len(out) // SLICE):
            raise BadRecordError("bad")

    def release(self) -> None:
        pass


class FakeReads:
    """Notes what was lost and which leases ended."""

    def __init__(self) -> None:
        self.lost_keys: list[bytes] = []
        self.closed = 0
        self.ended = asyncio.Event()

    def lost(self, source: LeasedBlock) -> None:
        assert source.reader is not None
        self.lost_keys.append(source.reader.key)

    def close(self, lease: ReadLease) -> None:
        self.closed += 1
        self.ended.set()


def source_of(index: int, kind: str, bad: int | None, asked: list[tuple[int, int, int]]) -> LeasedBlock:
    key = KEYS[index]
    if kind == "dram":
        info = BlockInfo(key, KEYS[0], "", FORMAT)
        return LeasedBlock(block=DramBlock(info, bytearray(data_of(key, SHAPE)), range(SHAPE.layers)))
    source = LeasedBlock(reader=cast("SsdReader", FakeReader(index, bad, asked)))
    if kind == "reserved":
        source.allocate = lambda nbytes: memoryview(bytearray(nbytes))
    return source


async def read(
    sources: list[LeasedBlock],
    wanted: range,
    *,
    ahead: ByteCredits,
    group_bytes: int,
    stop_after: int = -1,
    sent_bytes: int = SLICE,
    piece_bytes: int = 256 << 10,
) -> tuple[list[tuple[int, int]], int, FakeReads, int]:
    """Reads all, checks every byte; returns the cells in order, how many blocks came whole, and the most read ahead."""
    reads: Any = FakeReads()
    cells: list[tuple[int, int]] = []
    limit, most = len(sources), 0
    with ThreadPoolExecutor(3) as pool:
        lease = ReadLease(FORMAT, KEYS[: len(sources)], sources)
        reader = LayerReader(
            reads,
            lease,
            wanted,
            pool,
            ahead,
            group_bytes=group_bytes,
            sent_bytes=sent_bytes,
            piece_bytes=piece_bytes,
        )
        groups = 0
        async for group in reader.groups():
            most = max(most, ahead.out)
            if isinstance(group, LostBlock):
                assert group.block < limit
                limit = group.block
                continue
            assert len(group) * sent_bytes <= max(group_bytes, sent_bytes)
            for cell in group:
                assert cell.block < limit
                assert cell.data == slice_of(KEYS[cell.block], cell.layer, SHAPE)
                cells.append((cell.layer, cell.block))
            groups += 1
            if groups == stop_after:
                break
        reader.close()
        async with asyncio.timeout(10):
            await reads.ended.wait()
    assert reads.closed == 1
    assert ahead.out == 0
    return cells, limit, reads, most


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
async def test_a_passing_error_ends_the_reading_there_and_forgets_no_block(number: int) -> None:
    asked: list[tuple[int, int, int]] = []
    sources = [source_of(index, "cold", None, asked) for index in range(4)]
    sources[2].reader = cast("SsdReader", FakeReader(2, 5, asked, OSError(number, "passing")))
    _, limit, reads, _ = await read(sources, range(9), ahead=ByteCredits(1000 * SLICE), group_bytes=100 * SLICE)
    assert (limit, reads.lost_keys) == (2, [])


BLOCK = st.tuples(st.sampled_from(["dram", "cold", "reserved"]), st.none() | st.none() | st.integers(0, 8))


@settings(max_examples=examples(60))
@given(
    blocks=st.lists(BLOCK, min_size=1, max_size=9),
    wanted=st.tuples(st.integers(0, 8), st.integers(1, 9)).filter(lambda pair: pair[0] < pair[1]),
    ahead=st.sampled_from([1, 3, 10, 1000]),
    group=st.sampled_from([1, 2, 5, 100]),
    piece=st.sampled_from([1, 3, 8]),
    stop_after=st.sampled_from([-1, -1, -1, 1, 3]),
    share=st.sampled_from([1, 1, 4]),
)
def test_whatever_comes_is_in_order_and_whole(
    blocks: list[tuple[str, int | None]],
    wanted: tuple[int, int],
    ahead: int,
    group: int,
    piece: int,
    stop_after: int,
    share: int,
) -> None:
    begin, end = wanted
    asked: list[tuple[int, int, int]] = []
    sources = [source_of(index, kind, bad, asked) for index, (kind, bad) in enumerate(blocks)]
    cells, limit, reads, most = asyncio.run(
        read(
            sources,
            range(begin, end),
            ahead=ByteCredits(ahead * SLICE),
            group_bytes=group * SLICE,
            stop_after=stop_after,
            sent_bytes=SLICE // share,
            piece_bytes=piece * SLICE,
        )
    )
    assert cells == sorted(cells)
    assert most <= (max(ahead, group, piece) + ahead // 4) * SLICE  # a fetch larger than the budget may overdraw it
    assert all(count <= piece for _, _, count in asked)
    if stop_after < 0:
        bad = [n for n, (kind, at) in enumerate(blocks) if kind != "dram" and at is not None and begin <= at < end]
        assert limit == min(bad, default=len(blocks))
        assert {(layer, block) for layer, block in cells if block < limit} == {
            (layer, block) for layer in range(begin, end) for block in range(limit)
        }
        assert limit == len(blocks) or KEYS[limit] in reads.lost_keys
        for index, source in enumerate(sources[:limit]):
            assert source.block is not None or source.filled == sum(1 << layer for layer in range(begin, end)), index


async def test_bands_grow_and_are_read_in_one_piece_per_block() -> None:
    asked: list[tuple[int, int, int]] = []
    sources = [source_of(index, "reserved", None, asked) for index in range(3)]
    _, _, _, most = await read(sources, range(9), ahead=ByteCredits(1), group_bytes=3 * SLICE, piece_bytes=4 * SLICE)
    assert sorted(asked) == sorted((block, *band) for block in range(3) for band in ((0, 1), (1, 2), (3, 4), (7, 2)))
    assert most == 0


async def test_no_memory_to_read_into_ends_the_reading() -> None:
    def none_left(nbytes: int) -> memoryview:
        raise Overloaded("no memory", reason="memory", retry_after_s=1)

    source = source_of(0, "reserved", None, [])
    source.allocate = none_left
    with ThreadPoolExecutor(1) as pool:
        reads: Any = FakeReads()
        reader = LayerReader(reads, ReadLease(FORMAT, KEYS[:1], [source]), range(9), pool, ByteCredits(1 << 20))
        assert [group async for group in reader.groups()] == [LostBlock(0)]
        reader.close()
        assert (reads.closed, reads.lost_keys) == (1, [])


async def test_a_read_that_is_cancelled_in_the_pool_ends_the_reading_there() -> None:
    hold = threading.Event()
    reads: Any = FakeReads()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold.wait)
        lease = ReadLease(FORMAT, KEYS[:1], [source_of(0, "cold", None, [])])
        reader = LayerReader(reads, lease, range(9), pool, ByteCredits(1000 * SLICE))
        first = asyncio.ensure_future(anext(reader.groups()))
        await asyncio.sleep(0)
        pool.shutdown(wait=False, cancel_futures=True)
        hold.set()
        async with asyncio.timeout(10):
            assert await first == LostBlock(0)
    reader.close()
    assert (reads.closed, reads.lost_keys) == (1, [])


async def test_a_reading_leaves_no_memory_to_the_garbage_collector() -> None:
    arena = Arena(1 << 20)
    gc.disable()
    try:
        sources = [source_of(index, "reserved", None, []) for index in range(4)]
        for source in sources:
            source.allocate = arena.allocate
        await read(sources, range(SHAPE.layers), ahead=ByteCredits(1 << 20), group_bytes=4 * SLICE)
        assert len(arena.live) == 4
        del source, sources
        assert not arena.live
    finally:
        gc.enable()
