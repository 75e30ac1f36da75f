"""Making room on the SSD tier: what goes, what is carried over, and that nothing durable is lost on the way."""

from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.tenants import TenantAccount
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.kvstore.ssd.write_plan import WritePlan
from tests.unit.kvstore.faulty_files import FaultyFiles, counting
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, RECORD, block_of, data_of, keys_of, open_ssd, owner_of
from tests.unit.kvstore.invariants import check

KEYS = keys_of(60)
SEGMENT = 2 * RECORD
CAPACITY = 8 * SEGMENT  # of which half a segment is kept free for what is carried


@contextmanager
def tier(
    path: Path,
    capacity: int = CAPACITY,
    segment: int = SEGMENT,
    *,
    pins: Container[BlockKey] = (),
    account: TenantAccount | None = None,
    files: FileLayer | None = None,
) -> Iterator[SsdTier]:
    ssd = open_ssd(path, capacity, segment, pins=pins, account=account, files=files)
    try:
        yield ssd
    finally:
        ssd.close()


def put(ssd: SsdTier, keys: Sequence[BlockKey], tenant: str = "") -> WritePlan:
    plan = ssd.plan([block_of(key, tenant) for key in keys])
    ssd.commit(plan)
    ssd.committed(plan)
    check(ssd)
    assert ssd.used_bytes <= ssd.capacity_bytes
    return plan


def read(ssd: SsdTier, key: BlockKey) -> bytes:
    reader = ssd.reader(key)
    out = bytearray(BLOCK)
    try:
        reader.read_layers(0, memoryview(out))
    finally:
        reader.release()
    return bytes(out)


def test_a_used_block_gets_a_second_chance_and_no_third(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        for key in KEYS[:14]:
            put(ssd, [key])
        ssd.catalogue.touch([KEYS[1], KEYS[30]])
        plan = put(ssd, [KEYS[14], KEYS[15]])
        assert plan.removed == [KEYS[0]]
        assert KEYS[1] in ssd.catalogue
        assert ssd.carried_bytes == RECORD
        assert read(ssd, KEYS[2]) == data_of(KEYS[2])  # reading counts as use, also of the segment's first block
    with tier(tmp_path) as ssd:
        assert read(ssd, KEYS[1]) == data_of(KEYS[1])
    with tier(tmp_path) as ssd:
        for key in KEYS[16:40]:
            put(ssd, [key])
        assert KEYS[1] not in ssd.catalogue


def test_a_block_that_was_read_is_a_used_one(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        for key in KEYS[:14]:
            put(ssd, [key])
        assert read(ssd, KEYS[1]) == data_of(KEYS[1])
        assert put(ssd, [KEYS[14], KEYS[15]]).removed == [KEYS[0]]
        assert KEYS[1] in ssd.catalogue


def test_at_most_half_a_segment_is_spared_and_the_youngest_are(tmp_path: Path) -> None:
    with tier(tmp_path, capacity=8 * 4 * RECORD, segment=4 * RECORD) as ssd:
        put(ssd, KEYS[:29])
        ssd.catalogue.touch(KEYS[:4])
        assert put(ssd, KEYS[29:32]).removed == KEYS[:2]
        assert {KEYS[2], KEYS[3]} <= set(ssd.catalogue)
        assert ssd.carried_bytes == 2 * RECORD


def test_written_bytes_are_told_from_the_users(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        assert ssd.written_bytes == 0
        put(ssd, KEYS[:14])
        assert ssd.user_bytes == 14 * BLOCK
        assert ssd.written_bytes == 14 * RECORD
        ssd.catalogue.touch([KEYS[0]])
        put(ssd, KEYS[14:16])
        assert ssd.written_bytes == (16 + 1) * RECORD
        assert (ssd.written_bytes, ssd.user_bytes) == (17 * RECORD, 16 * BLOCK)


def test_kept_blocks_stay_for_ever_and_are_there_after_a_restart(tmp_path: Path) -> None:
    kept = {KEYS[0], KEYS[5]}
    with tier(tmp_path, pins=kept) as ssd:
        for key in KEYS:
            put(ssd, [key])
        assert kept <= set(ssd.catalogue)
        assert len(ssd.catalogue) >= 13
    with tier(tmp_path) as ssd:
        assert kept <= set(ssd.catalogue)
        assert all(read(ssd, key) == data_of(key) for key in ssd.catalogue)


def test_where_all_is_kept_new_blocks_are_refused(tmp_path: Path) -> None:
    with tier(tmp_path, pins=KEYS) as ssd:
        put(ssd, KEYS[:15])
        plan = put(ssd, KEYS[15:20])
        assert [block.info.key for block in plan.rejected] == KEYS[16:20]
        plan = put(ssd, KEYS[20:22])
        assert (len(plan.rejected), plan.removed, plan.idle) == (2, [], True)
        assert (ssd.carried_bytes, len(ssd.catalogue.segments)) == (0, 8)


def test_a_mostly_kept_segment_goes_after_the_others(tmp_path: Path) -> None:
    with tier(tmp_path, capacity=8 * 4 * RECORD, segment=4 * RECORD, pins=KEYS[:3]) as ssd:
        put(ssd, KEYS[:30])
        assert put(ssd, KEYS[30:33]).removed == KEYS[4:8]
        assert ssd.carried_bytes == 0


def test_a_guarantee_holds_for_all_of_a_segment_together(tmp_path: Path) -> None:
    account = TenantAccount(guarantees={"a": 3 * RECORD})
    with tier(tmp_path, capacity=8 * 4 * RECORD, segment=4 * RECORD, account=account) as ssd:
        put(ssd, KEYS[:4], "a")
        put(ssd, KEYS[4:30], "b")
        assert account.used == {"a": 4 * RECORD, "b": 26 * RECORD}
        assert put(ssd, KEYS[30:33], "b").removed == [KEYS[0], *KEYS[4:8]]
        assert account.used == {"a": 3 * RECORD, "b": 25 * RECORD}
        assert owner_of(ssd, KEYS[1]) == "a"
    again = TenantAccount(guarantees={"a": 3 * RECORD})
    with tier(tmp_path, capacity=8 * 4 * RECORD, segment=4 * RECORD, account=again) as ssd:
        assert again.used == account.used
        assert (
            owner_of(ssd, KEYS[1]),
            owner_of(ssd, KEYS[9]),
            owner_of(ssd, KEYS[0]),
        ) == ("a", "b", None)


def test_a_bad_block_is_not_carried_over_but_reported(tmp_path: Path) -> None:
    with tier(tmp_path, pins=KEYS[:1]) as ssd:
        put(ssd, KEYS[:15])
        file = tmp_path / "segments" / f"{1:016d}.seg"
        data = bytearray(file.read_bytes())
        data[4096] ^= 1
        file.write_bytes(data)
        plan = put(ssd, KEYS[15:17])
        assert (plan.removed, plan.lost) == (KEYS[1:4], [KEYS[0]])
        assert KEYS[0] not in ssd.catalogue
        assert ssd.lost_blocks == 1
    (tmp_path / "index" / "data.mdb").unlink()
    with tier(tmp_path) as ssd:  # the hole where it would have been is no obstacle
        assert set(ssd.catalogue) == set(KEYS[4:17])


def test_a_carried_block_is_readable_all_the_time(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        put(ssd, KEYS[:15])
        ssd.catalogue.touch([KEYS[0]])
        plan = ssd.plan([block_of(key) for key in KEYS[15:17]])
        early = ssd.reader(KEYS[0])
        ssd.commit(plan)
        late = ssd.reader(KEYS[0])
        ssd.committed(plan)
        assert ssd.readers == 2
        for reader in (early, late):
            out = memoryview(bytearray(LAYOUT.slice_bytes(0)))
            reader.read_layers(1, out)
            assert out == data_of(KEYS[0])[LAYOUT.slice_bytes(0) : 2 * LAYOUT.slice_bytes(0)]
            assert not ssd.drop(reader)
            reader.release()
        assert read(ssd, KEYS[0]) == data_of(KEYS[0])
        check(ssd)


def test_a_block_that_is_dropped_while_it_is_carried_stays_dropped(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        put(ssd, KEYS[:15])
        ssd.catalogue.touch([KEYS[0]])
        plan = ssd.plan([block_of(key) for key in KEYS[15:17]])
        reader = ssd.reader(KEYS[0])
        ssd.commit(plan)
        assert ssd.drop(reader)
        reader.release()
        ssd.committed(plan)
        assert KEYS[0] not in ssd.catalogue
        check(ssd)
        assert ssd.has_housekeeping
        put(ssd, [])
    with tier(tmp_path) as ssd:
        assert KEYS[0] not in ssd.catalogue


def test_where_nothing_of_a_thin_segment_is_whole_nothing_is_left_of_it(tmp_path: Path) -> None:
    with tier(tmp_path) as ssd:
        put(ssd, KEYS[:3])
        reader = ssd.reader(KEYS[0])
        ssd.drop(reader)
        reader.release()
        file = tmp_path / "segments" / f"{1:016d}.seg"
        data = bytearray(file.read_bytes())
        data[RECORD + 4096] ^= 1
        file.write_bytes(data)
        assert ssd.compact(0.6) == 1
        plan = put(ssd, [])
        assert plan.lost == [KEYS[1]]
        assert (list(ssd.catalogue), list(ssd.catalogue.segments)) == ([KEYS[2]], [2])
        put(ssd, [KEYS[3]])
    with tier(tmp_path) as ssd:
        assert {key: read(ssd, key) for key in ssd.catalogue} == {key: data_of(key) for key in KEYS[2:4]}


class BreakingFiles(FaultyFiles):
    """From a step on all operations fail: for ever, or just that one. Deletions, which break no plan off, do not."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.ever = False
        self.broken = 0
        self.deletes = False

    def later(self, change: Callable[[Path], None], path: Path) -> "Future[None]":
        self.deletes = True
        try:
            return super().later(change, path)
        finally:
            self.deletes = False

    def step(self, name: str, path: Path | None = None) -> None:
        if name in ("read", "unlink") or self.deletes:
            return
        self.left -= 1
        if self.left == -1 or (self.ever and self.broken):
            self.broken += 1
            raise OSError("broken")


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("crash", [False, True])
def test_nothing_durable_is_lost_wherever_a_plan_breaks_off(tmp_path: Path, step: int, crash: bool) -> None:
    kept = {KEYS[1], KEYS[3]}
    files = BreakingFiles()
    with tier(tmp_path, pins=kept, files=files) as ssd:
        put(ssd, KEYS[:15])
        plan = ssd.plan([block_of(key) for key in KEYS[15:18]])
        files.left, files.ever = step, crash
        with pytest.raises(OSError, match="broken"):
            ssd.commit(plan)
        files.left, files.broken = -1, 0
        if not crash:
            ssd.failed(plan, OSError("broken"))
            check(ssd)
            assert set(ssd.catalogue) == set(KEYS[:15]) - set(plan.removed)
            put(ssd, KEYS[18:20])
            assert kept <= set(ssd.catalogue)
    with tier(tmp_path) as ssd:
        here = set(ssd.catalogue)
        assert set(KEYS[:15]) - set(plan.removed) <= here | (set() if crash else {KEYS[4], KEYS[6]})
        assert kept <= here <= set(KEYS[:20])
        assert all(read(ssd, key) == data_of(key) for key in here)
        check(ssd)


def test_compacting_rewrites_thin_segments_and_loses_nothing(tmp_path: Path) -> None:
    with tier(tmp_path, capacity=64 * RECORD, segment=4 * RECORD) as ssd:
        put(ssd, KEYS[:12])
        for key in (KEYS[0], KEYS[1], KEYS[2], KEYS[5]):
            reader = ssd.reader(key)
            assert ssd.drop(reader)
            reader.release()
        assert (ssd.used_bytes, ssd.catalogue.live.total_bytes) == (12 * RECORD, 8 * RECORD)
        assert ssd.compact(0.5) == 1
        plan = put(ssd, [])
        assert (plan.removed, plan.idle) == ([], False)
        assert (ssd.used_bytes, ssd.carried_bytes) == (9 * RECORD, RECORD)
        assert ssd.compact(0.8) == 1
        put(ssd, [])
        assert (ssd.used_bytes, ssd.catalogue.live.total_bytes) == (8 * RECORD, 8 * RECORD)
        assert put(ssd, []).idle
        assert not ssd.has_housekeeping
    with tier(tmp_path, capacity=64 * RECORD, segment=4 * RECORD) as ssd:
        assert set(ssd.catalogue) == set(KEYS[:12]) - {KEYS[0], KEYS[1], KEYS[2], KEYS[5]}
        assert all(read(ssd, key) == data_of(key) for key in ssd.catalogue)


def test_a_plan_reclaims_as_many_small_segments_as_its_blocks_need(tmp_path: Path) -> None:
    keys = keys_of(186)
    with tier(tmp_path, capacity=64 * SEGMENT) as ssd:
        put(ssd, keys[:126])
        plan = put(ssd, keys[126:])
        assert (plan.rejected, plan.removed) == ([], keys[: len(plan.removed)])
        assert len(plan.victims) == 30


def test_a_tier_of_kept_blocks_is_not_rewritten_for_one_batch(tmp_path: Path) -> None:
    """Where reclaiming writes more than it frees, a plan does a little of it."""
    keys = keys_of(160)
    kept = set(keys[:126]) - set(keys[:126:4])
    with tier(tmp_path, 32 * 4 * RECORD, 4 * RECORD, pins=kept) as ssd:
        put(ssd, keys[:126])
        plan = put(ssd, keys[126:150])
        assert (len(plan.victims), len(plan.blocks)) == (16, 2 + 16)
        assert put(ssd, [block.info.key for block in plan.rejected]).rejected == []
        assert kept <= set(ssd.catalogue)


class Killed(BaseException):
    """The process ends here."""


def test_what_was_carried_may_be_there_twice_after_a_kill_until_the_next_plan(tmp_path: Path) -> None:
    files, pins = FaultyFiles(), set(KEYS) - set(KEYS[::4])
    with tier(tmp_path, 32 * RECORD, 4 * RECORD, pins=pins, files=files) as ssd:
        put(ssd, KEYS[:16])
        put(ssd, KEYS[16:32])
        plan = ssd.plan([block_of(KEYS[32])])
        files.fail("unlink", Killed())
        with pytest.raises(Killed):
            ssd.commit(plan)
    with tier(tmp_path, 32 * RECORD, 4 * RECORD, pins=pins) as ssd:
        assert (ssd.used_bytes, ssd.catalogue.live.total_bytes) == ((32 + 3) * RECORD, 32 * RECORD)
        assert ssd.has_housekeeping
        assert put(ssd, []).removed == KEYS[:1]
        assert pins & set(KEYS[:32]) == pins & set(ssd.catalogue)


def test_many_wholly_kept_segments_do_not_hide_the_others(tmp_path: Path) -> None:
    asked: list[object] = []

    class Kept(set[BlockKey]):
        def __contains__(self, key: object) -> bool:
            asked.append(key)
            return super().__contains__(key)

    kept = Kept(KEYS[:40])
    with tier(tmp_path, capacity=50 * RECORD, segment=2 * RECORD, pins=kept) as ssd:
        put(ssd, KEYS[:48])
        assert put(ssd, KEYS[48:50]).removed == KEYS[40:42]
        before = len(asked)
        assert put(ssd, KEYS[50:52]).removed == KEYS[42:44]
        assert len(asked) - before <= 4, "segments that are wholly kept are asked about again and again"
        kept.clear()
        for start in range(52, 60):
            put(ssd, [KEYS[start]])
        assert len(ssd.catalogue) >= 48


@pytest.mark.parametrize("carries", [False, True])
def test_a_plan_has_one_transaction_and_a_second_one_where_it_carries_over(tmp_path: Path, carries: bool) -> None:
    files = FaultyFiles()
    with tier(tmp_path, files=files, pins=KEYS[:1] if carries else ()) as ssd:
        for at in range(0, 14, 2):
            put(ssd, KEYS[at : at + 2])
        steps = counting(files.steps)
        assert len(put(ssd, KEYS[14:16]).carry) == carries
        if carries:  # the new blocks lie in two segments
            expected = ["read", "write", "sync", "sync_folder", "transaction", "unlink", "sync_folder"]
            expected += ["write", "write", "sync", "sync", "sync_folder", "transaction"]
        else:  # in the file of the one that is reclaimed
            expected = ["rename", "sync_folder", "write", "sync", "transaction"]
        assert [name for name, _ in steps()] == expected
        check(ssd)
