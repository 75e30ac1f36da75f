"""Reading a lease layer by layer, ahead of the stream that sends it.

A lease's slices are handed out layer-major in groups near a frame's size. A device wants larger pieces than a slice and
several of them at once. So several threads read a *band*, consecutive layers of each block, while the band before it is
being sent. The first band is one layer, so that it comes soon; each further one may be twice as thick, as far as a
piece's size and memory allow.
"""

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from moonpool.errors import MoonpoolError
from moonpool.kv.frames import FRAME_BYTES
from moonpool.streams.credits import ByteCredits
from moonpool.telemetry.logs import get_logger
from services.kvstore.core.reads import ReadLease, Reads
from services.kvstore.ssd.records import BadRecordError
from services.kvstore.streams.fetches import Bad, Band, Fetch, Piece, read

log = get_logger(__name__)

MAX_FETCHES = 8
"""Fetches that one reader may have in the thread pool."""

MAX_BANDS = 4
"""Bands of one reader that are being read or sent."""

PIECE_BYTES = 256 << 10
"""Largest piece of one block that is read at once; larger ones are hardly faster (docs/adr/0004-ssd-tier.md)."""

READER_SHARE = 2
"""One part in so many of the read-ahead's budget may go into one band."""

LAYER_BREAK_BYTES = 512 << 10
"""A group that is at least so large ends with its layer, so that a layer does not wait for the next one's bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A block cannot be read: it and all after it will not come (again)."""

    block: int


class Cell(NamedTuple):
    """One slice: layer, index of the block in the lease, bytes, hash."""

    layer: int
    block: int
    data: memoryview
    hash: int


class LayerReader:
    """Reads one lease, and closes it when the last read for it has ended.

    Args:
        reads: where the lease is from.
        lease: what to read.
        layers: which layers.
        pool: threads that may block.
        ahead: bytes that all readers together may have read and not sent; each may always have one fetch. What is read
            into DRAM that was set aside for it does not count.
        group_bytes: size of a group aimed at.
        sent_bytes: what counts of each slice for the size of its group; all of it if None.
        piece_bytes: see `PIECE_BYTES`.
        layer_break_bytes: see `LAYER_BREAK_BYTES`.
    """

    def __init__(
        self,
        reads: Reads,
        lease: ReadLease,
        layers: range,
        pool: ThreadPoolExecutor,
        ahead: ByteCredits,
        *,
        group_bytes: int = FRAME_BYTES,
        sent_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        layer_break_bytes: int = LAYER_BREAK_BYTES,
    ) -> None:
        self._reads = reads
        self._lease = lease
        self._pool = pool
        self._ahead = ahead
        self._group_bytes = group_bytes
        self._piece_bytes = piece_bytes
        self._layer_break_bytes = layer_break_bytes
        self._slice_bytes = lease.format.layout.slice_bytes
        self._sent_bytes = sent_bytes or self._slice_bytes
        self._limit = lease.blocks
        self._told = lease.blocks
        self._left = layers
        self._thickness = 1
        self._bands: collections.deque[Band] = collections.deque()
        self._held = 0
        self._walked = 0
        self._fetches: set[Fetch] = set()
        self._error: MoonpoolError | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def groups(self) -> AsyncIterator[list[Cell] | Lost]:
        """Slices in order, in groups; after a `Lost` only of blocks before it. To be walked once.

        The bytes of a group stay as they are until `close`.

        Raises:
            Overloaded: there is no memory to read into.
        """
        group: list[Cell] = []
        self._start_more()
        while self._bands:
            band = self._bands[0]
            for depth, layer in enumerate(band.layers):
                block = 0
                while block < band.blocks:
                    block = self._gather(group, band, depth, layer, block)
                    full = self._is_full(group)
                    stuck = not full and block < band.blocks and not await self._readable(band, block)
                    whole = block >= band.blocks and len(group) * self._sent_bytes >= self._layer_break_bytes
                    if full or stuck or whole:
                        for part in self._parts(group):
                            yield part
                        group = []
                        self._sent()
                    if stuck and band.started <= block < self._limit:
                        self._start_more(must=True)
            self._bands.popleft()
            self._start_more()
        for part in self._parts(group):
            yield part
        self._sent()
        for fetch in list(self._fetches):  # of blocks behind a lost one: the lease ends with them
            await fetch.result()
            self._fetches.discard(fetch)

    def _is_full(self, group: list[Cell]) -> bool:
        return (len(group) + 1) * self._sent_bytes > self._group_bytes

    def _gather(self, group: list[Cell], band: Band, depth: int, layer: int, block: int) -> int:
        """Adds a layer's slices from `block` on to a group until it is full or one is not read yet; returns which."""
        sources, fetches, size = self._lease.sources, band.fetches, self._slice_bytes
        room = max(1, self._group_bytes // self._sent_bytes) - len(group)
        end = min(band.blocks, self._limit)
        while block < end and room > 0:
            source = sources[block]
            if source.block is not None:
                if block >= band.started:
                    break
                group.append(Cell(layer, block, source.block.slice(layer), source.hash_of(layer)))
            else:
                fetch = fetches.get(block)
                if fetch is None or not fetch.settled:
                    break
                group.append(Cell(layer, block, band.slices[block][depth], source.hash_of(layer)))
                if block in band.counted:
                    self._walked += size
            room -= 1
            block += 1
        if block >= self._limit:  # what was counted for lost blocks comes back too
            self._walked += size * sum(1 for lost in range(block, band.blocks) if lost in band.counted)
            return band.blocks
        return block

    async def _readable(self, band: Band, block: int) -> bool:
        """Waits for a block to be read; False when nobody has begun to, since all else must be sent before."""
        if block >= band.started:
            return False
        fetch = band.fetches[block]
        self._settle(fetch, band, await fetch.result())
        return True

    def _parts(self, group: list[Cell]) -> Iterator[list[Cell] | Lost]:
        good = [cell for cell in group if cell.block < self._limit]
        if good:
            yield good
        if self._limit < self._told:
            self._told = self._limit
            yield Lost(self._limit)

    def _sent(self) -> None:
        """What was walked over has been sent."""
        if self._closed:
            return
        self._ahead.grant(self._walked)
        self._held -= self._walked
        self._walked = 0
        self._start_more()

    def _start_more(self, *, must: bool = False) -> None:
        """Begins reading as far ahead as fetches and memory allow; at least one fetch if it is a must."""
        if self._closed:
            return
        try:
            while (must or len(self._fetches) < MAX_FETCHES) and self._start_one(must=must):
                must = False
        except MoonpoolError as error:
            self._error = error
        if must and self._error is not None:
            raise self._error

    def _start_one(self, *, must: bool) -> bool:
        band = self._bands[-1] if self._bands else None
        if band is None or band.started >= min(band.blocks, self._limit):
            if not self._left or not self._limit or len(self._bands) >= MAX_BANDS:
                return False
            band = self._open_band()
        blocks, end = self._next_blocks(band)
        fresh = [] if band.paid else [block for block in blocks if not self._lease.sources[block].reserved]
        if not self._take(len(fresh) * self._slice_bytes, must=must or not self._held):
            return False
        if blocks:
            self._submit(band, blocks)
        band.counted.update(fresh)
        band.started = end
        return True

    def _open_band(self) -> Band:
        """The next layers: as many as a piece wants, if the read-ahead can take all of them, else one."""
        sources = self._lease.sources[: self._limit]
        fresh = {n for n, source in enumerate(sources) if source.block is None and not source.reserved}
        count = min(self._thickness, len(self._left))
        most = self._ahead.window // READER_SHARE
        while count > 1:
            cost = count * len(fresh) * self._slice_bytes
            if cost <= most and self._take(cost, must=False):
                break
            count //= 2
        band = Band(self._left[:count], self._limit, count > 1, counted=fresh if count > 1 else set())
        self._left = self._left[count:]
        self._thickness = min(2 * self._thickness, max(1, self._piece_bytes // self._slice_bytes))
        self._bands.append(band)
        return band

    def _next_blocks(self, band: Band) -> tuple[list[int], int]:
        """Blocks of a band that one fetch should read, and before which block it ends."""
        piece = len(band.layers) * self._slice_bytes
        size = min(self._group_bytes, max(self._piece_bytes, band.blocks * piece // MAX_FETCHES))
        blocks: list[int] = []
        block = band.started
        while block < min(band.blocks, self._limit):
            if self._lease.sources[block].block is None:
                if blocks and (len(blocks) + 1) * piece > size:
                    break
                blocks.append(block)
            block += 1
        return blocks, block

    def _take(self, nbytes: int, *, must: bool) -> bool:
        if nbytes and not self._ahead.take(nbytes):
            if not must:
                return False
            self._ahead.overdraw(nbytes)
        self._held += nbytes
        return True

    def _submit(self, band: Band, blocks: list[int]) -> None:
        layout = self._lease.format.layout
        pieces: list[Piece] = []
        for block in blocks:
            source = self._lease.sources[block]
            band.slices[block] = [source.take(layer, layout) for layer in band.layers]
            pieces.append((block, source, band.layers.start, band.slices[block]))
        fetch = Fetch(self._pool.submit(read, pieces), blocks)
        self._fetches.add(fetch)
        band.fetches.update(dict.fromkeys(blocks, fetch))
        fetch.future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._one_read, fetch))

    def _settle(self, fetch: Fetch, band: Band, bad: Bad) -> None:
        """Takes note of what was read and what could not be."""
        fetch.settled = True
        self._fetches.discard(fetch)
        for block, error in bad.items():
            source = self._lease.sources[block]
            assert source.reader is not None
            key = source.reader.key.hex()[:16]
            if isinstance(error, BadRecordError):
                log.warning("a stored block is bad", key=key, error=str(error))
                self._reads.lost(source)
            else:
                log.warning("a stored block cannot be read now", key=key, error=str(error))
        self._limit = min(self._limit, *bad) if bad else self._limit
        bits = sum(1 << layer for layer in band.layers)
        for block in fetch.blocks:
            if block < self._limit:
                self._lease.sources[block].filled |= bits

    def _one_read(self, fetch: Fetch) -> None:
        if not self._closed:
            self._fetches.discard(fetch)
            self._start_more()
        elif fetch in self._fetches:
            self._fetches.discard(fetch)
            if not self._fetches:
                self._reads.close(self._lease)

    def close(self) -> None:
        """Ends the reading. The lease ends as soon as no thread reads for it any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ahead.grant(self._held)
        self._bands.clear()
        for fetch in list(self._fetches):
            fetch.future.cancel()
        if not self._fetches:
            self._reads.close(self._lease)
