"""Reads a lease layer by layer, ahead of the sending stream.

A lease's slices are handed out layer-major in groups near a frame's size. Several threads read a *band*, consecutive
layers in each block, while the band before is being sent. The first band is one layer, so that the band comes soon;
each further one may be twice as large.
"""

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

from moonpool.base.errors import Overloaded
from moonpool.base.kv.frames import FRAME_BYTES, Slice
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.core.read_leases import ReadLease, ReadLeases
from moonpool.kvstore.ssd.reader import Band, read_bands
from moonpool.kvstore.ssd.records import BadRecordError

log = get_logger(__name__)
MAX_FETCHES = 8  # per reader, in the thread pool
MAX_BANDS = 4  # per reader, being read or sent
PIECE_BYTES = 256 << 10  # per block, read at once; larger ones are hardly faster (docs/adr/0004-ssd-tier.md)
READER_SHARE = 2  # one band may take the read-ahead's budget divided by this
LAYER_BREAK_BYTES = 512 << 10  # a group this large ends with the layer, without waiting for the next


class LostBlock(NamedTuple):
    """A block cannot be read: neither this block nor the blocks after it will come."""

    block: int


_Fetch = Future[tuple[int, Exception] | None]


@dataclasses.dataclass(slots=True, eq=False)
class _Band:
    """Consecutive layers of all blocks."""

    layers: range
    ahead: int  # bytes taken from the read-ahead's budget and not handed out yet
    started: int = 0  # blocks before this one are in DRAM, being read, or read
    read: dict[int, memoryview] = dataclasses.field(default_factory=dict)  # what has been, by block


@dataclasses.dataclass(eq=False)
class LayerReader:
    """Reads one lease, and closes the lease after the last read has ended.

    `ahead` are the bytes that all readers together may have read and not sent; each may always have one fetch. Bytes
    read into reserved DRAM do not count.
    """

    reads: ReadLeases
    lease: ReadLease
    layers: range  # wanted, less those that have their band
    pool: Executor
    ahead: ByteCredits
    _: dataclasses.KW_ONLY
    group_bytes: int = FRAME_BYTES  # aimed at
    sent_bytes: int = 0  # a slice's bytes that count for the group's size; 0 for all
    piece_bytes: int = PIECE_BYTES
    layer_break_bytes: int = LAYER_BREAK_BYTES

    def __post_init__(self) -> None:
        self._layout = self.lease.format.layout
        sent_bytes = self.sent_bytes or self._layout.largest_slice_bytes
        self._group_cells = max(1, self.group_bytes // sent_bytes)  # in a full group
        self._break_cells = min(self._group_cells, -(-self.layer_break_bytes // sent_bytes))  # at the end of a layer
        self._limit = self._told = 0  # blocks that can be read, and what the walker knows of them
        self._thickness = 1
        self._bands: collections.deque[_Band] = collections.deque()
        self._walked = 0  # bytes taken from `ahead` that go back with the next group
        self._fetches: dict[_Fetch, None] = {}
        self._progress = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def groups(self) -> AsyncIterator[list[Slice] | LostBlock]:
        """Slices in order, in groups; after a `LostBlock` only of earlier blocks. Walk once the lease is complete.

        The bytes of a group stay as they are until `close`.
        """
        group: list[Slice] = []
        self._limit = self._told = self.lease.blocks
        self._start_more()
        while self._bands:
            band = self._bands[0]
            for layer in band.layers:
                block = 0
                while block < self._limit:
                    block = self._gather(group, band, layer, block)
                    unread = block < self._limit and len(group) < self._group_cells
                    if unread and block < band.started:
                        await self._fetch_ended()
                    elif unread or len(group) >= (self._group_cells if block < self._limit else self._break_cells):
                        for part in self._parts(group):
                            yield part
                        group = []
                        self._sent()  # an unread block holds no memory now, so that the block's fetch begins
            self._bands.popleft()
            self._walked += band.ahead  # of lost blocks
            self._start_more()
        for part in self._parts(group):
            yield part
        self._sent()
        while self._fetches:  # fetches behind a lost block: the lease ends with them
            await self._fetch_ended()

    def _gather(self, group: list[Slice], band: _Band, layer: int, block: int) -> int:
        """Add a layer's slices from `block` on to a group until full or a slice is unread; return which."""
        sources, layout = self.lease.sources, self._layout
        size, tokens, place = layout.slice_bytes(layer), layout.block_size, layout.place(layer, band.layers.start)
        end = min(self._limit, block + self._group_cells - len(group))
        while block < end:
            source = sources[block]
            if source.block is not None:
                data, value = source.block.slice(layer), source.block.hashes[layer]
            elif source.reader is not None and block in band.read:
                data, value = band.read[block][place], source.reader.hashes[layer]
                if source.allocate is None:
                    self._walked += size
                    band.ahead -= size
            else:
                break
            group.append(Slice(layer, block, data, tokens, value))
            block += 1
        return block

    def _parts(self, group: list[Slice]) -> Iterator[list[Slice] | LostBlock]:
        good = group if self._limit == self.lease.blocks else [cell for cell in group if cell.block < self._limit]
        if good:
            yield good
        if self._limit < self._told:
            self._told = self._limit
            yield LostBlock(self._limit)

    def _sent(self) -> None:
        walked, self._walked = self._walked, 0
        self.ahead.grant(walked)
        self._start_more()

    def _start_more(self) -> None:
        """Begin reading as far ahead as fetches and memory allow; at least one fetch while no memory is held."""
        while not self._closed and len(self._fetches) < MAX_FETCHES and self._start_one():
            pass

    def _start_one(self) -> bool:
        if not self._bands or self._bands[-1].started >= self._limit:
            if not self.layers or not self._limit or len(self._bands) >= MAX_BANDS:
                return False
            self._bands.append(self._next_band())
        band = self._bands[-1]
        blocks, end = self._next_blocks(band)
        # A thicker band's memory was taken at the opening.
        cost = self._unread(blocks) * self._layout.layers_bytes(band.layers) if len(band.layers) == 1 else 0
        if cost and not self.ahead.take(cost):
            if self._held:
                return False
            self.ahead.overdraw(cost)
        band.ahead += cost
        band.started = end
        if blocks:
            self._submit(band, blocks)
        return True

    @property
    def _held(self) -> int:
        return self._walked + sum(band.ahead for band in self._bands)

    def _next_band(self) -> _Band:
        """The next layers: as many as a piece wants, if the read-ahead can take all, else one."""
        unread = self._unread(range(self._limit))
        most = self.ahead.window // READER_SHARE
        count = min(self._thickness, len(self.layers))
        while count > 1 and (cost := unread * self._layout.layers_bytes(self.layers[:count])):
            if cost <= most and self.ahead.take(cost):
                break
            count //= 2
        band = _Band(self.layers[:count], cost if count > 1 else 0)
        self.layers = self.layers[count:]
        self._thickness = min(2 * self._thickness, max(1, self.piece_bytes // self._layout.largest_slice_bytes))
        return band

    def _unread(self, blocks: range | list[int]) -> int:
        """Number of blocks among `blocks` that come from the SSD tier to read-ahead memory."""
        sources = (self.lease.sources[block] for block in blocks)
        return sum(source.block is None and source.allocate is None for source in sources)

    def _next_blocks(self, band: _Band) -> tuple[list[int], int]:
        """A band's blocks that one fetch should read, and the block before which the fetch ends."""
        piece = self._layout.layers_bytes(band.layers)
        size = min(self.group_bytes, max(self.piece_bytes, self._limit * piece // MAX_FETCHES))
        blocks: list[int] = []
        for block in range(band.started, self._limit):
            if self.lease.sources[block].block is None:
                if blocks and (len(blocks) + 1) * piece > size:
                    return blocks, block
                blocks.append(block)
        return blocks, self._limit

    def _submit(self, band: _Band, blocks: list[int]) -> None:
        layout, bands = self.lease.format.layout, list[Band]()
        try:
            for block in blocks:
                source = self.lease.sources[block]
                assert source.reader is not None
                bands.append((source.reader, source.memory(band.layers, layout)))
        except Overloaded as error:
            log.warning("no memory to read into", error=str(error))
            self._limit = blocks[0]
            return
        fetch = self.pool.submit(read_bands, band.layers.start, bands)
        self._fetches[fetch] = None
        came = dict(zip(blocks, [out for _, out in bands], strict=True))
        # Not `fetch` itself: `fetch` would keep itself, and the bands' memory, until the next garbage collection.
        fetch.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._ended, done, band, came))

    async def _fetch_ended(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _ended(self, fetch: _Fetch, band: _Band, came: dict[int, memoryview]) -> None:
        self._fetches.pop(fetch, None)
        if fetch.cancelled():
            self._limit = min(self._limit, *came)
        elif (failure := fetch.result()) is not None:
            self._fail([*came][failure[0]], failure[1])
        bits = sum(1 << layer for layer in band.layers)
        for block, out in came.items():
            if block < self._limit:
                self.lease.sources[block].filled |= bits
                band.read[block] = out
        self._start_more()
        self._progress.set()
        if self._closed and not self._fetches:
            self.reads.close(self.lease)

    def _fail(self, block: int, error: Exception) -> None:
        source = self.lease.sources[block]
        assert source.reader is not None
        key = source.reader.key.hex()[:16]
        self._limit = min(self._limit, block)
        if isinstance(error, BadRecordError):
            log.warning("a stored block is bad", key=key, error=str(error))
            self.reads.lost(source)
        else:
            log.warning("a stored block cannot be read now", key=key, error=str(error))

    def close(self) -> None:
        """End the reading. The lease ends as soon as no thread reads any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.ahead.grant(self._held)
        self._bands.clear()
        for fetch in list(self._fetches):
            fetch.cancel()
        if not self._fetches:
            self.reads.close(self.lease)
