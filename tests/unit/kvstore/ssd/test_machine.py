"""The SSD tier against a plain model: plans that are committed, fail or are cut off by a crash at any step."""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.kv.keys import BlockKey
from services.kvstore.ssd import commit
from services.kvstore.ssd.backend import WritePlan
from services.kvstore.ssd.index import Index
from services.kvstore.ssd.record_reader import SsdReader
from services.kvstore.ssd.segments import SegmentFile
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.protection import Protection
from services.kvstore.tenancy.tenants import Account, Grants
from tests.unit.kvstore.helpers import LAYOUT, RECORD, block_of, keys_of, open_ssd, slice_of

KEYS = keys_of(14)
KEY = st.sampled_from(KEYS)
GUARANTEE = 3 * RECORD


class Crash(BaseException):
    """The process ends here."""


def full(*_: object, **__: object) -> None:
    raise lmdb.DiskError("No space left on device")


class Device:
    """Lets the step number `fuse` of a commit go wrong: fails it, or ends the process, after which nothing works."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fuse = -1
        self.error: BaseException | None = None
        self.dead = False
        for owner, name in (
            (SegmentFile, "append"),
            (SegmentFile, "sync"),
            (SegmentFile, "unlink"),
            (SegmentFile, "truncate"),
            (Index, "commit"),
            (commit, "sync_folder"),
        ):
            patch.setattr(owner, name, self.step(getattr(owner, name)))
        patch.setattr("os.fdatasync", lambda fd: None)  # no power is lost here: what was written can be read
        patch.setattr("os.fsync", lambda fd: None)
        opened = lmdb.open
        patch.setattr("lmdb.open", lambda *args, **more: opened(*args, **more | {"sync": False, "metasync": False}))

    def step(self, real: Any) -> Any:
        def run(*args: Any) -> Any:
            if self.dead:
                raise Crash
            self.fuse -= 1
            if self.fuse == -1 and self.error is not None:
                self.dead = isinstance(self.error, Crash)
                raise self.error
            return real(*args)

        return run


class TierMachine(RuleBasedStateMachine):
    """`model` is what must be here; `ghosts` may come back after a restart: they were removed, but not yet on disk.

    When the index is lost, so is what it knew of removals: everything that was ever `written` may come back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.device = Device(self.patch)
        self.model: dict[BlockKey, str] = {}
        self.ghosts: set[BlockKey] = set()
        self.written: set[BlockKey] = set()
        self.pinned: set[BlockKey] = set()
        self.found_anew = False
        self.start()

    def start(self) -> None:
        self.device.dead = False
        self.readers: list[SsdReader] = []
        self.ssd: SsdTier = open_ssd(self.folder, 16 * RECORD, 2 * RECORD)
        self.account = Account(Grants(guarantees={"a": GUARANTEE}))
        self.ssd.protect(Protection(self.pinned.__contains__, self.account).keeps, self.account)

    @rule(keys=st.lists(KEY, max_size=4, unique=True), tenant=st.sampled_from(["a", "b"]))
    def put(self, keys: list[BlockKey], tenant: str) -> None:
        self.finish(self.begin(keys, tenant), None)

    @rule(
        keys=st.lists(KEY, max_size=4, unique=True),
        step=st.integers(0, 12),
        error=st.sampled_from([OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full"), Crash()]),
        reading=st.none() | KEY,
    )
    def put_and_break(self, keys: list[BlockKey], step: int, error: BaseException, reading: BlockKey | None) -> None:
        plan = self.begin(keys, "b")
        if reading is not None and reading in self.ssd and len(self.readers) < 3:
            self.readers.append(self.ssd.reader(reading))
        self.device.fuse, self.device.error = step, error
        try:
            self.ssd.commit(plan)
        except Crash:
            self.restart(plan)
        except OSError as failure:
            self.finish(plan, failure)
        else:
            self.finish(plan, None, commit=False)
        finally:
            self.device.error = None

    def begin(self, keys: list[BlockKey], tenant: str) -> WritePlan:
        used = dict(self.account.used)
        plan = self.ssd.plan([block_of(key, tenant) for key in keys if key not in self.ssd])
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
        self.ssd.close()
        coming = {block.info.key for block in plan.blocks} if plan is not None else set[BlockKey]()
        self.start()
        assert self.ssd.indexed
        self.check_found(coming | self.ghosts if indexed else self.written)
        self.found_anew = not indexed or (self.found_anew and self.ssd.used_bytes > self.ssd.capacity_bytes)

    def check_found(self, more: set[BlockKey]) -> None:
        """What must be here is; of what else may be, some."""
        here = set(self.ssd)
        assert set(self.model) <= here <= set(self.model) | more
        self.model = {key: self.ssd.tenant_of(key) or "" for key in here}
        self.ghosts.clear()

    @rule()
    def crash(self) -> None:
        self.restart(None)

    @rule(room=st.booleans())
    def lose_index(self, room: bool) -> None:
        """And perhaps find no room for another one."""
        self.ssd.close()
        shutil.rmtree(self.folder / "index", ignore_errors=True)
        with pytest.MonkeyPatch().context() as patch:
            room = room or not any((self.folder / "segments").iterdir())  # with nothing to serve it does not start
            if not room:
                patch.setattr("lmdb.open", full)
            self.start()
        assert self.ssd.indexed == room
        self.check_found(self.written)
        self.found_anew = True

    @rule(key=KEY)
    def pin(self, key: BlockKey) -> None:
        self.pinned ^= {key}

    @rule(keys=st.lists(KEY, max_size=3))
    def touch(self, keys: list[BlockKey]) -> None:
        self.ssd.touch(keys)

    @rule(share=st.sampled_from([0.5, 1.0]))
    def compact(self, share: float) -> None:
        self.ssd.compact(share)
        self.finish(self.begin([], "b"), None)

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
            outs = [memoryview(bytearray(LAYOUT.slice_bytes)) for _ in range(3)]
            reader.read_layers(0, outs)
            assert [bytes(out) for out in outs] == [slice_of(reader.key, layer) for layer in range(3)]
        reader.release()

    @invariant()
    def sound(self) -> None:
        self.ssd.check_invariants()
        self.account.check_invariants(self.ssd._books.tenant_bytes())
        assert {key: self.ssd.tenant_of(key) for key in self.ssd} == self.model
        assert self.ssd.used_bytes <= self.ssd.capacity_bytes or self.found_anew
        assert self.ssd.readers == len(self.readers)

    def teardown(self) -> None:
        for reader in self.readers:
            reader.release()
        assert self.ssd.readers == 0
        self.restart(None)
        self.ssd.close()
        self.patch.undo()
        shutil.rmtree(self.folder)


TierMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
TestTier = TierMachine.TestCase


class LongTierMachine(TierMachine):
    """The same, for longer."""


LongTierMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
TestTierForLong = pytest.mark.timeout(1800)(pytest.mark.slow(LongTierMachine.TestCase))
