"""The index of the SSD tier: which record of which segment is which block, in memory and durably in LMDB.

In memory a block is one entry of a dict, its key, one integer and 21 bytes in arrays. A block's *location* is its
segment's id and its *slot*, the index of its record within that segment. A slot is dead when its key has another
location, or none.

The durable index can be rebuilt from the segments, so whatever is wrong with it is answered by making it anew. One
value holds all records that one commit appended to one segment, so a commit touches a page or two.
"""

import collections
import contextlib
import dataclasses
import struct
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb
from google.protobuf.message import DecodeError

from moonpool.errors import MoonpoolError
from moonpool.kv.blocks import BlockFormat, PartTable
from moonpool.kv.delete_kv import KVSelection, ttl_of
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2
from services.kvstore.eviction.tenants import TenantAccount, TenantBytes
from services.kvstore.ssd.files import ALIGN, FileLayer, open_lmdb

T = TypeVar("T")


class RecordKind(NamedTuple):
    """What many blocks have in common."""

    format: BlockFormat
    tenant: str


ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, number of its kind in its segment, `written_at`.
"""
SlotRow = tuple[BlockKey, int, int, int, int]  # the same, unpacked
Slot = tuple[int, int]  # number of a segment of one disk, and index of a record within it
MAX_SEGMENT_BYTES = ALIGN << 32
_SLOT_BITS = 24
_NUMBER_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


def _column() -> "array[int]":
    return array("I")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment as the event loop knows it. The columns, from `keys` on, have one item per slot."""

    number: int  # on its disk, ascending: older segments have lower ones
    path: Path
    size: int = 0  # committed bytes
    disk: int = 0
    room: int = 0  # bytes of its file, if that was an older segment's, whose records may lie behind `size` still
    overwritable: bool = False  # its records say that they are of it, and no block in them looks like a record
    live: TenantBytes = dataclasses.field(default_factory=TenantBytes)  # of records whose block has its place here
    readers: int = 0  # of its records; it is not reclaimed while there are any
    going: bool = False  # it is being reclaimed
    removed: bool = False  # the index has forgotten it and the file has no name; the last reader closes it
    kept_share: float = 0.0  # of it must stay (0 to 1), as found for the plan number `asked_at`
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)  # in units of `ALIGN`, as the lengths
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    kinds: "array[int]" = dataclasses.field(default_factory=_column)  # numbers of them
    written: "array[int]" = dataclasses.field(default_factory=_column)  # seconds since 1970
    erased: set[int] = dataclasses.field(default_factory=set)  # slots whose records are, or are to be, overwritten
    used: bytearray = dataclasses.field(default_factory=bytearray)  # 1: the block was used since it was written here
    named: list[RecordKind] = dataclasses.field(default_factory=list)  # kinds by number; they go with the segment
    numbers: dict[RecordKind, int] = dataclasses.field(init=False)
    id: int = dataclasses.field(init=False)  # no other segment has it, on whatever disk

    def __post_init__(self) -> None:
        self.id = self.disk << _NUMBER_BITS | self.number
        self.numbers = {kind: number for number, kind in enumerate(self.named)}

    def offset(self, slot: int) -> int:
        return self.starts[slot] * ALIGN

    def nbytes(self, slot: int) -> int:
        return self.lengths[slot] * ALIGN

    def kind(self, slot: int) -> RecordKind:
        return self.named[self.kinds[slot]]

    def number_of(self, kind: RecordKind) -> int:
        """The number of a kind in this segment; a new one if it has none."""
        number = self.numbers.setdefault(kind, len(self.named))
        if number == len(self.named):
            self.named.append(kind)
        return number


RecordLocation = tuple[Segment, int]  # and a slot of it
RecordFilter = Callable[[Segment, int], bool]


class Catalogue(PartTable[int]):
    """All segments by id, those of one disk ascending, and the places of all blocks."""

    def __init__(self, account: TenantAccount | None = None) -> None:
        super().__init__()
        self.segments: dict[int, Segment] = {}
        self.account = account or TenantAccount()
        self.live = self.account.used  # bytes of the records that are places of blocks
        self.incoming = TenantBytes()  # of new blocks in plans under way
        self.doubles: list[
            RecordLocation
        ] = []  # copies that are dead for another one's sake; no index knows that they are

    def kind_of(self, key: BlockKey) -> RecordKind | None:
        found = self.find(key)
        return None if found is None else found[0].kind(found[1])

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        place = self.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> _SLOT_BITS], place & _SLOT_MASK)

    def is_live(self, segment: Segment, slot: int) -> bool:
        key = segment.keys[slot]
        return self.parts[key[0]].get(key) == segment.id << _SLOT_BITS | slot

    def live_slots(self, segment: Segment) -> Iterator[int]:
        """Slots of a segment that are places of blocks, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.id << _SLOT_BITS
        parts = self.parts
        for slot, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | slot:
                yield slot

    def by_age(self) -> list[Segment]:
        """Segments of all disks in the order in which their last blocks were put; those of one second as they came."""
        return sorted(self.segments.values(), key=lambda segment: segment.written[-1] if segment.written else 0)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, of at most `step` slots at a time; none that come meanwhile."""
        for segment in reversed(self.by_age()):
            if self.segments.get(segment.id) is not segment:
                continue
            for end in range(len(segment.keys), 0, -step):
                slots = range(end - 1, max(end - step, 0) - 1, -1)
                yield [segment.keys[slot] for slot in slots if self.is_live(segment, slot)]

    def oldest_of(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of a tenant but those that `stays`: `nbytes` of records at least, or all there are."""
        found: list[BlockKey] = []
        for segment in self.by_age():
            for slot in self.live_slots(segment) if tenant in segment.live else ():
                if nbytes <= 0:
                    return found
                key = segment.keys[slot]
                if segment.kind(slot).tenant == tenant and not stays(key):
                    found.append(key)
                    nbytes -= segment.nbytes(slot)
        return found

    def chosen(self, selection: KVSelection) -> RecordFilter:
        """Tells whether a record is of a chosen block."""
        of_kind = self._by_kind(
            lambda kind: kind.tenant in selection.tenants or kind.format.namespace in selection.namespaces
        )
        keys = selection.keys
        return lambda segment, slot: of_kind(segment, slot) or segment.keys[slot] in keys

    def expired(self, ttl_s: Mapping[str, float], now: float) -> RecordFilter:
        """Tells whether a record is here for longer than its tenant's blocks may be."""
        oldest = self._by_kind(lambda kind: now - ttl_of(ttl_s, kind.tenant))
        return lambda segment, slot: segment.written[slot] < oldest(segment, slot)

    def _by_kind(self, judge: Callable[[RecordKind], T]) -> Callable[[Segment, int], T]:
        """Judges each kind of a segment once, with its first record; segments and kinds may come later."""
        judged: dict[Segment, dict[int, T]] = collections.defaultdict(dict)

        def of_kind(segment: Segment, slot: int) -> T:
            known, number = judged[segment], segment.kinds[slot]
            if number not in known:
                known[number] = judge(segment.named[number])
            return known[number]

        return of_kind

    def places(self, part: int, wanted: RecordFilter) -> list[RecordLocation]:
        """Places of those blocks of a part whose records are wanted."""
        found = ((self.segments[place >> _SLOT_BITS], place & _SLOT_MASK) for place in self.parts[part].values())
        return [(segment, slot) for segment, slot in found if wanted(segment, slot)]

    def dead(self, segment: Segment, slots: range, wanted: RecordFilter) -> list[RecordLocation]:
        """Dead slots among these whose records are wanted, and are not to be overwritten already."""
        return [
            (segment, slot)
            for slot in slots
            if wanted(segment, slot) and slot not in segment.erased and not self.is_live(segment, slot)
        ]

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for segment, slot in filter(None, map(self.find, keys)):
            segment.used[slot] = 1

    def add(self, segment: Segment, packed: bytes, dead: Container[int] = ()) -> None:
        """Entries were appended to a segment; `dead` slots of it come dead.

        Of a key that is on another disk, that copy stays the block's place; else the later one is. Adds to `doubles`.
        """
        self.segments[segment.id] = segment
        first = len(segment.keys)
        keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
        numbers = array("I", packed)
        if sys.byteorder != "little":
            numbers.byteswap()
        columns = (segment.starts, segment.lengths, segment.kinds, segment.written)
        for word, column in enumerate(columns, KEY_BYTES // 4):
            column.extend(numbers[word :: ENTRY.size // 4])
        segment.keys += keys
        segment.used += bytes(len(keys))
        assert len(segment.keys) <= _SLOT_MASK
        sums: collections.Counter[int] = collections.Counter()
        for kind, length in zip(segment.kinds[first:], segment.lengths[first:], strict=True):
            sums[kind] += length * ALIGN
        for kind, nbytes in sums.items():
            self._count(segment, segment.named[kind].tenant, nbytes)
        parts = self.parts
        for place, key in enumerate(keys, segment.id << _SLOT_BITS | first):
            part, slot = parts[key[0]], place & _SLOT_MASK
            before = part.setdefault(key, place)
            if before == place and slot not in dead:
                continue  # nearly always
            if slot in dead or before >> _SLOT_BITS + _NUMBER_BITS != segment.disk:
                self._count(segment, segment.kind(slot).tenant, -segment.nbytes(slot))
                if slot not in dead:
                    self.doubles.append((segment, slot))
                elif before == place:
                    del part[key]
            elif (found := self.forget(key)) is not None:
                self.doubles.append(found)
                part[key] = place

    def _count(self, segment: Segment, tenant: str, nbytes: int) -> None:
        segment.live.add(tenant, nbytes)
        self.live.add(tenant, nbytes)

    def forget(self, key: BlockKey) -> RecordLocation | None:
        """A block has no place any more; returns the one it had."""
        found = self.find(key)
        if found is None:
            return None
        segment, slot = found
        del self[key]
        self._count(segment, segment.kind(slot).tenant, -segment.nbytes(slot))
        return found

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for slot in list(self.live_slots(segment)):
            self.forget(segment.keys[slot])
        self.segments.pop(segment.id, None)


_VERSION = b"4"
_VERSION_KEY = b"version"
_TABLES = (b"meta", b"segments", b"entries", b"dropped", b"kinds")
_SEGMENT_KEY = struct.Struct(">Q")
_SLOT_KEY = struct.Struct(">QI")
_SEGMENT_SIZE = struct.Struct("<Q")
_MAX_MAP_BYTES = 1 << 44
MAP_BYTES = 64 << 20
_DAMAGE = (
    lmdb.NotFoundError,
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.VersionMismatchError,
)


class IndexLostError(MoonpoolError):
    """The index is not usable: absent, of another version, or damaged. It must be rebuilt."""


@dataclasses.dataclass(slots=True)
class IndexImage:
    """Everything the index holds."""

    segments: dict[int, int] = dataclasses.field(default_factory=dict)  # number -> committed bytes
    entries: dict[int, bytes] = dataclasses.field(default_factory=dict)  # number -> packed entries of all its slots
    dropped: dict[int, set[int]] = dataclasses.field(default_factory=dict)  # slots by segment
    kinds: dict[int, list[RecordKind]] = dataclasses.field(default_factory=dict)  # by segment


@dataclasses.dataclass(frozen=True, slots=True)
class IndexChange:
    """What one transaction does; removals come first."""

    removed_segments: Iterable[int] = ()
    dropped: Iterable[Slot] = ()  # dead from now on; of segments that stay
    entries: Mapping[Slot, bytes] = dataclasses.field(default_factory=dict)  # packed, by the first one's slot
    segments: Mapping[int, int] = dataclasses.field(default_factory=dict)  # number -> committed bytes
    kinds: Mapping[int, Sequence[RecordKind]] = dataclasses.field(
        default_factory=dict
    )  # all of a segment, known or not


class Index:
    """The LMDB database in a folder. The database is whole with the first commit; `load` refuses it before.

    Without `files` the index is read only. The memory map of `map_bytes` is doubled whenever the map is full. With
    `sync` a commit survives a loss of power, else only the death of this process.

    Raises:
        IndexLostError: the files there are not a usable LMDB database.
        OSError: the folder cannot be written.
        lmdb.Error: the folder cannot be written.
    """

    def __init__(self, files: FileLayer | None, path: Path, map_bytes: int = MAP_BYTES, *, sync: bool = True) -> None:
        self._files = files
        with _lost_if_damaged(), contextlib.ExitStack() as on_error:
            if files is None:
                self._env = open_lmdb(path, map_size=map_bytes, readonly=True, create=False)
            else:
                self._env = files.open_index(path, map_bytes, sync=sync)
            on_error.callback(self._env.close)
            needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            present = (path / "data.mdb").stat().st_size
            if present < needed:  # touching pages behind its end would kill the process (SIGBUS)
                raise IndexLostError(f"the index has {present} bytes instead of {needed}")
            changing = contextlib.nullcontext() if files is None else files.transaction(self._env)
            with changing as txn:  # one commit makes them all
                self._meta, self._segments, self._entries, self._dropped, self._kinds = (
                    self._env.open_db(name, txn, create=files is not None) for name in _TABLES
                )
            on_error.pop_all()

    def load(self) -> IndexImage:
        """Reads everything.

        Raises:
            IndexLostError: nothing was ever committed, or the content is not readable.
        """
        with _lost_if_damaged((lmdb.Error, struct.error, DecodeError, UnicodeDecodeError)), self._env.begin() as txn:
            version = txn.get(_VERSION_KEY, db=self._meta)
            if version != _VERSION:
                raise IndexLostError(f"the index is new or of another version: {version!r}")
            return IndexImage(
                dict(_SEGMENT_KEY.unpack(key) + _SEGMENT_SIZE.unpack(size) for key, size in txn.cursor(self._segments)),
                self._load_entries(txn),
                self._load_dropped(txn),
                self._load_kinds(txn),
            )

    def _load_kinds(self, txn: lmdb.Transaction) -> dict[int, list[RecordKind]]:
        kinds = collections.defaultdict[int, list[RecordKind]](list)
        for key, value in txn.cursor(self._kinds):
            kinds[_SEGMENT_KEY.unpack_from(key)[0]].append(_unpack_kind(bytes(value)))
        return kinds

    def _load_dropped(self, txn: lmdb.Transaction) -> dict[int, set[int]]:
        dropped = collections.defaultdict[int, set[int]](set)
        for segment, slot in map(_SLOT_KEY.unpack, txn.cursor(self._dropped).iternext(values=False)):
            dropped[segment].add(slot)
        return dropped

    def _load_entries(self, txn: lmdb.Transaction) -> dict[int, bytes]:
        entries = collections.defaultdict[int, bytearray](bytearray)
        for key, value in txn.cursor(self._entries):
            segment, first = _SLOT_KEY.unpack(key)
            if first * ENTRY.size != len(entries[segment]) or len(value) % ENTRY.size:
                raise IndexLostError("the index has a gap")
            entries[segment] += value
        return {segment: bytes(packed) for segment, packed in entries.items()}

    def commit(self, change: IndexChange) -> None:
        """Does the change in one transaction, for which the map grows; on an lmdb.Error nothing has changed."""
        while True:
            try:
                assert self._files is not None
                with self._files.transaction(self._env) as txn:
                    self._apply(txn, change)
                return
            except lmdb.MapFullError:
                size = self._env.info()["map_size"]
                if size >= _MAX_MAP_BYTES:
                    raise
                self._env.set_mapsize(size * 2)

    def _apply(self, txn: lmdb.Transaction, change: IndexChange) -> None:
        txn.put(_VERSION_KEY, _VERSION, overwrite=False, db=self._meta)
        for segment in change.removed_segments:
            key = _SEGMENT_KEY.pack(segment)
            txn.delete(key, db=self._segments)
            for table in (self._entries, self._dropped, self._kinds):
                cursor = txn.cursor(table)
                while cursor.set_range(key) and bytes(cursor.key()).startswith(key):
                    cursor.delete()
        for slot in change.dropped:
            txn.put(_SLOT_KEY.pack(*slot), b"", db=self._dropped)
        for segment, kinds in change.kinds.items():
            for number in reversed(range(len(kinds))):  # those before one that is there are there too
                key, packed = _SLOT_KEY.pack(segment, number), _pack_kind(kinds[number])
                if not txn.put(key, packed, overwrite=False, db=self._kinds):
                    break
        for segment, size in change.segments.items():
            txn.put(_SEGMENT_KEY.pack(segment), _SEGMENT_SIZE.pack(size), db=self._segments)
        for slot, packed in change.entries.items():
            txn.put(_SLOT_KEY.pack(*slot), packed, db=self._entries)

    def sync(self) -> None:
        assert self._files is not None
        self._files.sync_index(self._env)

    def close(self) -> None:
        self._env.close()


@contextlib.contextmanager
def _lost_if_damaged(errors: tuple[type[Exception], ...] = _DAMAGE) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise IndexLostError(f"the index is damaged: {error}") from error


def _pack_kind(kind: RecordKind) -> bytes:
    layout = kind.format.layout.to_proto().SerializeToString(deterministic=True)
    return kind.format.namespace + bytes([len(layout)]) + layout + kind.tenant.encode()


def _unpack_kind(data: bytes) -> RecordKind:
    end = KEY_BYTES + 1 + data[KEY_BYTES]
    try:
        layout = KVLayout.from_proto(kv_pb2.KVLayout.FromString(data[KEY_BYTES + 1 : end]))
        return RecordKind(BlockFormat(data[:KEY_BYTES], layout), data[end:].decode())
    except MoonpoolError as error:
        raise IndexLostError(f"the index holds an impossible format: {error}") from error
