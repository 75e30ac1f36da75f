"""The SSD tier against a plain model: plans that are committed, fail or are cut off at any step, by a crash of the
process or a loss of power."""

import errno
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.tenants import TenantAccount
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.data_folder import Durability
from moonpool.kvstore.ssd.reader import SsdReader
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.kvstore.ssd.write_plan import WritePlan
from tests.examples import examples
from tests.unit.kvstore.helpers import LAYOUT, RECORD, Driven, block_of, data_of, keys_of, owner_of
from tests.unit.kvstore.invariants import check
from tests.unit.kvstore.ssd.power import PowerFiles

KEYS = keys_of(14)
KEY = st.sampled_from(KEYS)
DISK = st.integers(0, 1)
GUARANTEE = 3 * RECORD


class Crash(BaseException):
    """The process ends here."""


class TierMachine(RuleBasedStateMachine):
    """`model` is what must be here; `ghosts` may come back after a restart: they were removed, but not yet on disk.

    When the index or the power is lost, so is what was known of removals: all that was ever `written` may come back.
    """

    disks = 1
    durability: Durability = "power"
    without: tuple[str, ...] = ()
    lost = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.folders = [self.folder / str(number) for number in range(self.disks)]
        for folder in self.folders:
            folder.mkdir()
        self.files = [PowerFiles(folder, self.step, without=self.without) for folder in self.folders]
        self.fuse = -1
        self.error: BaseException | None = None
        self.dead = False
        self.model: dict[BlockKey, str] = {}
        self.ghosts: set[BlockKey] = set()
        self.tails: set[BlockKey] = set()  # of plans that failed: what could not be cut off may be adopted
        self.written: set[BlockKey] = set()
        self.pinned: set[BlockKey] = set()
        self.found_anew = False
        self.start()

    def step(self, name: str) -> None:
        """Lets the step number `fuse` go wrong: fails it, or ends the process, after which nothing works."""
        if self.dead:
            raise Crash
        self.fuse -= 1
        if self.fuse == -1 and self.error is not None:
            self.dead = isinstance(self.error, Crash)
            raise self.error

    def start(self) -> None:
        self.dead, self.error = False, None
        self.readers: list[SsdReader] = []
        self.account = TenantAccount(guarantees={"a": GUARANTEE})
        self.ssd: SsdTier = open_tier(
            self.folders,
            16 * RECORD // self.disks,
            2 * RECORD,
            durability=self.durability,
            admission=SsdAdmission(pins=self.pinned),
            account=self.account,
            files=self.files,
            map_bytes=1 << 16,
        )

    @rule(keys=st.lists(KEY, max_size=4, unique=True), tenant=st.sampled_from(["a", "b"]), disk=DISK)
    def put(self, keys: list[BlockKey], tenant: str, disk: int) -> None:
        self.finish(self.begin(keys, tenant, disk), None)

    @rule(keys=st.lists(KEY, max_size=4, unique=True), disk=DISK)
    def put_on_all(self, keys: list[BlockKey], disk: int) -> None:
        """Plans of several disks at once, ended in any order."""
        plans = [self.begin(keys[number :: self.disks], "b", number) for number in range(self.disks)]
        for plan in plans:
            self.ssd.commit(plan)
        for plan in plans[disk:] + plans[:disk] if disk < self.disks else reversed(plans):
            self.finish(plan, None, commit=False)

    @rule(
        keys=st.lists(KEY, max_size=4, unique=True),
        step=st.integers(0, 12),
        error=st.sampled_from([OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full"), Crash()]),
        reading=st.none() | KEY,
        seed=st.none() | st.integers(0, 99),
        disk=DISK,
    )
    def put_and_break(
        self,
        keys: list[BlockKey],
        step: int,
        error: BaseException,
        reading: BlockKey | None,
        seed: int | None,
        disk: int,
    ) -> None:
        """With a `seed`, the crash is one of the machine, which loses power."""
        plan = self.begin(keys, "b", disk)
        if reading is not None and reading in self.ssd.catalogue and len(self.readers) < 3:
            self.readers.append(self.ssd.reader(reading))
        self.fuse, self.error = step, error
        try:
            self.ssd.commit(plan)
        except Crash:
            self.error = None
            if seed is None:
                self.restart(plan)
            else:
                self.lose_power(seed)
        except OSError as failure:
            self.finish(plan, failure)
        else:
            self.finish(plan, None, commit=False)
        finally:
            self.error = None

    def begin(self, keys: list[BlockKey], tenant: str, disk: int) -> WritePlan:
        used = dict(self.account.used)
        new = [block_of(key, tenant) for key in keys if key not in self.ssd.catalogue]
        plan = self.ssd.plan(new, disk % self.disks)
        self.written.update(keys)
        for key in plan.removed:
            assert key not in self.pinned
            assert self.model.pop(key) in used
            self.ghosts.add(key)
        if used.get("a", 0) >= GUARANTEE:
            assert self.account.used["a"] >= GUARANTEE
        return plan

    def finish(self, plan: WritePlan, error: BaseException | None, *, commit: bool = True) -> None:
        if error is not None:
            self.ssd.failed(plan, error)
            self.tails.update(block.info.key for block in plan.blocks)
            assert not plan.lost
            return
        if commit:
            self.ssd.commit(plan)
        self.ssd.committed(plan)
        assert not plan.lost
        self.model.update({block.info.key: block.info.tenant for block in plan.blocks})
        if not self.ssd.has_housekeeping:
            self.ghosts.clear()

    def restart(self, plan: WritePlan | None) -> None:
        """All that is in memory is gone; a plan under way is there wholly, in part, or not at all, block by block."""
        indexed = self.ssd.indexed
        self.ssd.abandon()
        coming = {block.info.key for block in plan.blocks} if plan is not None else set[BlockKey]()
        self.start()
        assert self.ssd.indexed
        self.check_found(coming | self.ghosts | self.tails if indexed else self.written)
        self.found_anew = not indexed or self.ssd.used_bytes > self.ssd.capacity_bytes

    @rule(seed=st.integers(0, 99))
    def lose_power(self, seed: int) -> None:
        """What is found is intact or a miss; with durability "power" nothing that was durable is a miss."""
        self.ssd.abandon()
        for files in self.files:
            files.lose_power(random.Random(seed))
            files.boot += "1"
        self.start()
        self.found_anew = True
        assert set(self.ssd.catalogue) <= self.written
        whole = {key for key in list(self.ssd.catalogue) if self.is_whole(key)}
        lost = set(self.model) - whole
        type(self).lost += len(lost)
        assert not lost or self.durability == "process", "a durable block is lost"
        self.ghosts = self.written - whole
        self.model = {key: owner_of(self.ssd, key) or "" for key in whole}

    def is_whole(self, key: BlockKey) -> bool:
        """Whether a block can be read, and then is what was written; a bad one is dropped."""
        reader = self.ssd.reader(key)
        try:
            self.check_read(reader)
        except BadRecordError:
            assert self.ssd.drop(reader)
            return False
        finally:
            reader.release()
        return True

    def check_read(self, reader: SsdReader) -> None:
        out = memoryview(bytearray(LAYOUT.block_bytes))
        reader.read_layers(0, out)
        assert out == data_of(reader.key)

    def check_found(self, more: set[BlockKey]) -> None:
        """All that must be here is, and intact; of what else may be, some."""
        here = set(self.ssd.catalogue)
        whole = {key for key in here if self.is_whole(key)}
        assert set(self.model) <= whole
        assert here <= set(self.model) | more
        self.model = {key: owner_of(self.ssd, key) or "" for key in whole}
        self.ghosts = here - whole
        self.tails.clear()

    @rule()
    def crash(self) -> None:
        self.restart(None)

    @rule(room=st.booleans())
    def lose_index(self, room: bool) -> None:
        """And perhaps find no room for another one."""
        self.ssd.close()
        files, folder = self.files[-1], self.folders[-1]
        files.remove_folder(folder / "index")
        files.full = not room and any((folder / "segments").iterdir())  # with nothing to serve it does not start
        room = not files.full
        self.start()
        files.full = False
        assert self.ssd.indexed == room
        self.check_found(self.written)
        self.found_anew = True

    @rule(key=KEY)
    def pin(self, key: BlockKey) -> None:
        self.pinned ^= {key}

    @rule(keys=st.lists(KEY, max_size=3))
    def touch(self, keys: list[BlockKey]) -> None:
        self.ssd.catalogue.touch(keys)

    @rule(share=st.sampled_from([0.5, 1.0]))
    def compact(self, share: float) -> None:
        self.ssd.compact(share)
        for disk in range(self.disks):
            self.finish(self.begin([], "b", disk), None)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 20))
    def open_reader(self, pick: int) -> None:
        if len(self.readers) < 3:
            self.readers.append(self.ssd.reader(list(self.model)[pick % len(self.model)]))

    @precondition(lambda self: self.readers)
    @rule(drop=st.booleans())
    def end_reader(self, drop: bool) -> None:
        reader = self.readers.pop(0)
        if drop:
            if self.ssd.drop(reader):
                del self.model[reader.key]
                self.ghosts.add(reader.key)
        else:
            self.check_read(reader)
        reader.release()

    @invariant()
    def sound(self) -> None:
        check(self.ssd)
        assert self.account.used is self.ssd.catalogue.live
        assert {key: owner_of(self.ssd, key) for key in self.ssd.catalogue} == self.model
        assert self.ssd.used_bytes <= self.ssd.capacity_bytes or self.found_anew
        assert self.ssd.readers == len(self.readers)

    def teardown(self) -> None:
        for reader in self.readers:
            reader.release()
        assert self.ssd.readers == 0
        self.restart(None)
        self.ssd.close()
        shutil.rmtree(self.folder)


TierMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25)
TestTier = TierMachine.TestCase


class DisksMachine(TierMachine):
    """Two disks, each with half the room."""

    disks = 2


DisksMachine.TestCase.settings = settings(max_examples=examples(15), stateful_step_count=25)
TestDisks = DisksMachine.TestCase


class ProcessMachine(TierMachine):
    """Without syncs: nothing is lost with the process, but with the power something may be."""

    durability: Durability = "process"


def test_without_syncs_a_loss_of_power_loses_blocks_and_a_crash_of_the_process_none() -> None:
    ProcessMachine.lost = 0
    run_state_machine_as_test(
        ProcessMachine,
        settings=settings(max_examples=examples(20), stateful_step_count=25),
    )
    assert ProcessMachine.lost > 0


@pytest.mark.parametrize("missing", ["sync", "sync_folder", "index_sync"])
def test_no_sync_can_be_left_out(missing: str, tmp_path: Path) -> None:
    """The loss of power that the machine makes up finds each of them missing."""
    lost = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        files = PowerFiles(folder, without=(missing,))
        ssd = open_tier([folder], 16 * RECORD, 2 * RECORD, files=[files], map_bytes=1 << 16)
        for key in KEYS[:4]:
            plan = ssd.plan([block_of(key)])
            ssd.commit(plan)
            ssd.committed(plan)
        ssd.abandon()
        files.lose_power(random.Random(seed))
        ssd = open_tier([folder], 16 * RECORD, 2 * RECORD, files=[files], map_bytes=1 << 16)
        lost += len(set(KEYS[:4]) - set(ssd.catalogue))
        ssd.abandon()
    assert (lost > 0) == (missing != "index_sync")


@pytest.mark.parametrize("seed", range(10))
def test_an_adopted_record_survives_the_next_loss_of_power(seed: int, tmp_path: Path) -> None:
    """The process that wrote it ended before its own sync."""
    dead, first = False, True

    def step(name: str) -> None:
        nonlocal dead, first
        if dead or (name == "sync" and first):
            dead, first = True, False
            raise Crash

    (tmp_path / "data").mkdir()
    files = PowerFiles(tmp_path / "data", step)
    ssd = open_tier([tmp_path / "data"], 16 * RECORD, 4 * RECORD, files=[files], map_bytes=1 << 16)
    plan = ssd.plan([block_of(key) for key in KEYS[:3]])
    with pytest.raises(Crash):
        ssd.commit(plan)
    ssd.abandon()
    dead = False
    for _ in range(2):
        ssd = open_tier([tmp_path / "data"], 16 * RECORD, 4 * RECORD, files=[files], map_bytes=1 << 16)
        assert set(ssd.catalogue) == set(KEYS[:3])
        assert Driven(ssd).read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]
        ssd.abandon()
        files.lose_power(random.Random(seed))


class LongTierMachine(TierMachine):
    """The same, for longer."""


LongTierMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=60)
TestTierForLong = pytest.mark.timeout(1800)(pytest.mark.slow(LongTierMachine.TestCase))
