"""Names of tenants and formats stay as long as records use them, on disk and in memory."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.kv.blocks import BlockFormat
from services.kvstore.ssd.catalogue import IdChange, IdTable
from services.kvstore.ssd.index import Index, IndexImage
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.tenants import Account, TenantRow
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import LAYOUT, RECORD, Driven, block_of, info_of, keys_of, open_ssd

KEYS = keys_of(64)
SLOTS = 8  # records that the tier has room for, and so the most names in use


def tenant(number: int) -> str:
    return f"tenant-{number}"


def put(ssd: SsdTier, number: int, *, fail: bool = False) -> None:
    """One block of a tenant and a format that nothing else has."""
    block = block_of(KEYS[number], tenant(number), BlockFormat(KEYS[number], LAYOUT))
    plan = ssd.plan([block])
    if fail:
        ssd.failed(plan, OSError(errno.EROFS, "read-only"))
    else:
        ssd.commit(plan)
        ssd.committed(plan)
    ssd.check_invariants()


def test_an_id_is_given_once_and_a_name_is_forgotten_with_its_last_use() -> None:
    names = IdTable({3: "a", 7: "b"})
    names.use([3, 3])
    names.settle(written=True)
    assert (names.by_id, names.change().unused) == ({3: "a"}, frozenset({7}))
    assert (names.id_of("b"), names.id_of("a")) == (8, 3)
    names.use([8])
    names.unuse([3])
    names.settle(written=True)
    assert names.by_id == {3: "a", 8: "b"}
    names.unuse([3, 8])
    names.settle(written=True)
    assert (names.by_id, names.change().unused) == ({}, frozenset({3, 8}))
    assert names.id_of("c") == 9
    names.check_invariants([])
    names.settle(written=True)
    assert names.by_id == {}


def names_of(path: Path) -> IndexImage:
    """What the index holds; read from a copy, as an open database cannot be opened twice."""
    copy = Path(shutil.copytree(path / "index", path / "copy", dirs_exist_ok=True))
    index = Index(None, copy)
    try:
        return index.load()
    finally:
        index.close()


def test_the_disk_bounds_the_names_that_clients_invent(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    for number in range(len(KEYS)):
        put(ssd, number)
        assert len(names_of(tmp_path).tenants) <= SLOTS + 1  # what this commit has freed the next one forgets
        assert len(names_of(tmp_path).formats) <= SLOTS + 1
    left = {ssd.catalogue.tenant_of(key) for key in ssd.catalogue}
    assert left < set(names_of(tmp_path).tenants.values())
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert {ssd.catalogue.tenant_of(key) for key in ssd.catalogue} == left
    put(ssd, 0)
    assert tenant(0) in names_of(tmp_path).tenants.values()
    assert len(names_of(tmp_path).tenants) <= SLOTS + 1
    ssd.close()


def test_a_name_lives_as_long_as_its_records_do(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, 2 * RECORD)
    put(ssd, 0)
    put(ssd, 1)
    reader = ssd.reader(KEYS[0])
    ssd.drop(reader)  # forgotten, but its record is still there
    reader.release()
    put(ssd, 2)
    assert tenant(0) in names_of(tmp_path).tenants.values()
    for number in range(3, 12):
        put(ssd, number)
    assert not {tenant(0), tenant(1)} & set(names_of(tmp_path).tenants.values())
    ssd.close()


def test_plans_that_fail_leave_no_names(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    put(ssd, 0)
    for number in range(1, len(KEYS)):
        put(ssd, number, fail=True)
    assert names_of(tmp_path).tenants == {1: tenant(0)}
    put(ssd, 1)
    assert set(names_of(tmp_path).tenants.values()) == {tenant(0), tenant(1)}
    ssd.close()


def test_names_written_by_half_a_plan_are_forgotten_too(tmp_path: Path) -> None:
    """The first transaction names what the second then cannot store."""
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD, files=files)
    for number in range(SLOTS):
        put(ssd, number)
    plan = ssd.plan([block_of(KEYS[20], tenant(20))])
    error = OSError(errno.EIO, "broken")
    files.fail("write", error)
    with pytest.raises(OSError, match="broken"):
        ssd.commit(plan)
    files.mend()
    ssd.failed(plan, error)
    ssd.check_invariants()
    assert tenant(20) in names_of(tmp_path).tenants.values()
    put(ssd, 21)
    assert tenant(20) not in names_of(tmp_path).tenants.values()
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert {ssd.catalogue.tenant_of(key) for key in ssd.catalogue} == {
        tenant(number) for number in (*range(2, SLOTS), 21)
    }
    ssd.close()


class Unwalked(dict[int, str]):
    """Names that may be looked up, but not looked through; counts how often."""

    looked = 0

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all names are looked through")

    def __contains__(self, number: object) -> bool:
        self.looked += 1
        return super().__contains__(number)


@pytest.mark.parametrize("failures", [0, 50])
def test_a_batch_looks_at_its_own_names_only(failures: int) -> None:
    """However many names there are, and however many came in batches that failed."""
    table = IdTable({number: f"before-{number}" for number in range(1, 101)})
    table.use(range(1, 101))
    for number in range(failures):
        table.id_of(f"failed-{number}")
        table.settle(written=False)
    names = table.by_id = Unwalked(table.by_id)
    assert table.id_of("new") == table.id_of("new") == 101 + failures
    change = table.change()
    assert change == IdChange({101 + failures: "new"}, frozenset())
    table.use([101 + failures])
    table.settle(written=True)
    assert names.looked <= 3
    assert table.change() == IdChange({}, frozenset())
    assert names.looked <= 3


def test_a_name_may_have_two_ids_in_an_index_and_the_unused_one_goes() -> None:
    """It was forgotten and came again, and the process ended before the index forgot the first id."""
    table = IdTable({1: "a", 3: "a"})
    table.use([3])
    table.settle(written=True)
    assert (table.by_id, table.id_of("a"), table.change().unused) == ({3: "a"}, 3, frozenset({1}))
    table.check_invariants([3])


def test_names_that_the_index_could_not_learn_are_told_again() -> None:
    table = IdTable[str]({})
    table.use([table.id_of("a")])
    change = table.change()
    table.settle(written=False)
    assert table.change() == change == IdChange({1: "a"}, frozenset())
    table.settle(written=True)
    assert table.change() == IdChange({}, frozenset())


def test_a_tenant_that_is_gone_leaves_nothing_anywhere(tmp_path: Path) -> None:
    account = Account.of({"*": TenantRow(ssd_quota_bytes=RECORD)}, "ssd")
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD, account=account)
    driven = Driven(ssd, dram_bytes=4 * info_of(KEYS[0]).nbytes)
    for number in range(0, len(KEYS), 2):
        for key in KEYS[number : number + 2]:  # the second pushes the first out: its tenant is at its quota
            driven.flush([key], tenant(number))
        driven.store.writes.close(driven.put([KEYS[number + 1]], f"asks-{number}"))  # has nothing of its own to bring
    dram = driven.store.tiers.dram
    assert len(account.used) <= SLOTS
    ssd.check_invariants()
    assert len(dram.account.used) <= 4
    assert dram.reserved.total_bytes == 0
    dram.check_invariants()
    ssd.close()
