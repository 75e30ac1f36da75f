"""What a store keeps for conductors besides blocks: records, and which deletions it has carried out.

Kept in memory, and in a small LMDB database in each data folder; every write there is synced. What is deleted there
leaves the database; its bytes may stay in free pages of the file until these are used again.
"""

import asyncio
import struct
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import lmdb
from google.protobuf.message import DecodeError

from moonpool import world
from moonpool.cluster.proto_conversion import DELETION, deletion_from_record
from moonpool.cluster.records import ReplicatedRecords, record_place
from moonpool.errors import ConfigError, InvalidRequest
from moonpool.kv.delete_kv import DeletionIndex
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2
from services.kvstore.ssd.files import FileLayer, open_lmdb

log = get_logger(__name__)
MAP_BYTES = 1 << 30
KEEP_S = 40 * 86400.0  # it is known that a deletion was carried out; conductors repeat theirs for a shorter time
_APPLIED = "applied"
_COUNTS = struct.Struct("<QQ")


class RecordStore:
    """The records of one store. Blocking to open; without `folders` in memory only.

    `deletions`: every deletion that records or conductors have named, carried out here or not.

    Raises:
        ConfigError: none of the folders can be read; names `data_dir`.
    """

    def __init__(self, folders: Sequence[Path] = (), clock: Callable[[], float] = world.unix_time) -> None:
        self.replicated = ReplicatedRecords()
        self.deletions = DeletionIndex()
        self._applied = ReplicatedRecords()
        self._clock, self._turn = clock, asyncio.Lock()  # of what was taken, in order
        self._thread = world.thread_pool(1, "kvstore-records")
        self._envs: dict[int, lmdb.Environment] = {}  # by number of the folder
        found = [self._load(number, folder, last=number == len(folders) - 1) for number, folder in enumerate(folders)]
        for records in found:
            self._applied.merge(record for record in records if record.kind == _APPLIED)
            newer = self.replicated.merge(record for record in records if record.kind != _APPLIED)
            if len(found) > 1:
                self._commit(newer, ())
        done = [{one.id: one.expires_at - KEEP_S for one in records if one.kind == _APPLIED} for records in found]
        # Deletions that some folders do not know as carried out, and when others did.
        self.incomplete = {name: at for name, at in ChainMap(*done).items() if not all(name in each for each in done)}

    def _load(self, number: int, folder: Path, *, last: bool) -> list[kv_pb2.Record]:
        try:
            FileLayer().make_folder(folder)
            self._envs[number] = open_lmdb(folder, map_size=MAP_BYTES)
            with self._envs[number].begin() as txn:
                records = [kv_pb2.Record.FromString(bytes(value)) for _, value in txn.cursor()]
            self._note(records)
            return records
        except (OSError, lmdb.Error, DecodeError, InvalidRequest) as error:
            self.leave_out(number)
            if last and not self._envs:
                raise ConfigError("data_dir", f"{folder} cannot be read: {error}") from error
            log.error("no more records are written to a data folder", path=str(folder), error=str(error))
            return []

    def leave_out(self, number: int) -> None:
        """Stops writing to a folder, so that the folder does not record later deletions as carried out."""
        self._envs.pop(number, None)

    async def take(self, records: Sequence[kv_pb2.Record]) -> None:
        """Keeps those that are newer than what is here; they are durable on return.

        All become known and durable, also if the call is cancelled.

        Raises:
            InvalidRequest: a record is wrong; none was taken.
            Overloaded: all records together are too large; none was taken.
        """
        for record in (one for one in records if one.kind == DELETION and one.value):
            deletion_from_record(record)  # raises before any is taken
            await asyncio.sleep(0)
        await asyncio.shield(self._keep(self.replicated.merge(records)))

    async def _keep(self, newer: Sequence[kv_pb2.Record]) -> None:
        async with self._turn:
            for record in [one for one in newer if one.kind == DELETION]:
                if not record.value or self.replicated.get(DELETION, record.tenant, record.id) is record:
                    self._note([record])  # its time may be over meanwhile
                await asyncio.sleep(0)
            await self._write(newer)

    def _note(self, records: Iterable[kv_pb2.Record]) -> None:
        for record in (one for one in records if one.kind == DELETION):
            if record.value:
                self.deletions.add(record.id, deletion_from_record(record))
            else:  # it names nothing any more
                self.deletions.remove(record.id)

    def counts(self, deletion: str) -> tuple[int, int] | None:
        """Blocks and bytes that a deletion deleted; None when it was not carried out."""
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
        for record in over:  # of a deletion its own time counts, or, where there is no record of it, its mark's
            if record.kind in (DELETION, _APPLIED) and self.replicated.get(DELETION, "", record.id) is None:
                self.deletions.remove(record.id)
        if self._envs and (records or over):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, records, over)

    def _commit(self, records: Iterable[kv_pb2.Record], over: Iterable[kv_pb2.Record]) -> None:
        for number, env in list(self._envs.items()):
            try:
                with env.begin(write=True) as txn:
                    for record in over:
                        txn.delete(_key(record))
                    for record in records:
                        txn.put(_key(record), record.SerializeToString())
            except lmdb.Error as error:
                if len(self._envs) == 1:
                    raise
                log.error("no more records are written to a data folder", path=env.path(), error=str(error))
                self.leave_out(number)

    def close(self) -> None:
        self._thread.shutdown()
        for env in self._envs.values():
            env.close()


def _key(record: kv_pb2.Record) -> bytes:
    """LMDB's keys are short."""
    parts = [part.encode() for part in record_place(record)]
    return blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=32).digest()
