"""Names of tenants and formats stay as long as records use them, on disk and in memory."""

import contextlib
import errno
import shutil
from pathlib import Path

import pytest

from moonpool.base.kv.blocks import BlockFormat
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantRow
from moonpool.kvstore.ssd.index import Index
from moonpool.kvstore.ssd.tier import SsdTier
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import LAYOUT, RECORD, Driven, block_of, info_of, keys_of, open_ssd, owner_of
from tests.unit.kvstore.invariants import check

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
    check(ssd)


def names_of(path: Path) -> list[str]:
    """Tenants in the index, which has the names of its segments alone, and each once in a segment.

    Read from a copy, as an open database cannot be opened twice.
    """
    with contextlib.closing(
        Index(None, Path(shutil.copytree(path / "index", path / "copy", dirs_exist_ok=True)))
    ) as store:
        image = store.load()
    assert image.kinds.keys() == image.segments.keys()
    assert all(len(kinds) == len(set(kinds)) for kinds in image.kinds.values())
    return [kind.tenant for kinds in image.kinds.values() for kind in kinds]


def test_the_disk_bounds_the_names_that_clients_invent(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    for number in range(len(KEYS)):
        put(ssd, number)
        assert len(names_of(tmp_path)) <= SLOTS
    left = {owner_of(ssd, key) for key in ssd.catalogue}
    assert left == set(names_of(tmp_path))
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert {owner_of(ssd, key) for key in ssd.catalogue} == left
    put(ssd, 0)
    assert tenant(0) in names_of(tmp_path)
    assert len(names_of(tmp_path)) <= SLOTS
    ssd.close()


def test_a_name_lives_as_long_as_its_records_do(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, 2 * RECORD)
    put(ssd, 0)
    put(ssd, 1)
    reader = ssd.reader(KEYS[0])
    ssd.drop(reader)  # forgotten, but its record is still there
    reader.release()
    put(ssd, 2)
    assert tenant(0) in names_of(tmp_path)
    for number in range(3, 12):
        put(ssd, number)
    assert not {tenant(0), tenant(1)} & set(names_of(tmp_path))
    ssd.close()


def test_plans_that_fail_leave_no_names(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    put(ssd, 0)
    for number in range(1, len(KEYS)):
        put(ssd, number, fail=True)
    assert names_of(tmp_path) == [tenant(0)]
    put(ssd, 1)
    assert set(names_of(tmp_path)) == {tenant(0), tenant(1)}
    ssd.close()


def test_half_a_plan_leaves_no_names(tmp_path: Path) -> None:
    """A segment was to make room for a block that could not be written then."""
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
    check(ssd)
    put(ssd, 21)
    assert tenant(20) not in names_of(tmp_path)
    ssd.close()
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD)
    assert {owner_of(ssd, key) for key in ssd.catalogue} == {tenant(number) for number in (*range(2, SLOTS), 21)}
    ssd.close()


def test_a_tenant_that_is_gone_leaves_nothing_anywhere(tmp_path: Path) -> None:
    account = TenantAccount.of({"*": TenantRow(ssd_quota_bytes=RECORD)}, "ssd")
    ssd = open_ssd(tmp_path, SLOTS * RECORD, RECORD, account=account)
    driven = Driven(ssd, dram_bytes=4 * info_of(KEYS[0]).nbytes)
    for number in range(0, len(KEYS), 2):
        for key in KEYS[number : number + 2]:  # the second pushes the first out: its tenant is at its quota
            driven.flush([key], tenant(number))
        driven.store.writes.close(driven.put([KEYS[number + 1]], f"asks-{number}"))  # has nothing of its own to bring
    dram = driven.store.tiers.dram
    assert len(account.used) <= SLOTS
    check(ssd)
    assert len(dram.account.used) <= 4
    assert dram.reserved.total_bytes == 0
    check(dram)
    ssd.close()
