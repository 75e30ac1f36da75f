"""The durable index: which records of which segment are blocks, in LMDB.

Everything in it can be rebuilt from the segments, so whatever is wrong with it is answered by making it anew.

It is kept by segment: one value holds all records that one commit appended to one segment. So a commit touches a page
or two, a segment is forgotten with a few deletions, and a million blocks load in the time it takes to read a table.

    meta        version, ...
    segments    segment -> committed bytes
    entries     segment, first slot -> packed entries of consecutive slots
    dropped     segment, slot -> "": that slot is dead
    kinds       segment, number -> format and tenant, as the entries of that segment number them

`commit` is called by the single writer thread only: an LMDB write transaction belongs to the thread that began it.
"""

import collections
import contextlib
import dataclasses
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import lmdb
from google.protobuf.message import DecodeError

from moonpool.errors import MoonpoolError
from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import KEY_BYTES
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2
from services.kvstore.ssd.catalogue import ENTRY, Kind, Slot
from services.kvstore.ssd.files import Files, open_lmdb

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
    kinds: dict[int, list[Kind]] = dataclasses.field(default_factory=dict)  # by segment


@dataclasses.dataclass(frozen=True, slots=True)
class IndexChange:
    """What one transaction does; removals come first."""

    removed_segments: Iterable[int] = ()
    dropped: Iterable[Slot] = ()  # dead from now on; of segments that stay
    entries: Mapping[Slot, bytes] = dataclasses.field(default_factory=dict)  # packed, by the first one's slot
    segments: Mapping[int, int] = dataclasses.field(default_factory=dict)  # number -> committed bytes
    kinds: Mapping[int, Sequence[Kind]] = dataclasses.field(default_factory=dict)  # all of a segment, known or not


class Index:
    """The LMDB database in a folder. It is whole with its first commit; `load` refuses it before.

    Without `files` it is a look, which changes and makes nothing. The memory map of `map_bytes` is doubled whenever it
    is full. With `sync` a commit survives a loss of power; else only the death of this process. Raises IndexLostError
    when the files there are not a usable LMDB database, OSError or lmdb.Error when the folder cannot be written.
    """

    def __init__(self, files: Files | None, path: Path, map_bytes: int = MAP_BYTES, *, sync: bool = True) -> None:
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
        """Reads everything. Raises IndexLostError when nothing was ever committed, or what was is not readable."""
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

    def _load_kinds(self, txn: lmdb.Transaction) -> dict[int, list[Kind]]:
        kinds = collections.defaultdict[int, list[Kind]](list)
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


def _pack_kind(kind: Kind) -> bytes:
    layout = kind.format.layout.to_proto().SerializeToString(deterministic=True)
    return kind.format.namespace + bytes([len(layout)]) + layout + kind.tenant.encode()


def _unpack_kind(data: bytes) -> Kind:
    end = KEY_BYTES + 1 + data[KEY_BYTES]
    try:
        layout = KVLayout.from_proto(kv_pb2.KVLayout.FromString(data[KEY_BYTES + 1 : end]))
        return Kind(BlockFormat(data[:KEY_BYTES], layout), data[end:].decode())
    except MoonpoolError as error:
        raise IndexLostError(f"the index holds an impossible format: {error}") from error
