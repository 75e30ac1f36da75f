"""The durable index: which record of which segment holds a block, in LMDB.

Owns the database and its transactions. Must not know of segment files, tiers or events. Everything in it can be rebuilt
from the segments, so whatever is wrong with it is answered by starting anew, never by guessing.

`open`, `load` and `close` are called while nothing else uses the index; `commit` only by the single writer thread
(an LMDB write transaction belongs to the thread that began it).
"""

import dataclasses
import pathlib
import shutil
import struct
from collections.abc import Iterable, Mapping

import lmdb
from google.protobuf.message import DecodeError

from moonpool.errors import MoonpoolError
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2
from services.kvstore.blocks import BlockFormat

_VERSION = b"1"
_VERSION_KEY = b"version"
_LOCATION = struct.Struct("<QQQI")
_SEGMENT_KEY = struct.Struct(">Q")
_SEGMENT_SIZE = struct.Struct("<Q")
_FORMAT_KEY = struct.Struct(">I")
_MAX_MAP_BYTES = 1 << 44


class IndexLostError(MoonpoolError):
    """The index is not usable: absent, of another version, or damaged. It must be rebuilt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where a block's record lies.

    Attributes:
        segment: id of the segment.
        offset: of the record, bytes from the segment's start.
        record_bytes: length of the record.
        format: id of the block's format.
    """

    segment: int
    offset: int
    record_bytes: int
    format: int

    def pack(self) -> bytes:
        """The form kept in memory (61 bytes instead of some 200) and on disk."""
        return _LOCATION.pack(self.segment, self.offset, self.record_bytes, self.format)

    @classmethod
    def unpack(cls, data: bytes) -> "Location":
        """Inverse of `pack`."""
        return cls(*_LOCATION.unpack(data))


@dataclasses.dataclass(slots=True)
class IndexImage:
    """Everything the index holds.

    Attributes:
        formats: format id -> format.
        segments: segment id -> committed bytes.
        blocks: key -> packed `Location`.
    """

    formats: dict[int, BlockFormat]
    segments: dict[int, int]
    blocks: dict[BlockKey, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class IndexChange:
    """What one transaction does; removals come first.

    Attributes:
        removed_blocks: keys to forget.
        removed_segments: segment ids to forget.
        blocks: key -> packed `Location`.
        segments: segment id -> committed bytes.
        formats: format id -> format.
    """

    removed_blocks: Iterable[BlockKey] = ()
    removed_segments: Iterable[int] = ()
    blocks: Mapping[BlockKey, bytes] = dataclasses.field(default_factory=dict)
    segments: Mapping[int, int] = dataclasses.field(default_factory=dict)
    formats: Mapping[int, BlockFormat] = dataclasses.field(default_factory=dict)


class Index:
    """The LMDB environment in the folder `path`.

    Args:
        path: its folder; made if need be.
        map_bytes: size of the memory map to begin with; doubled whenever it is full.

    Raises:
        IndexLostError: the files there are not a usable LMDB database.
        OSError, lmdb.Error: the folder cannot be written.
    """

    def __init__(self, path: pathlib.Path, map_bytes: int = 64 << 20) -> None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(str(path), map_size=map_bytes, max_dbs=4, metasync=True, sync=True, readahead=False)
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise IndexLostError(f"the index is not an LMDB database: {error}") from error
        try:
            self._check_size(path)
            self._meta = self._env.open_db(b"meta")
            self._formats = self._env.open_db(b"formats")
            self._segments = self._env.open_db(b"segments")
            self._blocks = self._env.open_db(b"blocks")
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError) as error:
            self._env.close()
            raise IndexLostError(f"the index is damaged: {error}") from error
        except BaseException:
            self._env.close()
            raise

    def _check_size(self, path: pathlib.Path) -> None:
        """A cut-off file must be noticed here: touching pages behind its end would kill the process (SIGBUS)."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        present = (path / "data.mdb").stat().st_size
        if present < needed:
            raise IndexLostError(f"the index has {present} bytes instead of {needed}")

    def load(self) -> IndexImage:
        """Reads everything.

        Raises:
            IndexLostError: it is empty, unfinished, of another version or damaged.
        """
        try:
            with self._env.begin() as txn:
                version = txn.get(_VERSION_KEY, db=self._meta)
                if version != _VERSION:
                    raise IndexLostError(
                        "the index is new" if version is None else f"the index has version {version!r}"
                    )
                blocks = {BlockKey(key): value for key, value in txn.cursor(self._blocks)}
                segments = {
                    _SEGMENT_KEY.unpack(key)[0]: _SEGMENT_SIZE.unpack(value)[0]
                    for key, value in txn.cursor(self._segments)
                }
                formats = {
                    _FORMAT_KEY.unpack(key)[0]: _unpack_format(value) for key, value in txn.cursor(self._formats)
                }
        except (lmdb.Error, struct.error, DecodeError) as error:
            raise IndexLostError(f"the index is damaged: {error}") from error
        if any(len(key) != KEY_BYTES or len(value) != _LOCATION.size for key, value in blocks.items()):
            raise IndexLostError("the index holds entries of wrong size")
        return IndexImage(formats, segments, blocks)

    def commit(self, change: IndexChange) -> None:
        """Does the change in one durable transaction; on any error nothing has changed.

        Raises:
            lmdb.Error: for example because the disk is full.
        """
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    self._apply(txn, change)
                return
            except lmdb.MapFullError:
                size = self._env.info()["map_size"]
                if size >= _MAX_MAP_BYTES:
                    raise
                self._env.set_mapsize(size * 2)

    def _apply(self, txn: lmdb.Transaction, change: IndexChange) -> None:
        for key in change.removed_blocks:
            txn.delete(key, db=self._blocks)
        for segment in change.removed_segments:
            txn.delete(_SEGMENT_KEY.pack(segment), db=self._segments)
        for number, block_format in change.formats.items():
            txn.put(_FORMAT_KEY.pack(number), _pack_format(block_format), db=self._formats)
        for segment, size in change.segments.items():
            txn.put(_SEGMENT_KEY.pack(segment), _SEGMENT_SIZE.pack(size), db=self._segments)
        for key, location in change.blocks.items():
            txn.put(key, location, db=self._blocks)

    def finish_rebuild(self) -> None:
        """Declares the index whole; until then `load` answers IndexLostError."""
        with self._env.begin(write=True) as txn:
            txn.put(_VERSION_KEY, _VERSION, db=self._meta)

    def close(self) -> None:
        """Closes the database."""
        self._env.close()


def remove_index(path: pathlib.Path) -> None:
    """Deletes a closed index.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.exists():
        shutil.rmtree(path)


def _pack_format(block_format: BlockFormat) -> bytes:
    return block_format.namespace + block_format.layout.to_proto().SerializeToString(deterministic=True)


def _unpack_format(data: bytes) -> BlockFormat:
    try:
        return BlockFormat(data[:KEY_BYTES], KVLayout.from_proto(kv_pb2.KVLayout.FromString(data[KEY_BYTES:])))
    except MoonpoolError as error:
        raise IndexLostError(f"the index holds an impossible format: {error}") from error
