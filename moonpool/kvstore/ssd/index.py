"""The SSD tier's durable index: the rows of all segments, in LMDB.

The index can be rebuilt from the segments, so any fault is answered by a rebuild. One value holds all records that one
commit appended to one segment, so a commit touches a page or two. Each value begins with a checksum over table, key and
content, and a segment's own value tells how many others belong to the segment: if a segment's values do not agree, the
segment's records are read instead.
"""

import collections
import contextlib
import dataclasses
import itertools
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import lmdb
import xxhash
from google.protobuf.message import DecodeError

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import KEY_BYTES
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.ssd.database_check import DamagedDatabaseError, check_database
from moonpool.kvstore.ssd.files import ALIGN, FileLayer, open_lmdb
from moonpool.kvstore.ssd.segment import (
    ENTRY,
    MAX_SEGMENT_BYTES,
    NUMBER_BITS,
    ROW_MASK,
    RecordKind,
    RowId,
    unpack_columns,
)
from moonpool.v1 import kv_pb2

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
_FAILURES = (lmdb.MapFullError, lmdb.DiskError, lmdb.MemoryError, lmdb.ReadonlyError)
_BAD_VALUE = (struct.error, DecodeError, UnicodeDecodeError, IndexError, MoonpoolError)
_LONG = b"\0"
"""In place of a layout's length, which is never 0: the length follows in four bytes."""
_LENGTH = struct.Struct("<I")
_KEY_ID = b"\xff"
"""Before a key's id, behind the tenant's name: not a byte of UTF-8."""


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
        """Leave out a segment; the segment's records have to be read."""
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
        """Check the structure of the file. Raises IndexLostError if LMDB must not read the file."""
        try:
            check_database(self._path)
        except (DamagedDatabaseError, OSError) as error:
            raise IndexLostError(f"the index is damaged: {error}") from error

    def load(self) -> IndexImage:
        """Read everything. Segments with damaged or disagreeing values are left out.

        Raises:
            IndexLostError: no commit was ever made, or the database is not readable.
        """
        with _lost_if_damaged(), self._env.begin() as txn:
            version = txn.get(_VERSION_KEY, db=self._tables[b"meta"])
            if version not in (_VERSION, _PLAIN_VERSION):
                raise IndexLostError(f"the index is new or of another version: {version!r}")
            return _Loading(txn, self._tables, plain=version == _PLAIN_VERSION).image

    def commit(self, change: IndexChange) -> None:
        """Do the change in one transaction, for which the map grows; on an error nothing has changed.

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


@contextlib.contextmanager
def _lost_if_damaged() -> Iterator[None]:
    """Turn LMDB errors about a damaged file into IndexLostError; errors of the device stay."""
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
