"""Stored responses and conversations: objects that a later request may refer to by id.

A record is a response or a conversation, and belongs to a tenant. The items are the messages, calls and results that a
request had or got. SQLite holds both, in memory or in a file that outlives the gateway.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moonpool.base.errors import ConfigError, InvalidRequest, NotFound, Unavailable

Item = dict[str, Any]
"""An item in OpenAI's form, with an id."""
_VERSION = 2
_TABLES = (
    """
    CREATE TABLE records (
        tenant TEXT, id TEXT, previous TEXT, body TEXT, bytes INTEGER, used_at REAL, PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX records_by_use ON records (used_at)",
    """
    CREATE TABLE items (
        tenant TEXT, owner TEXT, number INTEGER, id TEXT, is_output INTEGER, body TEXT,
        PRIMARY KEY (tenant, owner, number)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX items_by_id ON items (tenant, id)",
)
_TOTALS = (
    "CREATE INDEX records_by_tenant_and_use ON records (tenant, used_at, id)",
    "CREATE TABLE totals (tenant TEXT PRIMARY KEY, bytes INTEGER) WITHOUT ROWID",
    "INSERT INTO totals SELECT tenant, SUM(bytes) FROM records GROUP BY tenant",
    """
    CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
        INSERT INTO totals VALUES (NEW.tenant, NEW.bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
    END
    """,
    """
    CREATE TRIGGER record_resized AFTER UPDATE OF bytes ON records BEGIN
        UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes WHERE tenant = NEW.tenant;
    END
    """,
    """
    CREATE TRIGGER record_removed AFTER DELETE ON records BEGIN
        UPDATE totals SET bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
        DELETE FROM totals WHERE tenant = OLD.tenant AND bytes = 0;
    END
    """,
    f"PRAGMA user_version = {_VERSION}",
)
"""Since version 2: what each tenant has, so that no call looks at all records."""
_ROW_BYTES = 256
"""Charged for each record and item beside the text."""
_MAX_TURNS = 4096
"""Responses that one response may continue, one after the other."""
_MAX_ITEMS = 1 << 13
"""Items that are read at once, as many as a body has."""
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Errors of a disk that takes nothing more; what is there can still be read."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store keeps.

    Attributes:
        max_bytes: size of all records and items; 0 = no storing.
        ttl_s: seconds after the last use for which a record is kept.
        max_read_bytes: size of the items that are read at once.
    """

    max_bytes: int
    ttl_s: float
    max_read_bytes: int


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A response or a conversation, without items.

    Attributes:
        id: the id that clients know.
        body: the object in OpenAI's form.
        previous: id of the response that this response continues; "" for none.
    """

    id: str
    body: Mapping[str, Any]
    previous: str = ""


class ResponseStore:
    """Responses and conversations of all tenants, within limits.

    If the byte limit is reached, the tenant with most bytes loses the least recently used record. Methods raise
    `Unavailable` if the database fails.
    """

    def __init__(self, limits: StoreLimits, file: Path | None, threads: Executor, clock: Callable[[], float]) -> None:
        """Open the store.

        Args:
            limits: what is kept.
            file: database that outlives the gateway; None = in memory.
            threads: one thread, on which the database works.
            clock: returns seconds since 1970.

        Raises:
            ConfigError: the file is no store of this version; names `response_store_file`.
        """
        self._limits = limits
        self._threads = threads
        self._clock = clock
        self._notes_use = True
        self.num_bytes = 0
        """Size of all records and items, after the last change."""
        try:
            self._db = _opened(file)
        except (sqlite3.Error, OSError, UnicodeError) as error:  # a damaged file's errors may quote the file's bytes
            raise ConfigError("response_store_file", f"{file}: {error}") from None

    @property
    def enabled(self) -> bool:
        """Whether anything is stored."""
        return self._limits.max_bytes > 0

    async def put(self, tenant: str, record: StoredRecord, given: Sequence[Item], output: Sequence[Item] = ()) -> None:
        """Store a record, replacing a record with the same id, with the request's and the answer's items.

        Raises:
            Unavailable: the record is larger than the store.
        """
        await self._change(lambda: self._put(tenant, record, given, output))

    async def append(self, tenant: str, owner: str, items: Sequence[Item]) -> None:
        """Add items to a conversation.

        Raises:
            NotFound: the conversation is not stored.
        """
        await self._change(lambda: self._append(tenant, owner, items))

    async def replace_body(self, tenant: str, record: StoredRecord) -> None:
        """Change a record's object; the items stay.

        Raises:
            NotFound: the record is not stored.
        """
        await self._change(lambda: self._replace_body(tenant, record))

    async def delete(self, tenant: str, record_id: str) -> None:
        """Remove a record and the record's items.

        Raises:
            NotFound: the record is not stored.
        """
        await self._change(lambda: self._delete(tenant, record_id))

    async def delete_item(self, tenant: str, owner: str, item_id: str) -> None:
        """Remove one of a record's items.

        Raises:
            NotFound: the record has no such item.
        """
        await self._change(lambda: self._delete_item(tenant, owner, item_id))

    async def get(self, tenant: str, record_id: str) -> StoredRecord:
        """A record, which counts as used now.

        Raises:
            NotFound: the record is not stored.
        """
        return await self._read(lambda: self._get(tenant, record_id))

    async def items(self, tenant: str, owner: str, *, output: bool = False) -> list[Item]:
        """A record's items in order: the request's, or the answer's.

        Raises:
            NotFound: the record is not stored.
            InvalidRequest: the items are too many, or too large, to be read at once.
        """
        return await self._read(lambda: self._items(tenant, owner, output, _Reading(self._limits.max_read_bytes)))

    async def page(
        self, tenant: str, owner: str, limit: int, after: str, *, descending: bool
    ) -> tuple[list[Item], bool]:
        """Some of a record's items of the request, and whether more follow.

        Args:
            tenant: the owner's.
            owner: id of the record.
            limit: items at most. A page has fewer if they are too large to be read at once.
            after: id of the item before the page; "" = from the first on.
            descending: the last item comes first.

        Raises:
            NotFound: the record is not stored.
            InvalidRequest: there is no item `after`.
        """
        return await self._read(lambda: self._page(tenant, owner, limit, after, descending))

    async def history(self, tenant: str, response_id: str) -> list[Item]:
        """Items from a response and from all responses before in the chain, oldest first.

        Raises:
            NotFound: a response is not stored; names the response.
            InvalidRequest: the items are too many, or too large, to be read at once.
        """
        return await self._read(lambda: self._history(tenant, response_id))

    async def find_items(self, tenant: str, item_ids: Sequence[str], owner: str = "") -> list[Item | None]:
        """Items, by their ids, None for those that are not stored. An id may come several times.

        Args:
            tenant: the items'.
            item_ids: the ids.
            owner: the record that has them; "" = any.

        Raises:
            InvalidRequest: the items are too many, or too large, to be read at once.
        """
        return await self._read(lambda: self._find_items(tenant, item_ids, owner))

    def close(self) -> None:
        self._db.close()

    async def _change(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transaction, work)

    async def _read(self, work: Callable[[], T]) -> T:
        """As `_change`, but a disk without room, to note the use, is no reason to refuse what is there."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._reading, work)

    def _transaction(self, work: Callable[[], T]) -> T:
        try:
            return self._changed(work)
        except sqlite3.Error as error:
            raise Unavailable(f"the store of responses failed: {error}") from None

    def _reading(self, work: Callable[[], T]) -> T:
        try:
            try:
                return self._changed(work)
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF not in _NO_ROOM:
                    raise
            self._notes_use = False
            return work()
        except sqlite3.Error as error:
            raise Unavailable(f"the store of responses failed: {error}") from None
        finally:
            self._notes_use = True

    def _changed(self, work: Callable[[], T]) -> T:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._forget_old()
            result = work()
            self.num_bytes = self._total()
        return result

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _total(self) -> int:
        (total,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM totals").fetchone()
        return int(total)

    def _forget_old(self) -> None:
        before = self._clock() - self._limits.ttl_s
        for tenant, record_id in self._db.execute(
            "SELECT tenant, id FROM records WHERE used_at < ?", (before,)
        ).fetchall():
            self._remove(tenant, record_id)

    def _remove(self, tenant: str, record_id: str) -> None:
        self._db.execute("DELETE FROM records WHERE tenant = ? AND id = ?", (tenant, record_id))
        self._db.execute("DELETE FROM items WHERE tenant = ? AND owner = ?", (tenant, record_id))

    def _make_room(self, needed: int) -> None:
        """Forget records until `needed` bytes fit.

        Raises:
            Unavailable: they never fit.
        """
        if needed > self._limits.max_bytes:
            limit = self._limits.max_bytes
            raise Unavailable(f"{needed} bytes cannot be stored, response_store_bytes is {limit}; send store: false")
        while self._total() + needed > self._limits.max_bytes:
            (tenant,) = self._db.execute("SELECT tenant FROM totals ORDER BY bytes DESC LIMIT 1").fetchone()
            oldest = self._db.execute("SELECT id FROM records WHERE tenant = ? ORDER BY used_at, id LIMIT 1", (tenant,))
            self._remove(tenant, oldest.fetchone()[0])

    def _put(self, tenant: str, record: StoredRecord, given: Sequence[Item], output: Sequence[Item]) -> None:
        body, texts = _json(record.body), [(False, entry) for entry in given] + [(True, entry) for entry in output]
        size = _size(body) + sum(_size(_json(item)) for _, item in texts)
        self._remove(tenant, record.id)
        self._make_room(size)
        self._db.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)",
            (tenant, record.id, record.previous, body, size, self._clock()),
        )
        self._insert(tenant, record.id, 0, texts)

    def _insert(self, tenant: str, owner: str, first: int, items: Sequence[tuple[bool, Item]]) -> None:
        rows = [
            (tenant, owner, first + number, item["id"], is_output, _json(item))
            for number, (is_output, item) in enumerate(items)
        ]
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _append(self, tenant: str, owner: str, items: Sequence[Item]) -> None:
        self._get(tenant, owner)
        size = sum(_size(_json(item)) for item in items)
        self._make_room(size)
        self._get(tenant, owner)  # making room for an item may have removed the conversation
        last = self._db.execute(
            "SELECT COALESCE(MAX(number), -1) FROM items WHERE tenant = ? AND owner = ?", (tenant, owner)
        )
        self._insert(tenant, owner, last.fetchone()[0] + 1, [(False, item) for item in items])
        self._resize(tenant, owner, size)

    def _resize(self, tenant: str, record_id: str, more: int) -> None:
        self._db.execute("UPDATE records SET bytes = bytes + ? WHERE tenant = ? AND id = ?", (more, tenant, record_id))

    def _replace_body(self, tenant: str, record: StoredRecord) -> None:
        before = self._get(tenant, record.id)
        body = _json(record.body)
        self._db.execute("UPDATE records SET body = ? WHERE tenant = ? AND id = ?", (body, tenant, record.id))
        self._resize(tenant, record.id, _size(body) - _size(_json(before.body)))

    def _delete(self, tenant: str, record_id: str) -> None:
        self._get(tenant, record_id)
        self._remove(tenant, record_id)

    def _delete_item(self, tenant: str, owner: str, item_id: str) -> None:
        self._get(tenant, owner)
        found = self._db.execute(
            "DELETE FROM items WHERE tenant = ? AND owner = ? AND id = ? RETURNING body", (tenant, owner, item_id)
        ).fetchall()
        if not found:
            raise NotFound(f"{owner!r} has no item {item_id!r}")
        self._resize(tenant, owner, -sum(_size(body) for (body,) in found))

    def _get(self, tenant: str, record_id: str) -> StoredRecord:
        now = self._clock()
        if self._notes_use:
            command = "UPDATE records SET used_at = ? WHERE tenant = ? AND id = ? RETURNING body, previous"
            found = self._db.execute(command, (now, tenant, record_id)).fetchall()
        else:
            command = "SELECT body, previous FROM records WHERE tenant = ? AND id = ? AND used_at >= ?"
            found = self._db.execute(command, (tenant, record_id, now - self._limits.ttl_s)).fetchall()
        if not found:
            raise NotFound(self.missing(record_id))
        return StoredRecord(record_id, json.loads(found[0][0]), found[0][1])

    def missing(self, record_id: str) -> str:
        """Say why a record or an item may not be stored."""
        if not self.enabled:
            return f"{record_id!r} is not stored: this gateway stores nothing (response_store_bytes is 0)"
        return (
            f"{record_id!r} is not stored: it was never stored here, was deleted, was not used for "
            f"{self._limits.ttl_s:g} s (response_ttl_s), or made room for newer ones (response_store_bytes)"
        )

    def _items(self, tenant: str, owner: str, output: bool, reading: _Reading) -> list[Item]:
        self._get(tenant, owner)
        rows = self._db.execute(
            "SELECT body FROM items WHERE tenant = ? AND owner = ? AND is_output = ? ORDER BY number",
            (tenant, owner, output),
        )
        return [reading.item(body) for (body,) in rows]

    def _page(self, tenant: str, owner: str, limit: int, after: str, descending: bool) -> tuple[list[Item], bool]:
        self._get(tenant, owner)
        sign, order, first = ("<", "DESC", sys.maxsize) if descending else (">", "ASC", -1)
        if after:
            found = self._db.execute(
                "SELECT number FROM items WHERE tenant = ? AND owner = ? AND id = ? AND NOT is_output",
                (tenant, owner, after),
            ).fetchone()
            if found is None:
                raise InvalidRequest("after", "is no item of the list")
            (first,) = found
        rows = self._db.execute(
            f"SELECT body FROM items WHERE tenant = ? AND owner = ? AND NOT is_output AND number {sign} ? "  # noqa: S608
            f"ORDER BY number {order} LIMIT ?",
            (tenant, owner, first, limit + 1),
        )
        page, left = list[Item](), self._limits.max_read_bytes
        for (body,) in rows:
            left -= _size(body)
            if len(page) == limit or (page and left < 0):
                return page, True
            page.append(json.loads(body))
        return page, False

    def _history(self, tenant: str, response_id: str) -> list[Item]:
        turns, reading = list[list[Item]](), _Reading(self._limits.max_read_bytes)
        while response_id and len(turns) < _MAX_TURNS:
            record = self._get(tenant, response_id)
            given, output = [self._items(tenant, response_id, output, reading) for output in (False, True)]
            turns.append(given + output)
            response_id = record.previous
        return [item for turn in reversed(turns) for item in turn]

    def _find_items(self, tenant: str, item_ids: Sequence[str], owner: str) -> list[Item | None]:
        reading, items = _Reading(self._limits.max_read_bytes), list[Item | None]()
        for item_id in item_ids:
            found = self._db.execute(
                "SELECT body FROM items WHERE tenant = ? AND id = ? AND ? IN (owner, '') LIMIT 1",
                (tenant, item_id, owner),
            ).fetchone()
            items.append(None if found is None else reading.item(found[0]))
        return items


class _Reading:
    """Counts what is read at once: parsing takes memory, and an item may be asked for many times."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items = 0

    def item(self, body: str) -> Item:
        """The item of a text.

        Raises:
            InvalidRequest: more was read than is allowed.
        """
        self._items += 1
        self._num_bytes += len(body)
        if self._items > _MAX_ITEMS or self._num_bytes > self._max_bytes:
            raise InvalidRequest(
                "", f"a request refers to at most {_MAX_ITEMS} stored items of {self._max_bytes} characters together"
            )
        item: Item = json.loads(body)
        return item


def _opened(file: Path | None) -> sqlite3.Connection:
    """The database, with all tables. Others may not read the file, which has what users said."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    database = sqlite3.connect(file or ":memory:", timeout=30.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with database:
            database.execute("BEGIN IMMEDIATE")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if not 0 <= version <= _VERSION:
                raise sqlite3.DatabaseError(f"has version {version}, not {_VERSION}")
            for statement in (*(_TABLES if not version else ()), *(_TOTALS if version < _VERSION else ())):
                database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False)


def _size(text: str) -> int:
    """Bytes that a record or an item is charged for."""
    return len(text.encode(errors="replace")) + _ROW_BYTES
