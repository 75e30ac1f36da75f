"""Reading a lease layer by layer, ahead of whoever takes the slices.

Owns the order of reading and the read-ahead: a lease's slices come layer-major in groups near a frame's size, and
while one group is being sent the next are being read from the device in a thread pool. Must not know of streams,
sessions or where the durable tier keeps its bytes.
"""

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moonpool.errors import MoonpoolError
from moonpool.kv.frames import FRAME_BYTES
from moonpool.telemetry.logs import get_logger
from services.kvstore.reads import ReadLease, Reads, Source

_log = get_logger(__name__)

MAX_GROUPS_AHEAD = 8
"""Groups that one reader may have read and not sent yet."""

LAYER_BREAK_BYTES = 256 << 10
"""A group that is at least so large ends with its layer, so that a layer does not wait for the next one's bytes."""


class ReadAhead:
    """Bytes that all readers together may have read and not sent yet; each may always have one group."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._total = nbytes

    @property
    def out(self) -> int:
        """Bytes read and not sent."""
        return self._total - self._free

    def take(self, nbytes: int, *, must: bool) -> bool:
        """Counts bytes as read; False when there are none left and it is not a must."""
        if nbytes > self._free and not must:
            return False
        self._free -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """These have been sent."""
        self._free += nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A block cannot be read; it and all behind it will not come (again)."""

    block: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One slice: layer, index of the block in the lease, bytes."""

    layer: int
    block: int
    data: memoryview


_Bad = dict[int, Exception]


@dataclasses.dataclass(slots=True)
class _Group:
    """Slices that are read together. `nbytes`: those of them that a device must be asked for."""

    cells: list[Cell]
    nbytes: int
    job: "Future[_Bad] | None" = None


class LayerReader:
    """Reads one lease, and closes it when the last read for it has ended.

    Args:
        reads: where the lease is from.
        lease: what to read.
        layers: which layers.
        pool: threads that may block.
        ahead: the read-ahead's budget.
        on_closed: called when the lease has ended.
        group_bytes: size of a group aimed at.
    """

    def __init__(
        self,
        reads: Reads,
        lease: ReadLease,
        layers: range,
        pool: ThreadPoolExecutor,
        ahead: ReadAhead,
        *,
        on_closed: Callable[[], None] = lambda: None,
        group_bytes: int = FRAME_BYTES,
    ) -> None:
        self._reads = reads
        self._lease = lease
        self._layers = layers
        self._pool = pool
        self._ahead = ahead
        self._on_closed = on_closed
        self._group_bytes = group_bytes
        self._slice_bytes = lease.format.layout.slice_bytes
        self._limit = lease.blocks
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._closed = False
        self._queue: collections.deque[_Group] = collections.deque()

    async def groups(self) -> AsyncIterator[list[Cell] | Lost]:
        """Slices in order, in groups; after a `Lost` only of blocks before it. To be walked once.

        The bytes of a group stay as they are until `close`.
        """
        upcoming = self._cut()
        cells = next(upcoming, None)
        while True:
            while cells and len(self._queue) < MAX_GROUPS_AHEAD and (group := self._start(cells)) is not None:
                self._queue.append(group)
                cells = next(upcoming, None)
            if not self._queue:
                return
            group = self._queue[0]
            bad = await asyncio.wrap_future(group.job) if group.job is not None else {}
            before = self._limit
            self._settle(group, bad)
            good = [cell for cell in group.cells if cell.block < self._limit]
            if good:
                yield good
            if self._limit < before:
                yield Lost(self._limit)
            self._queue.popleft()
            self._ahead.give_back(group.nbytes)

    def _cut(self) -> Iterator[list[Cell]]:
        """The slices of the lease in groups, layer by layer; blocks that are lost meanwhile are left out."""
        cells: list[Cell] = []
        for layer in self._layers if self._limit else ():
            for block in range(self._limit):
                if block >= self._limit:
                    break
                cells.append(Cell(layer, block, self._lease.sources[block].take(layer, self._lease.format.layout)))
                if (len(cells) + 1) * self._slice_bytes > self._group_bytes:
                    yield cells
                    cells = []
            if len(cells) * self._slice_bytes >= LAYER_BREAK_BYTES:
                yield cells
                cells = []
        if cells:
            yield cells

    def _start(self, cells: list[Cell]) -> _Group | None:
        """Begins reading a group; None while the read-ahead is used up."""
        cold = [cell for cell in cells if self._lease.sources[cell.block].reader is not None]
        nbytes = len(cold) * self._slice_bytes
        if not self._ahead.take(nbytes, must=not self._queue):
            return None
        group = _Group(cells, nbytes)
        if cold:
            self._running += 1
            group.job = self._pool.submit(_read, [(self._lease.sources[cell.block], cell) for cell in cold])
            group.job.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._one_read))
        return group

    def _settle(self, group: _Group, bad: _Bad) -> None:
        """Takes note of what was read and what could not be."""
        for block, error in bad.items():
            source = self._lease.sources[block]
            assert source.reader is not None
            _log.warning("a stored block is bad", key=source.reader.key.hex()[:16], error=str(error))
            self._reads.lost(source)
        self._limit = min(self._limit, *bad) if bad else self._limit
        for cell in group.cells:
            if cell.block < self._limit:
                self._lease.sources[cell.block].filled |= 1 << cell.layer

    def _one_read(self) -> None:
        self._running -= 1
        if self._closed and not self._running:
            self._finish()

    def close(self) -> None:
        """Ends the reading. The lease ends as soon as no thread reads for it any more. Twice does no harm."""
        if self._closed:
            return
        self._closed = True
        while self._queue:
            group = self._queue.popleft()
            self._ahead.give_back(group.nbytes)
            if group.job is not None:
                group.job.cancel()
        if not self._running:
            self._finish()

    def _finish(self) -> None:
        self._reads.close(self._lease)
        self._on_closed()


def _read(cells: Sequence[tuple[Source, Cell]]) -> _Bad:
    """Blocking. Reads slices; returns which blocks could not be read. Behind one that could not, nothing is read."""
    bad: _Bad = {}
    for source, cell in cells:
        if bad and cell.block >= min(bad):
            continue
        assert source.reader is not None
        try:
            source.reader.read(cell.layer, cell.data)
        except (MoonpoolError, OSError) as error:
            bad[cell.block] = error
    return bad
