"""The store of responses: limits of bytes and time, tenants, and a file that outlives the store."""

import resource
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from moonpool.gateway.responses.store import ResponseStore, StoredRecord, StoreLimits

TTL_S = 60.0


class Shelf:
    """Opens stores whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.threads = ThreadPoolExecutor(1)
        self.opened: list[ResponseStore] = []

    def store(self, max_bytes: int = 1 << 20, file: Path | None = None, max_read_bytes: int = 1 << 20) -> ResponseStore:
        limits = StoreLimits(max_bytes, TTL_S, max_read_bytes)
        store = ResponseStore(limits, file, self.threads, lambda: self.now)
        self.opened.append(store)
        return store


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    with made.threads:
        yield made
        for store in made.opened:
            store.close()


def message(name: str, text: str = "") -> dict[str, Any]:
    return {"type": "message", "id": name, "role": "user", "content": text}


async def put(store: ResponseStore, name: str, *, tenant: str = "ann", previous: str = "", text: str = "") -> None:
    """A response with an item of the request and one of the answer."""
    given, output = message(f"in_{name}", text), message(f"out_{name}")
    await store.put(tenant, StoredRecord(name, {"id": name}, previous), [given], [output])


async def test_a_chain_of_responses(shelf: Shelf) -> None:
    store = shelf.store()
    for number in range(1, 4):
        await put(store, f"r{number}", previous=f"r{number - 1}" if number > 1 else "")
    names = [item["id"] for item in await store.history("ann", "r3")]
    assert names == ["in_r1", "out_r1", "in_r2", "out_r2", "in_r3", "out_r3"]
    assert await store.find_items("ann", ["out_r2", "none", "out_r2"]) == [message("out_r2"), None, message("out_r2")]
    assert await store.find_items("ann", ["out_r2"], "r3") == [None]
    assert await store.find_items("ann", ["out_r3"], "r3") == [message("out_r3")]
    await store.delete("ann", "r2")
    with pytest.raises(NotFound, match="r2"):
        await store.history("ann", "r3")
    assert [item["id"] for item in await store.items("ann", "r3", output=True)] == ["out_r3"]


async def test_tenants_do_not_see_each_other(shelf: Shelf) -> None:
    store = shelf.store()
    await put(store, "r", tenant="ann")
    for refused in (store.get("bob", "r"), store.items("bob", "r"), store.page("bob", "r", 1, "", descending=True)):
        with pytest.raises(NotFound):
            await refused
    assert await store.find_items("bob", ["in_r"]) == [None]
    with pytest.raises(NotFound):
        await store.delete("bob", "r")
    await put(store, "r", tenant="bob", text="bob's")
    assert (await store.items("ann", "r"))[0]["content"] == ""


async def test_time_is_counted_from_the_last_use(shelf: Shelf) -> None:
    """Whoever continues a conversation keeps all of it."""
    store = shelf.store()
    await put(store, "r1")
    await put(store, "r2", previous="r1")
    await put(store, "idle")
    shelf.now += TTL_S
    await store.history("ann", "r2")
    shelf.now += TTL_S
    assert len(await store.history("ann", "r2")) == 4
    with pytest.raises(NotFound, match=r"idle.*60 s \(response_ttl_s\)"):
        await store.get("ann", "idle")
    assert store.num_bytes > 0
    shelf.now += 2 * TTL_S
    with pytest.raises(NotFound):
        await store.get("ann", "r1")


async def test_room_is_made_by_the_tenant_that_has_most(shelf: Shelf) -> None:
    store = shelf.store(max_bytes=20_000)
    await put(store, "small", tenant="bob")
    for number in range(12):
        shelf.now += 1
        await put(store, f"r{number}", text="x" * 3000)
        assert store.num_bytes <= 20_000
    assert (await store.get("bob", "small")).id == "small"
    kept = []
    for number in range(12):
        try:
            kept.append((await store.get("ann", f"r{number}")).id)
        except NotFound:
            continue
    assert kept == [f"r{number}" for number in range(12 - len(kept), 12)]
    assert 3 <= len(kept) < 12
    with pytest.raises(Unavailable, match="store: false"):
        await put(store, "huge", text="x" * 30_000)
    assert (await store.get("ann", "r11")).id == "r11"


async def test_bytes_are_those_of_what_is_stored(shelf: Shelf) -> None:
    store = shelf.store()
    await store.put("ann", StoredRecord("c", {"id": "c"}), [])
    empty = store.num_bytes
    await store.append("ann", "c", [message("a", "\u00e9" * 50), message("b")])
    assert store.num_bytes > empty + 100
    await store.replace_body("ann", StoredRecord("c", {"id": "c", "metadata": {"k": "v" * 100}}))
    assert (await store.get("ann", "c")).body["metadata"] == {"k": "v" * 100}
    await store.replace_body("ann", StoredRecord("c", {"id": "c"}))
    for name in ("a", "b"):
        await store.delete_item("ann", "c", name)
    assert store.num_bytes == empty
    with pytest.raises(NotFound, match="no item 'a'"):
        await store.delete_item("ann", "c", "a")
    await store.delete("ann", "c")
    assert store.num_bytes == 0
    with pytest.raises(NotFound):
        await store.append("ann", "c", [message("d")])


async def test_a_file_outlives_the_store_and_is_shared(shelf: Shelf, tmp_path: Path) -> None:
    file = tmp_path / "kept" / "responses.db"
    store, other = shelf.store(file=file), shelf.store(file=file)
    await put(store, "r1")
    await put(other, "r2", previous="r1")
    assert len(await store.history("ann", "r2")) == 4
    assert file.stat().st_mode & 0o077 == 0
    assert len(await shelf.store(file=file).history("ann", "r2")) == 4


async def test_what_is_read_at_once_is_bounded(shelf: Shelf) -> None:
    """A chain, a conversation and references to one item many times: each is text that a request would hold."""
    store = shelf.store(max_read_bytes=5000)
    await put(store, "r1", text="x" * 2000)
    await put(store, "r2", previous="r1", text="x" * 2000)
    assert len(await store.history("ann", "r2")) == 4
    await put(store, "r3", previous="r2", text="x" * 2000)
    assert len(await store.find_items("ann", ["in_r1", "in_r1"])) == 2
    for refused in (store.history("ann", "r3"), store.find_items("ann", ["in_r1"] * 3)):
        with pytest.raises(InvalidRequest, match="5000"):
            await refused
    await store.put("ann", StoredRecord("c", {"id": "c"}), [message(f"i{number}", "x" * 2000) for number in range(5)])
    with pytest.raises(InvalidRequest, match="5000"):
        await store.items("ann", "c")


async def test_few_items_are_read_at_once(shelf: Shelf) -> None:
    store = shelf.store(max_bytes=8 << 20, max_read_bytes=8 << 20)
    await put(store, "r1")
    assert len(await store.find_items("ann", ["in_r1"] * 8192)) == 8192
    with pytest.raises(InvalidRequest, match="8192"):
        await store.find_items("ann", ["in_r1"] * 8193)


async def test_pages_of_items(shelf: Shelf) -> None:
    store = shelf.store(max_read_bytes=5000)
    small, large = (
        [message(f"i{number}") for number in range(4)],
        [message(f"l{number}", "x" * 3000) for number in (0, 1)],
    )
    await store.put("ann", StoredRecord("c", {"id": "c"}), [*small, *large], [message("answer")])

    async def page(limit: int, after: str = "", *, descending: bool = False) -> tuple[list[str], bool]:
        items, more = await store.page("ann", "c", limit, after, descending=descending)
        return [item["id"] for item in items], more

    assert await page(2) == (["i0", "i1"], True)
    assert await page(2, "i1") == (["i2", "i3"], True)
    assert await page(9, "i1") == (["i2", "i3", "l0"], True), "what is too large for the page comes with the next one"
    assert await page(9, "l0") == (["l1"], False)
    assert await page(9, descending=True) == (["l1"], True)
    assert await page(2, "i2", descending=True) == (["i1", "i0"], False)
    assert await page(2, "i0", descending=True) == ([], False)
    for unknown in ("answer", "none"):
        with pytest.raises(InvalidRequest, match="no item"):
            await page(1, unknown)


async def test_a_store_of_the_first_version_gets_its_totals(shelf: Shelf, tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    database = sqlite3.connect(file)
    database.execute(
        "CREATE TABLE records (tenant TEXT, id TEXT, previous TEXT, body TEXT, bytes INTEGER, used_at REAL, "
        "PRIMARY KEY (tenant, id)) WITHOUT ROWID"
    )
    database.execute(
        "CREATE TABLE items (tenant TEXT, owner TEXT, number INTEGER, id TEXT, is_output INTEGER, body TEXT, "
        "PRIMARY KEY (tenant, owner, number)) WITHOUT ROWID"
    )
    for tenant, name, nbytes in (("ann", "a", 300), ("ann", "b", 400), ("bob", "c", 500)):
        database.execute("INSERT INTO records VALUES (?, ?, '', '{}', ?, ?)", (tenant, name, nbytes, shelf.now))
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()
    store = shelf.store(file=file)
    await store.get("bob", "c")
    assert store.num_bytes == 1200
    await store.delete("ann", "a")
    assert store.num_bytes == 900
    await store.delete("bob", "c")
    assert store.num_bytes == 400


def test_files_that_are_no_stores(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, whatever its length is" * 100)
    database = sqlite3.connect(tmp_path / "later")
    database.execute("PRAGMA user_version = 99")
    database.close()
    database = sqlite3.connect(tmp_path / "damaged")
    database.execute("CREATE TABLE records (tenant TEXT)")
    database.close()
    whole = (tmp_path / "damaged").read_bytes()
    (tmp_path / "damaged").write_bytes(whole.replace(b"CREATE TABLE", b"CREATE \xe5\xe5BLE"))  # errors quote this
    for name, reason in (
        ("text", "not a database"),
        ("damaged", "damaged: "),
        ("later", "version 99"),
        (".", "unable to open|directory"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            shelf.store(file=tmp_path / name)
        assert caught.value.field == "response_store_file"


async def test_what_is_there_is_read_on_a_full_disk(shelf: Shelf, tmp_path: Path) -> None:
    """A limit of files' sizes stands for the disk: SQLite gets the same kind of error."""
    store = shelf.store(file=tmp_path / "responses.db")
    await put(store, "r1")
    await put(store, "r2", previous="r1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(Unavailable, match="store of responses failed"):
            await put(store, "r3", text="x" * 100_000)
        assert (await store.get("ann", "r1")).body == {"id": "r1"}
        assert len(await store.history("ann", "r2")) == 4
        shelf.now += TTL_S + 1.0
        with pytest.raises(NotFound):
            await store.get("ann", "r1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shelf.now -= TTL_S
    assert (await store.get("ann", "r1")).body == {"id": "r1"}
    await put(store, "r3")
