"""A store's data for conductors besides blocks: records, and which deletions were carried out.

Kept in memory, and in a small LMDB database in each data folder; every write there is synced. What is deleted there
leaves the database; deleted bytes may stay in the file's free pages until these are used again.

Each value begins with a checksum. A damaged database is written anew from the records that can still be read; what is
lost, conductors bring again. Databases without checksums, of older versions, get them when they are opened.

With encryption keys, values are encrypted by tenant, except those of deletions: what was deleted stays deleted without
any key.
"""

import asyncio
import collections
import contextlib
import struct
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

import lmdb
import xxhash
from google.protobuf.message import DecodeError

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import DELETION, deletion_from_record
from moonpool.base.cluster.records import RecordPlace, ReplicatedRecords, record_place
from moonpool.base.errors import ConfigError, MoonpoolError, Unavailable
from moonpool.base.kv.delete_kv import DeletionIndex
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.database_check import DamagedDatabaseError, read_database, salvage_database
from moonpool.kvstore.ssd.encryption import BrokenSealError, Keyring, is_sealed, open_value, seal_value
from moonpool.kvstore.ssd.files import FileLayer, open_lmdb
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
MAP_BYTES = 1 << 30
KEEP_S = 40 * 86400.0  # a carried-out deletion is remembered this long; conductors repeat theirs for a shorter time
_APPLIED = "applied"
_PLAIN_KINDS = frozenset({DELETION, _APPLIED})
_COUNTS = struct.Struct("<QQ")
_VERSION_FORM = struct.Struct("<Q")
_VERSION_KEY, _VERSION = b"version", b"2"
_SUM_BYTES = 8


class RecordFolder:
    """The database with records in one data folder. Blocking.

    Attributes:
        folder: the folder of the database.
        whole: all records are in the database; if not, the database must be written anew.
    """

    def __init__(self, folder: Path, keyring: Keyring | None = None) -> None:
        self.folder = folder
        self._keyring = keyring
        self.whole = False
        self._env: lmdb.Environment | None = None

    def load(self) -> list[kv_pb2.Record]:
        """All records; from a damaged database the intact records, from which the database is written anew.

        Without memory for the database's map, all records are read, and `whole` stays False.

        Raises:
            OSError: the folder cannot be used.
            lmdb.Error: as above.
        """
        FileLayer().make_folder(self.folder)
        records, damage, plain = read_records(self.folder)
        if damage:
            log.error(
                "records were damaged; the intact ones are kept, and conductors bring the others again",
                path=str(self.folder),
                intact=len(records),
                error=damage,
                command=f"moonpool kvstore verify --repair {self.folder.parent}",
            )
        try:
            if damage or plain:
                self.write_anew(records)
            self._env = self._env or open_lmdb(self.folder, map_size=MAP_BYTES)
            self.whole = True
        except lmdb.MemoryError as error:
            log.error(
                "no memory for the records' database: its records count, new ones are refused until there is memory",
                path=str(self.folder),
                error=str(error),
            )
        return self._opened(records)

    def _opened(self, records: Iterable[kv_pb2.Record]) -> list[kv_pb2.Record]:
        """Records with values in plaintext, without those that cannot be decrypted."""
        found, locked = [], collections.Counter[str]()
        for record in records:
            try:
                if is_sealed(record.value):
                    record.value = open_value(self._keyring, _identity(record), record.value)
                found.append(record)
            except BrokenSealError as error:
                locked[str(error)] += 1
        for why, count in locked.items():
            log.warning("records cannot be decrypted", path=str(self.folder), records=count, error=why)
        return found

    def _sealed(self, record: kv_pb2.Record) -> kv_pb2.Record:
        """A record as it is written."""
        if self._keyring is None or record.kind in _PLAIN_KINDS or not record.value or is_sealed(record.value):
            return record
        sealed = kv_pb2.Record()
        sealed.CopyFrom(record)
        sealed.value = seal_value(self._keyring.newest(record.tenant), _identity(record), record.value)
        return sealed

    def commit(self, records: Iterable[kv_pb2.Record], over: Iterable[kv_pb2.Record]) -> None:
        """Write records, and delete expired records; synced on return. Raises OSError or lmdb.Error."""
        self.whole = False
        assert self._env is not None
        _commit(self._env, map(self._sealed, records), over)
        self.whole = True

    def write_anew(self, records: Iterable[kv_pb2.Record]) -> None:
        """Replace the database by one with these records; raise as `commit` does."""
        self.close()
        files, anew = FileLayer(), self.folder / "anew"
        files.remove_folder(anew)
        files.make_folder(anew)
        with open_lmdb(anew, map_size=MAP_BYTES) as env:
            _commit(env, map(self._sealed, records), ())
        files.rename(anew / "data.mdb", self.folder / "data.mdb")
        files.sync_folder(self.folder)
        files.remove_folder(anew)
        self._env = open_lmdb(self.folder, map_size=MAP_BYTES)
        self.whole = True

    def close(self) -> None:
        self.whole = False
        if self._env is not None:
            self._env.close()
            self._env = None


def read_records(folder: Path) -> tuple[list[kv_pb2.Record], str, bool]:
    """A folder's intact records, the damage ("" = none), and whether values lack checksums; no change.

    Raises:
        OSError: the folder cannot be read.
    """
    if not (folder / "data.mdb").exists():
        return [], "", False
    damage = ""
    try:
        values = list(read_database(folder))
    except DamagedDatabaseError as error:
        values, damage = list(salvage_database(folder)), str(error)
    plain = bool(values) and all(key != _VERSION_KEY for key, _ in values)
    found = [_record_of(key, value, plain=plain) for key, value in values if key != _VERSION_KEY]
    if None in found and not damage:
        damage = f"{found.count(None)} damaged values"
    newest: dict[RecordPlace, kv_pb2.Record] = {}
    for record in filter(None, found):
        before = newest.setdefault(record_place(record), record)
        if record.version > before.version:
            newest[record_place(record)] = record
    return list(newest.values()), damage, plain


def _commit(env: lmdb.Environment, records: Iterable[kv_pb2.Record], over: Iterable[kv_pb2.Record]) -> None:
    with env.begin(write=True) as txn:
        txn.put(_VERSION_KEY, _VERSION)
        for record in over:
            txn.delete(_key(record))
        for record in records:
            content = record.SerializeToString()
            txn.put(_key(record), xxhash.xxh3_64_digest(_key(record) + content) + content)


def _record_of(key: bytes, value: bytes, *, plain: bool) -> kv_pb2.Record | None:
    """The record that was stored under a key; None if the value is damaged. `plain` values may have no checksum."""
    content = value[_SUM_BYTES:]
    if xxhash.xxh3_64_digest(key + content) != value[:_SUM_BYTES]:
        content = value if plain else b""
    try:
        record = kv_pb2.Record.FromString(content)
        if record.kind == DELETION and record.value:
            deletion_from_record(record)
    except (DecodeError, MoonpoolError):
        return None
    return record if _key(record) == key else None


class RecordStore:
    """One store's records. Blocking to open; without `folders` in memory only.

    `deletions`: every deletion that records or conductors have named, carried out here or not.

    Raises:
        ConfigError: none of the folders can be read; names `data_dir`.
    """

    def __init__(
        self,
        folders: Sequence[Path] = (),
        clock: Callable[[], float] = world.unix_time,
        keyring: Keyring | None = None,
    ) -> None:
        self._keyring = keyring
        self.replicated = ReplicatedRecords()
        self.deletions = DeletionIndex()
        self._applied = ReplicatedRecords()
        self._clock, self._turn = clock, asyncio.Lock()  # of what was taken, in order
        self._thread = world.thread_pool(1, "kvstore-records")
        self._folders: dict[int, RecordFolder] = {}  # by number
        found = [self._load(number, folder, last=number == len(folders) - 1) for number, folder in enumerate(folders)]
        for records in found:
            self._applied.merge(record for record in records if record.kind == _APPLIED)
            newer = self.replicated.merge(record for record in records if record.kind != _APPLIED)
            if len(found) > 1:
                self._commit(newer, ())
        done = [
            {record.id: record.expires_at - KEEP_S for record in records if record.kind == _APPLIED}
            for records in found
        ]
        # Deletions that some folders do not know as carried out, and when others did.
        self.incomplete = {
            name: at for name, at in ChainMap(*done).items() if not all(name in applied for applied in done)
        }

    def _load(self, number: int, folder: Path, *, last: bool) -> list[kv_pb2.Record]:
        try:
            self._folders[number] = RecordFolder(folder, self._keyring)
            records = self._folders[number].load()
            self._note(records)
            return records
        except (OSError, lmdb.Error) as error:
            self.leave_out(number)
            if last and not self._folders:
                raise ConfigError("data_dir", f"{folder} cannot be read: {error}") from error
            log.error("no more records are written to a data folder", path=str(folder), error=str(error))
            return []

    def leave_out(self, number: int) -> None:
        """Stop writing to a folder, so that the folder does not record later deletions as carried out."""
        self._folders.pop(number, None)

    async def take(self, records: Sequence[kv_pb2.Record]) -> None:
        """Keep those that are newer than what is here; they are durable on return.

        All become known and durable, also if the call is cancelled.

        Raises:
            InvalidRequest: a record is wrong; none was taken.
            Overloaded: all records together are too large; none was taken.
        """
        for record in (record for record in records if record.kind == DELETION and record.value):
            deletion_from_record(record)  # raises before any is taken
            await asyncio.sleep(0)
        await asyncio.shield(self._keep(self.replicated.merge(records)))

    async def _keep(self, newer: Sequence[kv_pb2.Record]) -> None:
        async with self._turn:
            for record in [record for record in newer if record.kind == DELETION]:
                if not record.value or self.replicated.get(DELETION, record.tenant, record.id) is record:
                    self._note([record])  # the record may have expired meanwhile
                await asyncio.sleep(0)
            await self._write(newer)

    def _note(self, records: Iterable[kv_pb2.Record]) -> None:
        for record in (record for record in records if record.kind == DELETION):
            if record.value:
                self.deletions.add(record.id, deletion_from_record(record))
            else:  # the record names nothing any more
                self.deletions.remove(record.id)

    def counts(self, deletion: str) -> tuple[int, int] | None:
        """Blocks and bytes that a deletion deleted; None if not carried out."""
        mark = self._applied.get(_APPLIED, "", deletion)
        if mark is None or deletion in self.incomplete:
            return None
        return _COUNTS.unpack(mark.value) if len(mark.value) == _COUNTS.size else (0, 0)  # older marks have none

    async def applied(self, deletions: Mapping[str, tuple[int, int]]) -> None:
        """Records that deletions were carried out, with blocks and bytes deleted. Known counts stay as they are."""
        over = self._clock() + KEEP_S
        marks = [
            kv_pb2.Record(kind=_APPLIED, id=name, value=_COUNTS.pack(*counts), version=1, expires_at=over)
            for name, counts in deletions.items()
        ]
        self._applied.merge(marks)
        self.incomplete = {name: at for name, at in self.incomplete.items() if name not in deletions}
        await self._write([mark for name in deletions if (mark := self._applied.get(_APPLIED, "", name)) is not None])

    async def _write(self, records: Sequence[kv_pb2.Record]) -> None:
        over = [record for records in (self.replicated, self._applied) for record in records.prune(self._clock())]
        for record in over:  # a deletion's own time counts, or, without a record, the mark's
            if record.kind in (DELETION, _APPLIED) and self.replicated.get(DELETION, "", record.id) is None:
                self.deletions.remove(record.id)
        run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        if self._folders and (records or over or not self._whole):
            await run(self._commit, records, over)
        if not self._whole:  # a device failed now or before, or a database is damaged
            await run(self._mend, [*_all(self.replicated), *_all(self._applied)])

    @property
    def _whole(self) -> bool:
        return all(folder.whole for folder in self._folders.values())

    def _commit(self, records: Iterable[kv_pb2.Record], over: Iterable[kv_pb2.Record]) -> None:
        for folder in self._folders.values():
            with contextlib.suppress(OSError, lmdb.Error):
                if folder.whole:
                    folder.commit(records, over)

    def _mend(self, records: Sequence[kv_pb2.Record]) -> None:
        """Write databases anew that could not be written to.

        Raises:
            Unavailable: the only one cannot be written; with the next records the store tries again.
        """
        for number, folder in list(self._folders.items()):
            try:
                if not folder.whole:
                    folder.write_anew(records)
            except (OSError, lmdb.Error) as error:
                if len(self._folders) == 1:
                    raise Unavailable(f"records cannot be written to {folder.folder}: {error}") from error
                log.error("no more records are written to a data folder", path=str(folder.folder), error=str(error))
                self.leave_out(number)

    def close(self) -> None:
        self._thread.shutdown()
        for folder in self._folders.values():
            folder.close()


def _all(records: ReplicatedRecords) -> Iterator[kv_pb2.Record]:
    number, more = 0, True
    while more:
        some, number, more = records.after(number)
        yield from some


def _key(record: kv_pb2.Record) -> bytes:
    """LMDB's keys are short."""
    parts = [part.encode() for part in record_place(record)]
    return blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=32).digest()


def _identity(record: kv_pb2.Record) -> bytes:
    """By what an encrypted value is bound to a version of the record."""
    return _key(record) + _VERSION_FORM.pack(record.version)
