"""One disk's durable index, which is written anew from the catalogue if lost."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import lmdb

from moonpool.base import world
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.files import FileLayer, lacks_memory
from moonpool.kvstore.ssd.index import MAP_BYTES, Index, IndexChange, IndexImage, IndexLostError
from moonpool.kvstore.ssd.segment import ENTRY, RowId

log = get_logger(__name__)
_RETRY_S = 60.0


@dataclasses.dataclass(eq=False)
class DiskIndex:
    """One disk's durable index; a lost index is written anew from the catalogue. Blocking.

    Used by one thread at a time: at the start, and then by the disk's writer between a plan's begin and end.

    Attributes:
        folder: the data folder, which messages name.
        path: the folder of the LMDB database.
        disk: the number of the disk.
    """

    files: FileLayer
    folder: Path
    catalogue: "Catalogue"
    disk: int
    sync: bool
    map_bytes: int = MAP_BYTES
    clock: Callable[[], float] = world.monotonic
    rebuilt: int = 0  # times since the start
    _index: Index | None = None
    _tried_at: float = -math.inf

    @property
    def path(self) -> Path:
        return self.folder / "index"

    @property
    def usable(self) -> bool:
        """Whether there is an index on disk.

        Without an index blocks are durable too, and a start reads all segments.
        """
        return self._index is not None

    @property
    def waits(self) -> bool:
        """Whether it is too early to write a missing index."""
        return self.clock() < self._tried_at + _RETRY_S

    def open(self) -> None:
        """Open the index, made if need be; as of `Index`."""
        self._index = Index(self.files, self.path, self.map_bytes, sync=self.sync)

    def load(self) -> IndexImage:
        assert self._index is not None
        return self._index.load()

    def commit(self, change: IndexChange, earlier: Sequence[IndexChange] = ()) -> None:
        """Do a change. A damaged index is written anew first; a missing one is, once a minute, if the device lets us.

        Without memory for the index's map, the index is given up: the next one is written a minute later.

        `earlier`: changes that were done and that the catalogue does not know yet, for an index that is written anew.

        Raises:
            OSError: the device does not take the change to an index that is whole.
            lmdb.Error: as above.
        """
        if self._index is None and self.waits:
            return
        try:
            if self._index is not None:
                self._index.commit(change)
                return
        except IndexLostError as error:
            self._report(error)
        except lmdb.MemoryError as error:
            self.do_without(error)
            return
        self._renew((*earlier, change))

    def _renew(self, changes: Iterable[IndexChange]) -> None:
        try:
            self.write_anew()
            assert self._index is not None
            for change in changes:
                self._index.commit(change)
        except (OSError, lmdb.Error, IndexLostError) as error:
            if lacks_memory(error):
                self.do_without(error)
                return
            self.discard()
            log.error("no index can be written; blocks are durable all the same", path=str(self.path), error=str(error))

    def check(self) -> None:
        """Read the index and check the index; write a damaged one anew."""
        try:
            if self._index is not None:
                self._index.check()
                if damage := self._index.load().damage:
                    raise IndexLostError(damage)
                return
        except IndexLostError as error:
            self._report(error)
            self._renew(())

    def _report(self, error: Exception) -> None:
        log.error(
            "the index is damaged; rebuilding the index while serving",
            error=str(error),
            command=f"moonpool kvstore verify --repair {self.folder}",
        )
        self.close()

    def write_anew(self) -> None:
        """Delete the index, and write all that the catalogue has of this disk; raise as `commit` does."""
        self._tried_at = self.clock()
        self.discard()
        self.open()
        assert self._index is not None
        everything = self._everything()
        self._index.commit(everything)
        self.rebuilt += bool(everything.segments)

    def _everything(self) -> IndexChange:
        segments = [
            segment for segment in list(self.catalogue.segments.values()) if segment.disk == self.disk and segment.size
        ]
        entries, dropped = dict[RowId, bytes](), list[RowId]()
        for segment in segments:
            columns = segment.keys, segment.starts, segment.lengths, segment.kinds, segment.written
            entries[segment.number, 0] = b"".join(itertools.starmap(ENTRY.pack, zip(*columns, strict=True)))
            live = set(self.catalogue.live_rows(segment))
            dropped += [(segment.number, row) for row in range(len(segment.keys)) if row not in live]
        sizes = {segment.number: segment.size for segment in segments}
        return IndexChange((), dropped, entries, sizes, {segment.number: segment.named for segment in segments})

    def do_without(self, error: Exception) -> None:
        """There is no memory for the index; the segments hold all that it says. Deletes the index, which gets old."""
        self._tried_at = self.clock()
        self.discard()
        log.error(
            "no memory for the index: blocks are durable all the same; the index is written again once there is memory",
            path=str(self.path),
            error=str(error),
        )

    def lose(self) -> None:
        """The disk was away: with the next change the index is written anew."""
        self.close()
        self._tried_at = -math.inf

    def discard(self) -> None:
        """Close and delete the index, as far as the device lets us."""
        self.close()
        with contextlib.suppress(OSError):
            self.files.remove_folder(self.path)

    def synced(self) -> None:
        """Return once the index is on the device."""
        if self._index is not None:
            self._index.sync()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
