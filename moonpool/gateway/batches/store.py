"""Files and batches of all tenants, in a folder that outlives the gateway.

A file's bytes are a file of the folder; SQLite has what is known of files, batches and their lines. A line's answer is
committed before the next look at the line, so a gateway that was killed repeats only lines that were under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from moonpool.base import world
from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, NotFound, Unavailable

SETTING = "batch_dir"
_VERSION = 2
_TABLES = (
    """
    CREATE TABLE files (
        tenant TEXT, id TEXT, filename TEXT, purpose TEXT, bytes INTEGER, created_at INTEGER, PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE batches (
        tenant TEXT, id TEXT, created_at INTEGER, status TEXT, body TEXT, PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX batches_by_status ON batches (status, created_at)",
    """
    CREATE TABLE lines (
        batch TEXT, place INTEGER, number INTEGER, custom_id TEXT, begin INTEGER, length INTEGER, is_error INTEGER,
        answer TEXT, PRIMARY KEY (batch, place)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX lines_to_do ON lines (batch, place) WHERE answer IS NULL",
)
_ENDS = (
    "ALTER TABLE files ADD COLUMN expires_at INTEGER",
    "CREATE INDEX files_by_end ON files (expires_at) WHERE expires_at IS NOT NULL",
    f"PRAGMA user_version = {_VERSION}",
)
"""What version 2 has beside version 1."""
_COLUMNS = "id, filename, purpose, bytes, created_at, expires_at"
"""Of a `StoredFile`, in order."""
_NEVER = 1 << 62
"""Later than any batch."""
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNDER_WAY: Sequence[Status] = ("validating", "in_progress", "finalizing", "cancelling")
MAX_FILES = 10_000
"""Files of a tenant, as many as OpenAI lists at once."""
MAX_UNDER_WAY = 64
"""Batches of a tenant that are not over: each keeps a row for each line."""
MAX_KEPT = 10_000
"""Batches of a tenant; of those that are over the oldest are forgotten, and their files stay."""
T = TypeVar("T")


class FullError(MoonpoolError):
    """A tenant has as much as a tenant may have."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file.

    Attributes:
        id: the id that clients know.
        purpose: "batch", "batch_output" or what the client said.
        created_at: seconds since 1970.
        expires_at: the file is deleted then, unless a batch under way reads the file; None = never.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The file in OpenAI's form."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": self.expires_at,
        }


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a batch, and where it stands in the input file.

    Attributes:
        place: the order in which lines run.
        number: the order in the input file, from 0.
        begin, length: bytes of the input file.
    """

    place: int
    number: int
    custom_id: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch: the tenant, the status, and the object in OpenAI's form."""

    tenant: str
    status: Status
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.body["id"])


class BatchStore:
    """Files and batches of all tenants. Methods raise `Unavailable` if the disk or the database fails.

    Args:
        folder: made if need be; only this user reads it.
        max_bytes: most bytes of files per tenant.
        threads: one thread, on which the database works.
        clock: returns seconds since 1970.

    Raises:
        ConfigError: the folder cannot be used; names `batch_dir`.
    """

    def __init__(self, folder: Path, max_bytes: int, threads: Executor, clock: Callable[[], float]) -> None:
        self.max_bytes = max_bytes
        self._files = folder / "files"
        self._threads = threads
        self._clock = clock
        self._coming: Counter[str] = Counter()
        """Bytes of files under way, by tenant."""
        try:
            self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = _opened(folder / "batches.db")
        except (sqlite3.Error, OSError, UnicodeError) as error:  # a damaged file's errors may quote the file's bytes
            raise ConfigError(SETTING, f"{folder}: {error}") from None

    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    def close(self) -> None:
        """Close the database; on its thread, behind all other work."""
        self._db.close()

    def path(self, file_id: str) -> Path:
        """Where a file's bytes lie; the id is one that this store gave."""
        return self._files / file_id

    # --- files -------------------------------------------------------------------------------------------------------

    def new_file_id(self) -> str:
        """An id for a file whose bytes are written to `path` before `add_file`."""
        return f"file-{world.random_hex(16)}"

    async def room(self, tenant: str) -> int:
        """Bytes that a tenant's files may still take, beside those under way; 0 if there may be no further file."""

        def ask() -> int:
            self._drop_expired()
            return self._room(tenant)

        return await self._run(ask)

    def _room(self, tenant: str) -> int:
        held, files = self._db.execute(
            "SELECT TOTAL(bytes), COUNT(*) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        return max(0, self.max_bytes - int(held)) if files < MAX_FILES else 0

    @contextmanager
    def receiving(self, tenant: str, room: int) -> Iterator[Callable[[int], None]]:
        """A file comes while the body of the `with` runs. Yields a function that counts bytes of the file.

        That function raises `FullError` if all files of the tenant that are under way together have more than `room`.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            taken += num_bytes
            self._coming[tenant] += num_bytes
            if self._coming[tenant] > room:
                raise FullError("your files take as much as batch_bytes allows")

        try:
            yield take
        finally:
            self._coming[tenant] -= taken
            if not self._coming[tenant]:
                del self._coming[tenant]

    async def add_file(self, tenant: str, file: StoredFile) -> None:
        """Note a file whose bytes are there; they survive a loss of power. The bytes go if that fails."""

        def add() -> None:
            try:
                note()
            except BaseException:
                self.path(file.id).unlink(missing_ok=True)
                raise

        def note() -> None:
            with self.path(file.id).open("rb") as opened:
                os.fsync(opened.fileno())
            self._db.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, file.id, file.filename, file.purpose, file.num_bytes, file.created_at, file.expires_at),
            )

        await self._run(add)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """A tenant's file.

        Raises:
            NotFound: there is none of this id.
        """

        def ask() -> Any:
            self._drop_expired()
            return self._db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND id = ?",  # noqa: S608
                (tenant, file_id),
            ).fetchone()

        row = await self._run(ask)
        if row is None:
            raise NotFound(f"no file {file_id!r}")
        return StoredFile(*row)

    async def files(self, tenant: str, purpose: str | None) -> list[StoredFile]:
        """A tenant's files, the newest first; with this purpose, or all."""

        def ask() -> Any:
            self._drop_expired()
            return self._db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND ? IN (purpose, '') "  # noqa: S608
                "ORDER BY created_at DESC, id",
                (tenant, purpose or ""),
            ).fetchall()

        rows = await self._run(ask)
        return [StoredFile(*row) for row in rows]

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: there is none of this id.
            InvalidRequest: a batch that is under way reads the file.
        """

        def delete() -> None:
            if (batch := self._readers().get(file_id)) is not None and batch.tenant == tenant:
                raise InvalidRequest("file_id", f"batch {batch.id} reads this file; cancel the batch first")
            found = self._db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id)).rowcount
            if not found:
                raise NotFound(f"no file {file_id!r}")
            self.path(file_id).unlink(missing_ok=True)

        await self._run(delete)

    def _readers(self) -> dict[str, StoredBatch]:
        """Batches under way by their input file."""
        return {batch.body["input_file_id"]: batch for batch in self._of_status(UNDER_WAY)}

    def _drop_expired(self) -> None:
        """Delete the files of all tenants whose time is over, but for those that a batch under way reads."""
        rows = self._db.execute("SELECT tenant, id FROM files WHERE expires_at <= ?", (self.now(),)).fetchall()
        readers = self._readers() if rows else {}
        for tenant, file_id in rows:
            if file_id not in readers:
                self._db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
                self.path(file_id).unlink(missing_ok=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    async def add_batch(self, batch: StoredBatch) -> None:
        """Keep a new batch.

        Raises:
            FullError: the tenant has too many under way, or files that leave no room for answers.
        """

        def add() -> None:
            tenant, marks = batch.tenant, ", ".join("?" * len(UNDER_WAY))
            (running,) = self._db.execute(
                f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND status IN ({marks})",  # noqa: S608
                (tenant, *UNDER_WAY),
            ).fetchone()
            if running >= MAX_UNDER_WAY:
                raise FullError(f"{running} of your batches are under way, as many as may be")
            if not self._room(tenant):
                raise FullError("your files take as much as batch_bytes allows, so answers have no room")
            self._db.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
                (tenant, batch.id, batch.body["created_at"], batch.status, json.dumps(batch.body)),
            )
            self._db.execute(
                f"DELETE FROM batches WHERE tenant = ? AND id IN (SELECT id FROM batches WHERE tenant = ? "  # noqa: S608
                f"AND status NOT IN ({marks}) ORDER BY created_at DESC, id DESC LIMIT -1 OFFSET ?)",
                (tenant, tenant, *UNDER_WAY, MAX_KEPT),
            )

        await self._run(add)

    async def batch(self, tenant: str, batch_id: str) -> StoredBatch:
        """A tenant's batch, with the counts of its lines now.

        Raises:
            NotFound: there is none of this id.
        """

        def ask() -> StoredBatch:
            row = self._db.execute(
                "SELECT tenant, status, body FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id)
            ).fetchone()
            if row is None:
                raise NotFound(f"no batch {batch_id!r}")
            return self._counted(_batch(row))

        return await self._run(ask)

    async def batches(self, tenant: str, after: str, limit: int) -> tuple[list[StoredBatch], bool]:
        """A tenant's batches, the newest first, behind the one of id `after`, and whether there are more."""

        def ask() -> tuple[list[StoredBatch], bool]:
            rows = self._db.execute(
                "SELECT tenant, status, body FROM batches WHERE tenant = ? AND (created_at, id) < (COALESCE("
                "(SELECT created_at FROM batches WHERE tenant = ? AND id = ?), ?), ?) "
                "ORDER BY created_at DESC, id DESC LIMIT ?",
                (tenant, tenant, after, _NEVER, after, limit + 1),
            ).fetchall()
            return [self._counted(_batch(row)) for row in rows[:limit]], len(rows) > limit

        return await self._run(ask)

    async def under_way(self) -> list[StoredBatch]:
        """All tenants' batches that are not over, the oldest first."""
        return await self._run(lambda: self._of_status(UNDER_WAY))

    async def change(self, batch: StoredBatch, status: Status, **fields: Any) -> StoredBatch:
        """Give a batch that is under way another status, with the time of the change, and other fields.

        A batch that is over keeps no lines: answers are in its files. Returns the batch as it is then: unchanged if the
        batch was over before.
        """

        def change() -> StoredBatch:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                row = self._db.execute(
                    "SELECT tenant, status, body FROM batches WHERE tenant = ? AND id = ?", (batch.tenant, batch.id)
                ).fetchone()
                now = _batch(row)
                if now.status not in UNDER_WAY:
                    return now
                body = {**batch.body, **fields, "status": status, f"{status}_at": self.now()}
                self._db.execute(
                    "UPDATE batches SET status = ?, body = ? WHERE tenant = ? AND id = ?",
                    (status, json.dumps(body), batch.tenant, batch.id),
                )
                if status not in UNDER_WAY:
                    self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
                return StoredBatch(batch.tenant, status, body)

        return await self._run(change)

    def _of_status(self, statuses: Sequence[Status]) -> list[StoredBatch]:
        marks = ", ".join("?" * len(statuses))
        rows = self._db.execute(
            f"SELECT tenant, status, body FROM batches WHERE status IN ({marks}) ORDER BY created_at, id",  # noqa: S608
            tuple(statuses),
        )
        return [_batch(row) for row in rows.fetchall()]

    def _counted(self, batch: StoredBatch) -> StoredBatch:
        total, done, failed = self._db.execute(
            "SELECT COUNT(*), COUNT(answer), TOTAL(is_error) FROM lines WHERE batch = ?", (batch.id,)
        ).fetchone()
        if total:
            failed = int(failed)
            batch.body["request_counts"] = {"total": total, "completed": done - failed, "failed": failed}
        return batch

    # --- lines -------------------------------------------------------------------------------------------------------

    async def put_lines(self, batch_id: str, lines: Sequence[StoredLine]) -> None:
        """Note a batch's lines; those of an earlier try are replaced."""

        def put() -> None:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                self._db.executemany(
                    "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)",
                    [(batch_id, each.place, each.number, each.custom_id, each.begin, each.length) for each in lines],
                )

        await self._run(put)

    async def lines_to_do(self, batch_id: str) -> list[StoredLine]:
        """A batch's lines without answer, in the order in which they run."""
        rows = await self._run(
            lambda: self._db.execute(
                "SELECT place, number, custom_id, begin, length FROM lines WHERE batch = ? AND answer IS NULL "
                "ORDER BY place",
                (batch_id,),
            ).fetchall()
        )
        return [StoredLine(*row) for row in rows]

    async def read_line(self, file_id: str, line: StoredLine) -> bytes:
        """A line's text."""

        def read() -> bytes:
            with self.path(file_id).open("rb") as file:
                return os.pread(file.fileno(), line.length, line.begin)

        return await self._run(read)

    async def answer(self, batch_id: str, line: StoredLine, text: str, *, is_error: bool) -> None:
        """Keep a line's answer, unless there is one."""
        await self._run(
            lambda: self._db.execute(
                "UPDATE lines SET answer = ?, is_error = ? WHERE batch = ? AND place = ? AND answer IS NULL",
                (text, int(is_error), batch_id, line.place),
            )
        )

    async def write_answers(self, batch: StoredBatch, *, is_error: bool) -> StoredFile | None:
        """Write a batch's answers, or its errors, into a file in the order of the input; None if there are none.

        The file's id follows from the batch's, so that a gateway that was killed before it noted the batch's end writes
        the same file again.
        """
        kind = "errors" if is_error else "output"
        file_id = f"file-{hashlib.sha256(f'{batch.id}/{kind}'.encode()).hexdigest()[:32]}"

        def write() -> int:
            self._db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (batch.tenant, file_id))
            rows = self._db.execute(
                "SELECT answer FROM lines WHERE batch = ? AND is_error = ? ORDER BY number", (batch.id, int(is_error))
            )
            return _write_private(self.path(file_id), (f"{answer}\n".encode() for (answer,) in rows))

        num_bytes = await self._run(write)
        if not num_bytes:
            await self._run(self.path(file_id).unlink)
            return None
        now, kept_s = self.now(), batch.body.get("output_expires_after")
        file = StoredFile(
            file_id, f"{batch.id}_{kind}.jsonl", "batch_output", num_bytes, now, kept_s and now + kept_s
        )  # fmt: skip
        await self.add_file(batch.tenant, file)
        return file

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"the store of batches fails: {error}") from error


def _batch(row: tuple[str, Status, str]) -> StoredBatch:
    tenant, status, body = row
    return StoredBatch(tenant, status, json.loads(body))


def _write_private(path: Path, parts: Iterator[bytes]) -> int:
    """Write a file that only this user reads; return its bytes."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        for part in parts:
            file.write(part)
        return file.tell()


def _opened(file: Path) -> sqlite3.Connection:
    """The database, with all tables; only this user reads it."""
    file.touch(mode=0o600)
    database = sqlite3.connect(file, timeout=30.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= _VERSION:
            raise sqlite3.DatabaseError(f"has version {version}, not {_VERSION}")
        with database:
            database.execute("BEGIN IMMEDIATE")
            for statement in (*(_TABLES if not version else ()), *(_ENDS if version < _VERSION else ())):
                database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database
