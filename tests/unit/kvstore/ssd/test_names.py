"""Names of tenants and formats stay as long as records bear them, on disk and in memory."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.kv.blocks import BlockFormat
from services.kvstore.ssd.index import IndexChange, IndexImage
from services.kvstore.ssd.interned import Interned
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.tenants import Account, Grants, TenantRow
from tests.unit.kvstore.helpers import LAYOUT, RECORD, Driven, block_of, info_of, keys_of, open_ssd

KEYS = keys_of(64)
SLOTS = 8  # records that the tier has room for, and so the most names that can be borne


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


def image(ssd: SsdTier) -> IndexImage:
    return ssd._index.load()


def test_a_number_is_given_once_and_a_name_goes_with_its_last_use() -> None:
    names = Interned({3: "a", 7: "b"})
    names.use([3, 3])
    assert names.drop_unused() == {7: "b"}
    assert (names.number("b"), names.number("a")) == (8, 3)
    names.use([8])
    names.unuse([3])
    assert names.drop_unused() == {}
    names.unuse([3, 8])
    assert names.drop_unused() == {3: "a", 8: "b"}
    assert names.number("c") == 9
    names.check_invariants([])
    assert names.drop_unused() == {9: "c"}
    assert names.by_number == {}


def test_the_disk_bounds_the_names_that_clients_invent(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    for number in range(len(KEYS)):
        put(ssd, number)
        assert len(ssd._books.tenants.by_number) <= SLOTS
        assert len(ssd._books.formats.by_number) <= SLOTS
        assert len(image(ssd).tenants) <= SLOTS + 1  # what this commit has freed the next one forgets
        assert len(image(ssd).formats) <= SLOTS + 1
    left = {ssd.tenant_of(key) for key in ssd}
    assert left < set(image(ssd).tenants.values())
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert set(ssd._books.tenants.by_number.values()) == {ssd.tenant_of(key) for key in ssd} == left
    put(ssd, 0)
    assert tenant(0) in image(ssd).tenants.values()
    assert len(image(ssd).tenants) <= SLOTS + 1
    ssd.close()


def test_a_name_lives_as_long_as_its_records_do(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, 2 * RECORD)
    put(ssd, 0)
    put(ssd, 1)
    reader = ssd.reader(KEYS[0])
    ssd.drop(reader)  # forgotten, but its record is still there
    reader.release()
    put(ssd, 2)
    assert tenant(0) in ssd._books.tenants.by_number.values()
    for number in range(3, 12):
        put(ssd, number)
    assert not {tenant(0), tenant(1)} & set(image(ssd).tenants.values())
    ssd.close()


def test_plans_that_fail_leave_no_names(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    put(ssd, 0)
    for number in range(1, len(KEYS)):
        put(ssd, number, fail=True)
    assert ssd._books.tenants.by_number == {1: tenant(0)}
    assert ssd._plans.names._surplus == (set(), set())
    put(ssd, 1)
    assert set(image(ssd).tenants.values()) == {tenant(0), tenant(1)}
    ssd.close()


def test_names_written_by_half_a_plan_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transaction names what the second then cannot store."""
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    for number in range(SLOTS):
        put(ssd, number)
    plan = ssd.plan([block_of(KEYS[20], tenant(20))])
    error = OSError(errno.EIO, "broken")

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("services.kvstore.ssd.segments.SegmentFile.append", broken)
        with pytest.raises(OSError, match="broken"):
            ssd.commit(plan)
    ssd.failed(plan, error)
    ssd.check_invariants()
    assert tenant(20) in image(ssd).tenants.values()
    assert tenant(20) not in ssd._books.tenants.by_number.values()
    put(ssd, 21)
    assert tenant(20) not in image(ssd).tenants.values()
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert {ssd.tenant_of(key) for key in ssd} == {tenant(number) for number in (*range(2, SLOTS), 21)}
    ssd.close()


class Unwalked(dict[int, Any]):
    """Names that may be looked up, but not looked through; counts how often."""

    looked = 0

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all names are looked through")

    items = keys = values = __iter__  # type: ignore[assignment]

    def __contains__(self, number: object) -> bool:
        self.looked += 1
        return super().__contains__(number)


@pytest.mark.parametrize("failures", [0, 50])
def test_a_batch_looks_at_its_own_names_only(tmp_path: Path, failures: int) -> None:
    """However many names there are, and however many came in batches that failed."""
    ssd = open_ssd(tmp_path, 200 * RECORD, 200 * RECORD)
    plan = ssd.plan([block_of(key, key.hex()) for key in keys_of(100, "before")])
    ssd.commit(plan)
    ssd.committed(plan)
    for number in range(failures):
        put(ssd, number, fail=True)
    tenants, formats = Unwalked(ssd._books.tenants.by_number), Unwalked(ssd._books.formats.by_number)
    ssd._books.tenants.by_number, ssd._books.formats.by_number = tenants, formats
    plan = ssd.plan([block_of(KEYS[60], "new"), block_of(KEYS[61], "new")])
    assert plan.work.work.names == IndexChange(
        tenants={101 + failures: "new"}, unused_formats=frozenset(), unused_tenants=frozenset()
    )
    assert tenants.looked == 1
    assert formats.looked == 0
    ssd.commit(plan)
    ssd.committed(plan)
    assert ssd.plan([]).work.work.names.tenants == {}
    assert tenants.looked < 5
    assert "new" in image(ssd).tenants.values()
    ssd.close()


def test_a_tenant_that_is_gone_leaves_nothing_anywhere(tmp_path: Path) -> None:
    account = Account(Grants.of({"*": TenantRow(ssd_quota_bytes=RECORD)}, "ssd"))
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    driven = Driven(ssd, dram_bytes=4 * info_of(KEYS[0]).nbytes, ssd_account=account)
    for number in range(0, len(KEYS), 2):
        for key in KEYS[number : number + 2]:  # the second pushes the first out: its tenant is at its quota
            driven.flush([key], tenant(number))
        driven.store.writes.close(driven.put([KEYS[number + 1]], f"asks-{number}"))  # has nothing of its own to bring
    dram = driven.store.tiers.dram
    assert len(account.used) <= SLOTS
    assert len(ssd._oldest._begin) <= SLOTS
    assert len(dram.account.used) <= 4
    assert not dram._reserved
    assert not dram._fixed
    ssd.close()
