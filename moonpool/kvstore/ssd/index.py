"""The SSD tier's index: which record in which segment is which block, in memory and durably in LMDB.

In memory a block is one dict entry: the key, an integer and 21 bytes in arrays. A block's *location* is the segment's
id and the *row*, the record's index within that segment. A row is dead if the row's key has another location, or
none.

The durable index can be rebuilt from the segments, so any fault is answered by a rebuild. One value holds all records
that one commit appended to one segment, so a commit touches a page or two. Each value begins with a checksum over
table, key and content, and a segment's own value tells how many others belong to the segment: if a segment's values do
not agree, the segment's records are read instead.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import operator
import struct
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb
import xxhash
from google.protobuf.message import DecodeError

from moonpool.base import world
from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.blocks import BlockFormat, PartTable
from moonpool.base.kv.delete_kv import KVSelection, ttl_of
from moonpool.base.kv.keys import KEY_BYTES, BlockKey, with_window_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantBytes
from moonpool.kvstore.ssd.database_check import DamagedDatabaseError, check_database
from moonpool.kvstore.ssd.files import ALIGN, FileLayer, lacks_memory, open_lmdb
from moonpool.v1 import kv_pb2

T = TypeVar("T")
log = get_logger(__name__)


class RecordKind(NamedTuple):
    """What many blocks have in common."""

    format: BlockFormat
    tenant: str
    key_id: str = ""  # of the key that encrypts; "" for plaintext


ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, kind number in the segment, `written_at`."""
IndexEntry = tuple[BlockKey, int, int, int, int]  # the same, unpacked
RowId = tuple[int, int]  # a segment's number on one disk, and the record's row there
MAX_SEGMENT_BYTES = ALIGN << 32
ROW_BITS = 24
"""A block's place is one integer: the segment's id, shifted by so many bits, and the record's row in the segment.

An integer takes less memory than a pair, and there are millions of blocks. A segment's id has the disk above
`NUMBER_BITS` bits for the segment's number on the disk.
"""
ROW_MASK = (1 << ROW_BITS) - 1
NUMBER_BITS = 32


def _column() -> "array[int]":
    return array("I")


def unpack_columns(packed: bytes) -> "tuple[list[BlockKey], array[int], array[int], array[int], array[int]]":
    """Packed entries' keys, starts, lengths, kind numbers and `written_at`."""
    keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
    numbers = array("I", packed)
    if sys.byteorder != "little":
        numbers.byteswap()
    starts, lengths, kinds, written = (
        numbers[word :: ENTRY.size // 4] for word in range(KEY_BYTES // 4, ENTRY.size // 4)
    )
    return keys, starts, lengths, kinds, written


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment on the event loop's side. The columns, from `keys` on, have one item per row."""

    number: int  # on the disk, ascending: older segments have lower numbers
    path: Path
    size: int = 0  # committed bytes
    disk: int = 0
    room: int = 0  # the file's bytes, if taken over from an older segment, whose records may still lie behind `size`
    overwritable: bool = False  # the records name this segment, and no block inside looks like a record
    live: TenantBytes = dataclasses.field(default_factory=TenantBytes)  # for records that are their blocks' places
    readers: int = 0  # readers of records; the segment is not reclaimed while readers are there
    going: bool = False  # being reclaimed
    removed: bool = False  # the index has forgotten the segment and the file has no name; the last reader closes it
    kept_share: float = 0.0  # share that must stay (0 to 1), as found for plan number `asked_at`
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)  # in units of `ALIGN`, as the lengths
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    kinds: "array[int]" = dataclasses.field(default_factory=_column)  # numbers of them
    written: "array[int]" = dataclasses.field(default_factory=_column)  # seconds since 1970
    erased: set[int] = dataclasses.field(default_factory=set)  # rows with overwritten records, now or soon
    used: bytearray = dataclasses.field(default_factory=bytearray)  # 1: the block was used since written here
    named: list[RecordKind] = dataclasses.field(default_factory=list)  # kinds by number; they go with the segment
    numbers: dict[RecordKind, int] = dataclasses.field(init=False)
    id: int = dataclasses.field(init=False)  # unique over all disks

    def __post_init__(self) -> None:
        self.id = self.disk << NUMBER_BITS | self.number
        self.numbers = {kind: number for number, kind in enumerate(self.named)}

    def offset(self, row: int) -> int:
        return self.starts[row] * ALIGN

    def nbytes(self, row: int) -> int:
        return self.lengths[row] * ALIGN

    def kind(self, row: int) -> RecordKind:
        return self.named[self.kinds[row]]

    def number_of(self, kind: RecordKind) -> int:
        """The number of a kind in this segment; a new number for a new kind."""
        number = self.numbers.setdefault(kind, len(self.named))
        if number == len(self.named):
            self.named.append(kind)
        return number


RecordLocation = tuple[Segment, int]  # and a row there
RecordFilter = Callable[[Segment, int], bool]


class Catalogue(PartTable[int]):
    """All segments by id, ascending on each disk, and all blocks' places."""

    def __init__(self, account: TenantAccount | None = None) -> None:
        super().__init__()
        self.segments: dict[int, Segment] = {}
        self.account = account or TenantAccount()
        self.live = self.account.used  # bytes in records that are blocks' places
        self.incoming = TenantBytes()  # of new blocks in plans under way
        self.doubles: list[
            RecordLocation
        ] = []  # copies that are dead for another one's sake; no index knows that they are

    def kind_of(self, key: BlockKey) -> RecordKind | None:
        found = self.find(key)
        return None if found is None else found[0].kind(found[1])

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        place = self.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> ROW_BITS], place & ROW_MASK)

    def is_live(self, segment: Segment, row: int) -> bool:
        key = segment.keys[row]
        return self.parts[key[0]].get(key) == segment.id << ROW_BITS | row

    def live_rows(self, segment: Segment) -> Iterator[int]:
        """A segment's rows that are blocks' places, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.id << ROW_BITS
        parts = self.parts
        for row, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | row:
                yield row

    def by_age(self) -> list[Segment]:
        """All disks' segments in the order of their last blocks' puts; within one second in arrival order."""
        return sorted(self.segments.values(), key=lambda segment: segment.written[-1] if segment.written else 0)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, of at most `step` rows at a time; none that come meanwhile."""
        for segment in reversed(self.by_age()):
            if self.segments.get(segment.id) is not segment:
                continue
            for end in range(len(segment.keys), 0, -step):
                rows = range(end - 1, max(end - step, 0) - 1, -1)
                yield [segment.keys[row] for row in rows if self.is_live(segment, row)]

    def oldest_of(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """A tenant's oldest blocks except those that `stays`: at least `nbytes` of records, or all."""
        found: list[BlockKey] = []
        for segment in self.by_age():
            for row in self.live_rows(segment) if tenant in segment.live else ():
                if nbytes <= 0:
                    return found
                key = segment.keys[row]
                if segment.kind(row).tenant == tenant and not stays(key):
                    found.append(key)
                    nbytes -= segment.nbytes(row)
        return found

    def chosen(self, selection: KVSelection) -> RecordFilter:
        """Tells whether a record is of a chosen block."""
        of_kind = self._by_kind(
            lambda kind: kind.tenant in selection.tenants or kind.format.namespace in selection.namespaces
        )
        keys = frozenset(with_window_keys(selection.keys))
        return lambda segment, row: of_kind(segment, row) or segment.keys[row] in keys

    def encrypted_with(self, key_ids: Container[str]) -> RecordFilter:
        """Tells whether a record is encrypted with one of some keys."""
        return self._by_kind(lambda kind: bool(kind.key_id) and kind.key_id in key_ids)

    def expired(self, ttl_s: Mapping[str, float], now: float) -> RecordFilter:
        """Tells whether a record is here for longer than the tenant's TTL."""
        oldest = self._by_kind(lambda kind: now - ttl_of(ttl_s, kind.tenant))
        return lambda segment, row: segment.written[row] < oldest(segment, row)

    def _by_kind(self, judge: Callable[[RecordKind], T]) -> Callable[[Segment, int], T]:
        """Judges each kind in a segment once, with the kind's first record; segments and kinds may come later."""
        judged: dict[Segment, dict[int, T]] = collections.defaultdict(dict)

        def of_kind(segment: Segment, row: int) -> T:
            known, number = judged[segment], segment.kinds[row]
            if number not in known:
                known[number] = judge(segment.named[number])
            return known[number]

        return of_kind

    def places(self, part: int, wanted: RecordFilter) -> list[RecordLocation]:
        """Places of a part's blocks with wanted records."""
        found = ((self.segments[place >> ROW_BITS], place & ROW_MASK) for place in self.parts[part].values())
        return [(segment, row) for segment, row in found if wanted(segment, row)]

    def dead(self, segment: Segment, rows: range, wanted: RecordFilter) -> list[RecordLocation]:
        """Dead rows with wanted records that are not to be overwritten already."""
        return [
            (segment, row)
            for row in rows
            if wanted(segment, row) and row not in segment.erased and not self.is_live(segment, row)
        ]

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for segment, row in filter(None, map(self.find, keys)):
            segment.used[row] = 1

    def add(self, segment: Segment, packed: bytes, dead: Container[int] = ()) -> None:
        """Entries were appended to a segment; `dead` rows come dead.

        Of a key that is on another disk, that copy stays the block's place; else the later one is. Adds to `doubles`.
        """
        self.segments[segment.id] = segment
        first = len(segment.keys)
        keys, *columns = unpack_columns(packed)
        for column, more in zip(
            (segment.starts, segment.lengths, segment.kinds, segment.written), columns, strict=True
        ):
            column.extend(more)
        segment.keys += keys
        segment.used += bytes(len(keys))
        assert len(segment.keys) <= ROW_MASK
        sums: collections.Counter[int] = collections.Counter()
        for kind, length in zip(segment.kinds[first:], segment.lengths[first:], strict=True):
            sums[kind] += length * ALIGN
        for kind, nbytes in sums.items():
            self._count(segment, segment.named[kind].tenant, nbytes)
        parts = self.parts
        for place, key in enumerate(keys, segment.id << ROW_BITS | first):
            part, row = parts[key[0]], place & ROW_MASK
            before = part.setdefault(key, place)
            if before == place and row not in dead:
                continue  # nearly always
            if row in dead or before >> ROW_BITS + NUMBER_BITS != segment.disk:
                self._count(segment, segment.kind(row).tenant, -segment.nbytes(row))
                if row not in dead:
                    self.doubles.append((segment, row))
                elif before == place:
                    del part[key]
            elif (found := self.forget(key)) is not None:
                self.doubles.append(found)
                part[key] = place

    def _count(self, segment: Segment, tenant: str, nbytes: int) -> None:
        segment.live.add(tenant, nbytes)
        self.live.add(tenant, nbytes)

    def forget(self, key: BlockKey) -> RecordLocation | None:
        """A block has no place any more; returns the last place."""
        found = self.find(key)
        if found is None:
            return None
        segment, row = found
        del self[key]
        self._count(segment, segment.kind(row).tenant, -segment.nbytes(row))
        return found

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for row in list(self.live_rows(segment)):
            self.forget(segment.keys[row])
        self.segments.pop(segment.id, None)


_VERSION = b"5"
_PLAIN_VERSION = b"4"  # values without checksums, and segments without counts
_VERSION_KEY = b"version"
_TABLES = (b"meta", b"segments", b"entries", b"dropped", b"kinds")
_SEGMENT_KEY = struct.Struct(">Q")
_ROW_KEY = struct.Struct(">QI")
_SEGMENT_ROW = struct.Struct("<QII")  # committed bytes, records, kinds
_PLAIN_SEGMENT_ROW = struct.Struct("<Q")
_SUM_BYTES = 8
_MAX_MAP_BYTES = 1 << 44
MAP_BYTES = 64 << 20
_RETRY_S = 60.0
_FAILURES = (lmdb.MapFullError, lmdb.DiskError, lmdb.MemoryError, lmdb.ReadonlyError)
_BAD_VALUE = (struct.error, DecodeError, UnicodeDecodeError, IndexError, MoonpoolError)


class IndexLostError(MoonpoolError):
    """The index is not usable: absent, of another version, or damaged. The index must be rebuilt."""


@dataclasses.dataclass(slots=True)
class IndexImage:
    """Everything the index holds about segments with agreeing values.

    Attributes:
        segments: committed bytes by number.
        entries: packed entries of all rows by number.
        dropped: dead rows by number.
        kinds: kinds by number.
        damage: what is wrong with the index; "" if nothing is wrong.
        plain: the values have no checksums, as in an older version.
    """

    segments: dict[int, int] = dataclasses.field(default_factory=dict)
    entries: dict[int, bytes] = dataclasses.field(default_factory=dict)
    dropped: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    kinds: dict[int, list[RecordKind]] = dataclasses.field(default_factory=dict)
    damage: str = ""
    plain: bool = False

    @property
    def stale(self) -> bool:
        """Whether the index must be written anew."""
        return self.plain or bool(self.damage)

    def drop(self, number: int, why: str) -> None:
        """Leaves out a segment; the segment's records have to be read."""
        self.damage = self.damage or f"segment {number}: {why}"
        for table in (self.segments, self.entries, self.dropped, self.kinds):
            table.pop(number, None)


@dataclasses.dataclass(frozen=True, slots=True)
class IndexChange:
    """What one transaction does; removals come first."""

    removed_segments: Iterable[int] = ()
    dropped: Iterable[RowId] = ()  # dead from now on; of segments that stay
    entries: Mapping[RowId, bytes] = dataclasses.field(default_factory=dict)  # packed, by the first one's row
    segments: Mapping[int, int] = dataclasses.field(default_factory=dict)  # number -> committed bytes
    kinds: Mapping[int, Sequence[RecordKind]] = dataclasses.field(
        default_factory=dict
    )  # all of a segment, known or not


class Index:
    """The LMDB database in a folder. The database is whole with the first commit; `load` refuses a bad database before.

    Without `files` the index is read only. The memory map of `map_bytes` is doubled whenever the map is full. With
    `sync` a commit survives a power loss, else only this process's death.

    Raises:
        IndexLostError: the files there are not a usable LMDB database.
        OSError: the folder cannot be written.
        lmdb.Error: the folder cannot be written.
    """

    def __init__(self, files: FileLayer | None, path: Path, map_bytes: int = MAP_BYTES, *, sync: bool = True) -> None:
        self._files = files
        self._path = path
        with _lost_if_damaged(), contextlib.ExitStack() as on_error:
            self.check()
            if files is None:
                self._env = open_lmdb(path, map_size=map_bytes, readonly=True, create=False)
            else:
                self._env = files.open_index(path, map_bytes, sync=sync)
            on_error.callback(self._env.close)
            changing = contextlib.nullcontext() if files is None else files.transaction(self._env)
            with changing as txn:  # one commit makes them all
                self._tables = {name: self._env.open_db(name, txn, create=files is not None) for name in _TABLES}
            on_error.pop_all()

    def check(self) -> None:
        """Checks the structure of the file. Raises IndexLostError if LMDB must not read the file."""
        try:
            check_database(self._path)
        except (DamagedDatabaseError, OSError) as error:
            raise IndexLostError(f"the index is damaged: {error}") from error

    def load(self) -> IndexImage:
        """Reads everything. Segments with damaged or disagreeing values are left out.

        Raises:
            IndexLostError: no commit was ever made, or the database is not readable.
        """
        with _lost_if_damaged(), self._env.begin() as txn:
            version = txn.get(_VERSION_KEY, db=self._tables[b"meta"])
            if version not in (_VERSION, _PLAIN_VERSION):
                raise IndexLostError(f"the index is new or of another version: {version!r}")
            return _Loading(txn, self._tables, plain=version == _PLAIN_VERSION).image

    def commit(self, change: IndexChange) -> None:
        """Does the change in one transaction, for which the map grows; on an error nothing has changed.

        Raises:
            IndexLostError: the database is damaged, or an earlier device error has ended the database's use.
            lmdb.Error: the device does not take the change.
        """
        while True:
            try:
                assert self._files is not None
                with _lost_if_damaged(), self._files.transaction(self._env) as txn:
                    self._apply(txn, change)
                return
            except lmdb.MapFullError:
                size = self._env.info()["map_size"]
                if size >= _MAX_MAP_BYTES:
                    raise
                self._env.set_mapsize(size * 2)

    def _apply(self, txn: lmdb.Transaction, change: IndexChange) -> None:
        txn.put(_VERSION_KEY, _VERSION, overwrite=False, db=self._tables[b"meta"])
        for segment in change.removed_segments:
            key = _SEGMENT_KEY.pack(segment)
            txn.delete(key, db=self._tables[b"segments"])
            for table in (b"entries", b"dropped", b"kinds"):
                cursor = txn.cursor(self._tables[table])
                while cursor.set_range(key) and bytes(cursor.key()).startswith(key):
                    cursor.delete()
        for row in change.dropped:
            self._put(txn, b"dropped", _ROW_KEY.pack(*row), b"")
        for segment, kinds in change.kinds.items():
            for number in reversed(range(len(kinds))):  # those before one that is there are there too
                if not self._put(txn, b"kinds", _ROW_KEY.pack(segment, number), _pack_kind(kinds[number])):
                    break
        counts: dict[int, int] = {}
        for (segment, first), packed in change.entries.items():
            counts[segment] = first + len(packed) // ENTRY.size
            self._put(txn, b"entries", _ROW_KEY.pack(segment, first), packed, overwrite=True)
        for segment, size in change.segments.items():
            key = _SEGMENT_KEY.pack(segment)
            before = txn.get(key, db=self._tables[b"segments"])
            records, kinds_before = (0, 0) if before is None else _SEGMENT_ROW.unpack_from(before, _SUM_BYTES)[1:]
            totals = size, counts.get(segment, records), len(change.kinds.get(segment, ())) or kinds_before
            self._put(txn, b"segments", key, _SEGMENT_ROW.pack(*totals), overwrite=True)

    def _put(self, txn: lmdb.Transaction, table: bytes, key: bytes, content: bytes, *, overwrite: bool = False) -> bool:
        return bool(txn.put(key, _sum(table, key, content) + content, overwrite=overwrite, db=self._tables[table]))

    def sync(self) -> None:
        assert self._files is not None
        self._files.sync_index(self._env)

    def close(self) -> None:
        self._env.close()


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
        """Opens the index, made if need be; as of `Index`."""
        self._index = Index(self.files, self.path, self.map_bytes, sync=self.sync)

    def load(self) -> IndexImage:
        assert self._index is not None
        return self._index.load()

    def commit(self, change: IndexChange, earlier: Sequence[IndexChange] = ()) -> None:
        """Does a change. A damaged index is written anew first; a missing one is, once a minute, if the device lets us.

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
        """Reads the index and checks the index; writes a damaged one anew."""
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
        """Deletes the index, and writes all that the catalogue has of this disk; raises as `commit` does."""
        self._tried_at = self.clock()
        self.discard()
        self.open()
        assert self._index is not None
        everything = self._everything()
        self._index.commit(everything)
        self.rebuilt += bool(everything.segments)

    def _everything(self) -> IndexChange:
        segments = [one for one in list(self.catalogue.segments.values()) if one.disk == self.disk and one.size]
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
        """Closes and deletes the index, as far as the device lets us."""
        self.close()
        with contextlib.suppress(OSError):
            self.files.remove_folder(self.path)

    def synced(self) -> None:
        """Returns once the index is on the device."""
        if self._index is not None:
            self._index.sync()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


@contextlib.contextmanager
def _lost_if_damaged() -> Iterator[None]:
    """Turns LMDB errors about a damaged file into IndexLostError; errors of the device stay."""
    try:
        yield
    except _FAILURES:
        raise
    except (lmdb.Error, struct.error) as error:
        if type(error) is lmdb.Error:  # an error of the operating system
            raise
        raise IndexLostError(f"the index is damaged: {error}") from error


def _sum(table: bytes, key: bytes, content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content, xxhash.xxh3_64_intdigest(table + key))


class _Loading:
    """Reads an image. Damaged values, and values that do not agree, cost their segment's place in the image."""

    def __init__(self, txn: lmdb.Transaction, tables: "Mapping[bytes, lmdb._Database]", *, plain: bool) -> None:
        self._txn, self._tables, self._plain = txn, tables, plain
        self.image = image = IndexImage(plain=plain)
        self._bad: dict[int, str] = {}
        rows = {number: self._unpack_row(row) for (number,), row in self._values(b"segments", _SEGMENT_KEY)}
        image.segments = {number: row[0] for number, row in rows.items()}
        entries = collections.defaultdict[int, bytearray](bytearray)
        for (number, first), packed in self._values(b"entries", _ROW_KEY):
            if first * ENTRY.size != len(entries[number]) or len(packed) % ENTRY.size:
                self._bad[number] = "the index has a gap"
            entries[number] += packed
        image.entries = {number: bytes(packed) for number, packed in entries.items()}
        for (number, row), _ in self._values(b"dropped", _ROW_KEY):
            image.dropped.setdefault(number, set()).add(row)
        for (number, _), packed in self._values(b"kinds", _ROW_KEY):
            try:
                image.kinds.setdefault(number, []).append(_unpack_kind(packed))
            except _BAD_VALUE as error:
                self._bad[number] = f"the index holds an impossible format: {error}"
        for number in {*image.entries, *image.kinds} - image.segments.keys():
            self._bad[number] = "the index does not know the segment's size"
        image.dropped = {number: rows for number, rows in image.dropped.items() if number in image.segments}
        for number, (size, records, kinds) in rows.items():
            counts = len(image.entries.get(number, b"")) // ENTRY.size, len(image.kinds.get(number, ()))
            if not plain and counts != (records, kinds):
                self._bad.setdefault(number, "the index has other values than it should")
            elif number >= 1 << NUMBER_BITS or not _fit(image, number, size):
                self._bad.setdefault(number, "the index names impossible records")
        for number, why in self._bad.items():
            image.drop(number, why)

    def _unpack_row(self, packed: bytes) -> tuple[int, int, int]:
        if self._plain:
            return _PLAIN_SEGMENT_ROW.unpack(packed)[0], 0, 0
        size, records, kinds = _SEGMENT_ROW.unpack(packed)
        return size, records, kinds

    def _values(self, table: bytes, key_form: struct.Struct) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Keys and contents of a table; damaged ones mark the segment that their key names."""
        for packed_key, value in self._txn.cursor(self._tables[table]):
            key, content = bytes(packed_key), bytes(value)
            if len(key) != key_form.size:
                self.image.damage = self.image.damage or f"a key of table {table.decode()} is damaged"
                continue
            numbers = key_form.unpack(key)
            if not self._plain:
                content = content[_SUM_BYTES:]
                if value[:_SUM_BYTES] != _sum(table, key, content):
                    self._bad[numbers[0]] = f"a value of table {table.decode()} is damaged"
                    continue
            elif table == b"segments" and len(content) != _PLAIN_SEGMENT_ROW.size:
                self._bad[numbers[0]] = f"a value of table {table.decode()} is damaged"
                continue
            yield numbers, content


def _fit(image: IndexImage, number: int, size: int) -> bool:
    """Whether a segment's records lie one behind the other within the committed bytes, and have known kinds."""
    packed, kinds = image.entries.get(number, b""), image.kinds.get(number, [])
    _, starts, lengths, numbers, _ = unpack_columns(packed)
    dropped = image.dropped.get(number, set())
    if not starts:
        return size == 0 and not dropped
    ends = list(map(operator.add, starts, lengths))
    cut_off = itertools.takewhile(lambda row: ends[row] * ALIGN > size, reversed(range(len(ends))))
    smallest = [ALIGN + -(-kind.format.layout.block_bytes // ALIGN) * ALIGN for kind in kinds]
    return (
        len(starts) <= ROW_MASK
        and size <= MAX_SEGMENT_BYTES
        and all(map(operator.le, ends, starts[1:]))
        and dropped.issuperset(cut_off)  # the file lost the end, and an earlier start noticed
        and max(numbers) < len(kinds)
        and all(length * ALIGN >= smallest[kind] for kind, length in set(zip(numbers, lengths, strict=True)))
        and max(dropped, default=0) < len(starts)
    )


_LONG = b"\0"
"""In place of a layout's length, which is never 0: the length follows in four bytes."""
_LENGTH = struct.Struct("<I")
_KEY_ID = b"\xff"
"""Before a key's id, behind the tenant's name: not a byte of UTF-8."""


def _pack_kind(kind: RecordKind) -> bytes:
    layout = kind.format.layout.to_proto().SerializeToString(deterministic=True)
    size = bytes([len(layout)]) if len(layout) < 1 << 8 else _LONG + _LENGTH.pack(len(layout))
    key_id = _KEY_ID + kind.key_id.encode() if kind.key_id else b""
    return kind.format.namespace + size + layout + kind.tenant.encode() + key_id


def _unpack_kind(data: bytes) -> RecordKind:
    begin, size = KEY_BYTES + 1, data[KEY_BYTES]
    if data[KEY_BYTES:begin] == _LONG:
        (size,), begin = _LENGTH.unpack_from(data, begin), begin + _LENGTH.size
    end = begin + size
    layout = KVLayout.from_proto(kv_pb2.KVLayout.FromString(data[begin:end]))
    tenant, _, key_id = data[end:].partition(_KEY_ID)
    return RecordKind(BlockFormat(data[:KEY_BYTES], layout), tenant.decode(), key_id.decode())
