"""Deletions at a store: carried out once, on disk before the answer, known after a restart; records outlive it too."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from moonpool.base.cluster.proto_conversion import DELETION
from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.base.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import pack_keys
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.kvstore.core.store import DeletedCount
from moonpool.kvstore.deletion import DeletionWorker
from moonpool.kvstore.record_store import KEEP_S, RecordStore
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.slices import hashed
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import BLOCK, RECORD, Driven, block_of, data_of, keys_of, slice_of, writing
from tests.unit.kvstore.helpers import store as driven_store
from tests.unit.kvstore.rig import Rig, answer, opened_get, opened_put, put_open, putting, rig

OURS, THEIRS = keys_of(3, "ours"), keys_of(2, "theirs")


def deletion(name: str, **selection: object) -> kv_pb2.Deletion:
    return kv_pb2.Deletion(id=name, selection=kv_pb2.Selection(**selection))  # type: ignore[arg-type]


def records_of(count: int) -> list[kv_pb2.Record]:
    values = [deletion(str(number), tenants=["ours"]).SerializeToString() for number in range(count)]
    return [kv_pb2.Record(kind=DELETION, id=str(n), value=record, expires_at=1e12) for n, record in enumerate(values)]


async def forget(store: Rig, *deletions: kv_pb2.Deletion, **more: object) -> tuple[int, int]:
    request = kv_pb2.ForgetRequest(deletions=deletions, **more)  # type: ignore[arg-type]
    answer = await store.stub.Forget(request, timeout=60)
    return answer.blocks, answer.bytes


async def test_it_is_on_disk_when_it_is_answered_and_is_done_once(tmp_path: Path) -> None:
    order = deletion("one", tenants=["ours"])
    async with rig(tmp_path) as store:
        await store.put(OURS, "ours")
        await store.put(THEIRS, "theirs")
        await store.durable()
        assert await forget(store, order) == (3, 3 * (BLOCK + RECORD))
        raw = b"".join(path.read_bytes() for path in (tmp_path / "segments").iterdir())
        assert not any(bytes(key) in raw or data_of(key)[:64] in raw for key in OURS)
        assert await store.read(OURS) == []
        await store.put(OURS, "ours", forgotten=["one"])
        assert await forget(store, order) == (3, 3 * (BLOCK + RECORD))  # the same answer, and what came later stays
        assert await store.read(OURS) == [data_of(key) for key in OURS]
        assert await store.read(THEIRS) == [data_of(key) for key in THEIRS]
        await store.at_rest()


async def test_told_twice_at_once_it_is_done_once_and_both_are_answered_alike(tmp_path: Path) -> None:
    order, more = deletion("one", tenants=["ours"]), deletion("two", keys=pack_keys(THEIRS))
    async with rig(tmp_path, records=RecordStore([tmp_path / "records"])) as store:
        await store.put(OURS, "ours")
        await store.put(THEIRS, "theirs")
        await store.durable()
        both = await asyncio.gather(forget(store, order), forget(store, order))
        assert list(both) == [(3, 3 * (BLOCK + RECORD))] * 2
        assert await forget(store, order, more) == (5, 5 * (BLOCK + RECORD))
    async with rig(tmp_path, records=RecordStore([tmp_path / "records"])) as store:
        assert await forget(store, more, order) == (5, 5 * (BLOCK + RECORD))


async def test_many_deletions_and_many_keys_leave_others_their_turns() -> None:
    """A small message can have many of them."""
    driven = Driven()
    driven.put(OURS, "0")
    record, turns = DeletionWorker(driven.operations, RecordStore(), None, timeout_s=1.0), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    orders = [deletion(str(number), tenants=[str(number)]) for number in range(5000)]
    assert await record.forget(orders, {}) == DeletedCount(3, 3 * BLOCK)
    assert (await record.forget(orders, {}), "4999" in record) == (DeletedCount(3, 3 * BLOCK), True)
    assert turns >= 2 + 3 + 3 + 2 + 3  # three portions: between them, after each is carried out, after each is noted
    before = turns
    assert await record.drop(keys_of(9000)) == DeletedCount()
    assert turns - before >= 3
    before, record_store = turns, RecordStore()
    await record_store.take(records_of(20))
    assert (len(record_store.deletions), turns - before >= 40) == (
        20,
        True,
    )  # after each is checked, and after each is known
    beside.cancel()


@pytest.mark.parametrize("turns", [5, 14, 20])
async def test_records_are_durable_when_they_come_again_after_a_call_that_was_cancelled(
    tmp_path: Path, turns: int
) -> None:
    """A conductor that waited for too long brings them again: they are not new any more."""
    record_store, records = RecordStore([tmp_path]), records_of(12)
    first = asyncio.create_task(record_store.take(records))
    for _ in range(turns):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await record_store.take(records)
    assert len(record_store.deletions) == 12
    record_store.close()
    again = RecordStore([tmp_path])
    assert (len(again.replicated), len(again.deletions)) == (12, 12)
    again.close()


async def test_a_deletion_that_the_disk_did_not_take_is_not_done_anew(tmp_path: Path) -> None:
    order, files = deletion("one", tenants=["ours"]), FaultyFiles()
    with driven_store(tmp_path, files=files) as driven:
        driven.flush(OURS, "ours")
        record_store = RecordStore()
        async with writing(driven, retry_after_s=()) as writer:
            worker = DeletionWorker(driven.operations, record_store, writer, timeout_s=0.05)
            files.fail("transaction", OSError(5, "an error"))
            with pytest.raises(Unavailable):
                await worker.forget([order], {})
            assert record_store.counts("one") is None
            driven.store.tiers.reserve({"ours": BLOCK})
            driven.store.tiers.insert([block_of(OURS[0], "ours")])
            files.mend()
            done = None
            async with asyncio.timeout(60):
                while done is None:
                    with contextlib.suppress(Unavailable):
                        done = await worker.forget([order], {})
            assert done == DeletedCount(3, 3 * (BLOCK + RECORD))
        record_store.close()
        assert driven.store.tiers.match(OURS) == 1


async def test_a_writer_that_waited_for_room_does_not_bring_back_what_was_deleted() -> None:
    async with rig(dram_bytes=2 * BLOCK) as store:
        await store.put(THEIRS)
        holding = await opened_get(store, keys=pack_keys(THEIRS))
        assert (await holding.read()).message.opened.blocks == 2
        async with putting(store, at_rest=False) as call:
            opening = put_open(1, OURS[:1])
            opening.tenant = "ours"
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening)))
            await store.until("transfers_waiting_for_room", 1)
            assert await forget(store, deletion("one", tenants=["ours"])) == (0, 0)
            holding.cancel()
            refused = (await answer(call)).refused
            assert (refused.code, "older than a deletion" in refused.reason) == ("deleted", True)
        await store.at_rest()


async def test_a_write_back_that_may_be_older_than_a_deletion_is_refused_from_the_order_on(tmp_path: Path) -> None:
    """Also after a restart; a conductor writes its order to the stores before it has it carried out."""
    order = deletion("one", tenants=["ours"])
    kept = kv_pb2.Record(kind=DELETION, id="one", version=1, value=order.SerializeToString(), expires_at=1e12)
    read = hashed(lambda layer, index: slice_of(OURS[index], layer))
    for records in ([kept], []):
        async with rig(records=RecordStore([tmp_path / "records"])) as store:
            await store.stub.SyncRecords(kvstore_pb2.SyncRecordsRequest(records=records))
            writer = store.writer()
            for known in ([], ["two"]):
                with pytest.raises(InvalidRequest, match="older than a deletion"):
                    await writer.put(OURS, OURS, "ours", read, timeout_s=10, forgotten=known)
            assert (await writer.put(OURS, OURS, "ours", read, timeout_s=10, forgotten=["one"])).stored == 3
            assert (await writer.put(THEIRS, THEIRS, "theirs", read, timeout_s=10)).stored == 2
            await writer.aclose()


async def test_a_record_that_should_be_a_deletion_and_is_not_is_refused() -> None:
    async with rig() as store:
        wrong = kv_pb2.Record(kind=DELETION, id="one", version=1, value=b"\xff", expires_at=1e12)
        with pytest.raises(Exception, match=r"records\.value: is no deletion"):
            await store.stub.SyncRecords(kvstore_pb2.SyncRecordsRequest(records=[wrong]))
        assert (await store.stub.SyncRecords(kvstore_pb2.SyncRecordsRequest())).records == []


async def test_pins_of_a_deleted_tenant_end() -> None:
    async with rig() as store:
        await store.put(OURS, "ours")
        for tenant in ("ours", "other"):
            pin = kvstore_pb2.PinRequest(name="p", keys=pack_keys(OURS[:1]), ttl_s=60.0, tenant=tenant)
            await store.stub.Pin(pin)
        assert await forget(store, deletion("one", tenants=["ours"])) == (3, 3 * BLOCK)
        assert len(store.service.store.tiers.dram.pins) == 1
        assert store.gauges()["pinned_bytes"] == BLOCK


async def test_a_writer_of_deleted_blocks_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        call = await opened_put(store, OURS)
        assert await forget(store, deletion("one", keys=pack_keys(OURS[:1]))) == (0, 0)
        refused = (await answer(call)).refused
        assert (refused.code, "deleted" in refused.reason) == ("invalid_request", True)
        call.cancel()
        await store.at_rest()


async def test_what_is_too_old_goes_and_wrong_orders_are_refused() -> None:
    async with rig() as store:
        await store.put(OURS, "ours")
        assert await forget(store, ttl_s={"ours": 3600.0}) == (0, 0)
        for wrong in ({"ttl_s": {"ours": 0.0}}, {"deletions": [deletion("x", keys=b"short")]}):
            with pytest.raises(Exception, match=r"ttl_s\[ours\]|selection.keys"):
                await store.stub.Forget(kv_pb2.ForgetRequest(**wrong))
        assert len(await store.read(OURS)) == 3


def record(name: str, version: int, value: bytes = b"v", expires_at: float = 1e12) -> kv_pb2.Record:
    return kv_pb2.Record(kind="k", tenant="t", id=name, version=version, value=value, expires_at=expires_at)


async def test_records_and_what_was_carried_out_outlive_the_process(tmp_path: Path) -> None:
    now = [100.0]
    record_store = RecordStore([tmp_path / "records"], lambda: now[0])
    await record_store.take([record("a", 2), record("b", 1, expires_at=200.0), record("a", 1, b"older")])
    await record_store.applied({"one": (3, 300)})
    record_store.close()
    again = RecordStore([tmp_path / "records"], lambda: now[0])
    assert sorted((record.id, record.version) for record in again.replicated.of("k", "t")) == [("a", 2), ("b", 1)]
    assert (again.counts("one"), again.counts("two")) == ((3, 300), None)
    now[0] = 300.0
    await again.take([record("a", 3, b"")])
    again.close()
    last = RecordStore([tmp_path / "records"], lambda: now[0])
    assert [record.id for record in last.replicated.of("k")] == []
    assert last.replicated.after(0)[0] == [record("a", 3, b"")]  # that it was deleted is known still
    last.close()


def order_of(name: str, version: int, *, over: bool = False) -> kv_pb2.Record:
    """The record of a deletion, or that there is none any more."""
    value = b"" if over else deletion(name, tenants=["ours"]).SerializeToString()
    return kv_pb2.Record(kind=DELETION, id=name, version=version, value=value, expires_at=1e12)


async def test_a_deletion_is_known_as_long_as_its_record_or_that_it_was_carried_out(tmp_path: Path) -> None:
    now = [100.0]
    record_store = RecordStore([tmp_path], lambda: now[0])
    await record_store.take([order_of("recorded", 1)])
    record_store.deletions.add("told", KVSelection(tenants=frozenset({"ours"})))
    await record_store.applied({"recorded": (1, 10), "told": (2, 20)})
    assert list(record_store.deletions) == ["recorded", "told"]
    now[0] += KEEP_S + 1.0
    await record_store.take([])
    assert (list(record_store.deletions), record_store.counts("told")) == (["recorded"], None)
    await record_store.applied({"recorded": (1, 10)})
    record_store.close()
    again = RecordStore([tmp_path], lambda: now[0])
    assert (list(again.deletions), again.counts("recorded")) == (["recorded"], (1, 10))
    again.close()


async def test_records_that_are_not_taken_are_no_deletions() -> None:
    record_store = RecordStore()
    record_store.replicated = ReplicatedRecords(max_bytes=400)
    with pytest.raises(Overloaded):
        await record_store.take([order_of("one", 1), record("a", 1, bytes(500))])
    wrong = kv_pb2.Record(kind=DELETION, id="two", version=1, value=b"\xff", expires_at=1e12)
    with pytest.raises(InvalidRequest, match="is no deletion"):
        await record_store.take([order_of("one", 1), wrong])
    assert (list(record_store.deletions), len(record_store.replicated)) == ([], 0)
    await record_store.take([order_of("one", 2, over=True)])
    await record_store.take([order_of("one", 1)])
    assert list(record_store.deletions) == []
    await record_store.take([order_of("one", 3)])
    assert list(record_store.deletions) == ["one"]
    record_store.close()


def test_the_higher_version_is_kept_whoever_brings_it() -> None:
    book = ReplicatedRecords(max_bytes=200)
    assert book.merge([record("a", 2), record("a", 1), record("b", 1)]) == [record("a", 2), record("b", 1)]
    assert book.merge([record("a", 2), record("a", 1)]) == []
    assert book.after(0) == ([record("a", 2), record("b", 1)], 2, False)
    book.merge([record("a", 3)])
    assert book.after(2) == ([record("a", 3)], 3, False)
    assert book.after(3) == ([], 3, False)
    assert book.version(("k", "t", "a"), 0.0) == 4
    with pytest.raises(Overloaded):
        book.merge([record("c", 1, bytes(300))])
    for wrong in (kv_pb2.Record(kind="k"), kv_pb2.Record(kind="k", id="x" * 2000), record("c", 1, bytes(5 << 20))):
        with pytest.raises(InvalidRequest):
            book.merge([wrong])
    assert book.prune(1e13) == [record("b", 1), record("a", 3)]
    assert (len(book), book.nbytes) == (0, 0)


async def test_who_has_deleted_already_reads_nothing_until_it_is_deleted_here() -> None:
    wanted = {"keys": pack_keys(OURS), "forgotten": ["one"]}
    async with rig() as store:
        await store.put(OURS, "ours")
        call = await opened_get(store, **wanted)
        assert (await call.read()).message.opened.blocks == 0
        call.cancel()
        await forget(store, deletion("one", tenants=["ours"]))
        await store.put(OURS, "ours", forgotten=["one"])
        call = await opened_get(store, **wanted)
        opened = (await call.read()).message.opened
        assert (opened.blocks, list(opened.forgotten)) == (len(OURS), ["one"])
        call.cancel()
        await store.at_rest()


async def test_a_deletion_was_carried_out_if_all_folders_say_so(tmp_path: Path) -> None:
    """One that was left out, or is new, may hold what was deleted."""
    folders = [tmp_path / "a", tmp_path / "b"]
    record_store = RecordStore(folders, lambda: 100.0)
    await record_store.take([record("r", 1)])
    await record_store.applied({"one": (3, 300)})
    record_store.leave_out(1)
    await record_store.applied({"two": (4, 400)})
    await record_store.take([record("r", 2)])
    record_store.close()
    again = RecordStore(folders[::-1], lambda: 100.0)
    assert (again.counts("one"), again.counts("two")) == ((3, 300), None)
    assert [record.version for record in again.replicated.of("k", "t")] == [2]
    again.close()
    alone = RecordStore(folders[1:], lambda: 100.0)  # it has learnt what it had missed, but for that
    assert (alone.counts("two"), [record.version for record in alone.replicated.of("k", "t")]) == (None, [2])
    alone.close()
    with_new = RecordStore([folders[0], tmp_path / "c"], lambda: 100.0)
    assert with_new.counts("one") is None
    with_new.close()


async def test_a_folder_whose_records_are_damaged_learns_them_from_the_others(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    record_store = RecordStore(folders, lambda: 100.0)
    await record_store.take([record("r", 1)])
    await record_store.applied({"one": (3, 300)})
    record_store.close()
    (folders[1] / "data.mdb").write_bytes(b"no database" * 1000)
    some = RecordStore(folders, lambda: 100.0)
    assert (some.counts("one"), [record.version for record in some.replicated.of("k", "t")]) == (None, [1])
    await some.applied({"one": (0, 0)})
    assert some.counts("one") == (3, 300)
    some.close()
    alone = RecordStore(folders[1:], lambda: 100.0)
    assert (alone.counts("one"), [record.version for record in alone.replicated.of("k", "t")]) == ((3, 300), [1])
    alone.close()


async def test_records_of_a_folder_that_cannot_be_read_are_left_out_of_several(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"no folder")
    some = RecordStore([tmp_path / "a", tmp_path / "b"], lambda: 100.0)
    await some.take([record("r", 1)])
    some.close()
    with pytest.raises(ConfigError, match=r"data_dir: .*b cannot be read"):
        RecordStore([tmp_path / "b"])


async def test_what_was_deleted_while_a_disk_was_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    away, here = tmp_path / "away", tmp_path / "here"
    order = deletion("one", tenants=["ours"])
    kept = kv_pb2.Record(kind=DELETION, id="one", version=1, value=order.SerializeToString(), expires_at=1e12)
    async with rig(data_dir=[away]) as store:
        await store.put(OURS, "ours")
        await store.put(THEIRS, "theirs")
        await store.durable()
    for folders in ([here], [here, away]):
        record_store = RecordStore([folder / "records" for folder in folders])
        async with rig(data_dir=folders, records=record_store) as store:
            assert await store.read(OURS) == []
            await record_store.take([kept])
            assert (await forget(store, order))[0] == 0
    async with rig(data_dir=[away]) as store:
        assert await store.read(OURS) == []
        assert await store.read(THEIRS) == [data_of(key) for key in THEIRS]
        raw = b"".join(path.read_bytes() for path in (away / "segments").iterdir())
        assert not any(bytes(key) in raw for key in OURS)


@pytest.mark.parametrize(("later_s", "left"), [(60.0, 0), (-60.0, len(OURS))])
async def test_of_a_deletion_that_nobody_knows_any_more_all_that_is_older_goes(
    tmp_path: Path, later_s: float, left: int
) -> None:
    """A folder that was away for longer than records are kept; blocks know the second in which they came."""
    away, here = tmp_path / "away", tmp_path / "here"
    async with rig(data_dir=[away]) as store:
        await store.put(OURS, "ours")
        await store.durable()
    record_store = RecordStore([here / "records"], lambda: time.time() + later_s)
    await record_store.applied({"one": (3, 300)})
    record_store.close()
    for folders in ([away, here], [away]):
        async with rig(data_dir=folders, records=RecordStore([folder / "records" for folder in folders])) as store:
            assert len(await store.read(OURS)) == left
            assert "one" in store.service.servicer.deletions
