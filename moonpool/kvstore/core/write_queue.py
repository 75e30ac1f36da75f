"""Blocks on the way from DRAM to SSD.

A block that waits for the SSD tier is held, so that writers wait for room when the device is slower. A block that the
device did not take stays in DRAM without a hold and is tried again.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.tiered_store import TieredStore
from moonpool.kvstore.ssd.records import record_size
from moonpool.kvstore.ssd.write_plan import WritePlan


class SaveState(Enum):
    """How far a block in DRAM is on the way to the SSD tier; `TRANSITIONS` has the changes that may happen."""

    VISIBLE = "visible"
    """In DRAM only: the block has just come, or the SSD tier did not admit the block."""
    WAITING = "waiting"
    """In the queue; held, so that the block stays in DRAM."""
    WRITING = "writing"
    """In a plan under way; held."""
    RECALLED = "recalled"
    """Deleted or found damaged while a plan writes the block; the record is overwritten after the plan."""
    UNSAVED = "unsaved"
    """The SSD tier did not take the block. Tried again as long as the block stays in DRAM."""
    DURABLE = "durable"
    """On SSD."""
    DROPPED = "dropped"
    """Deleted or found damaged before reaching SSD."""


TRANSITIONS: Mapping[SaveState, frozenset[SaveState]] = {
    SaveState.VISIBLE: frozenset({SaveState.WAITING}),
    SaveState.WAITING: frozenset({SaveState.WRITING, SaveState.UNSAVED, SaveState.DROPPED}),
    SaveState.WRITING: frozenset({SaveState.WAITING, SaveState.RECALLED, SaveState.UNSAVED, SaveState.DURABLE}),
    SaveState.RECALLED: frozenset({SaveState.DROPPED}),
    SaveState.UNSAVED: frozenset({SaveState.WAITING}),
    SaveState.DURABLE: frozenset(),
    SaveState.DROPPED: frozenset(),
}
"""For each state the ones that may follow. A block begins as VISIBLE."""
_QUEUED = frozenset({SaveState.WAITING, SaveState.WRITING})
_KNOWN = _QUEUED | {SaveState.RECALLED}


class WriteQueue:
    """Takes blocks from DRAM to the SSD tier, in batches, and knows the state of each block on the way.

    Args:
        tiers: both tiers; without an SSD tier the queue takes no blocks.
        on_durable: called with the keys of blocks that were committed.
        batch_bytes: most bytes in one commit, unless a single block is larger.
    """

    def __init__(self, tiers: TieredStore, on_durable: Callable[[Sequence[BlockKey]], None], batch_bytes: int) -> None:
        self._tiers = tiers
        self.removed = tiers.removed  # announces keys that have left a tier
        self._on_durable = on_durable
        # A plan cannot reclaim what the plan stores: blocks refused for that reason would fit the next plan.
        for disk in () if tiers.ssd is None else tiers.ssd.disks:
            batch_bytes = min(batch_bytes, disk.space.capacity_bytes // 2)
        self.batch_bytes = batch_bytes
        self.waiting: collections.deque[DramBlock] = collections.deque()
        self.committing: dict[int, WritePlan] = {}  # by disk
        self.states: dict[DramBlock, SaveState] = {}  # of blocks that wait or are in a plan
        self.unsaved: dict[BlockKey, None] = {}  # not taken yet, the last tried at the end; some may be gone or queued
        self.blocks_durable = self.failed_batches = 0
        self.blocks_not_durable = 0  # at the first try

    def add(self, blocks: Iterable[DramBlock], *, used: bool = False) -> None:
        """Queue blocks that are neither durable nor queued; unless `used`, only blocks that the SSD tier admits."""
        ssd = self._tiers.ssd
        if ssd is None:
            return
        for block in blocks:
            if block in self.states or self._tiers.durable(block.info.key):
                continue
            if used or ssd.admission.admits(block.info, ssd.capacity_bytes // record_size(block.info)):
                self._tiers.dram.hold(block)
                self._move(block, SaveState.WAITING)
                self.waiting.append(block)
        if self.waiting:
            self._tiers.listener.work()

    def state_of(self, block: DramBlock) -> SaveState:
        """State of a block in DRAM."""
        if state := self.states.get(block):
            return state
        if self._tiers.durable(block.info.key):
            return SaveState.DURABLE
        return SaveState.UNSAVED if block.info.key in self.unsaved else SaveState.VISIBLE

    def _move(self, block: DramBlock, state: SaveState) -> None:
        """Change the state of a block, along `TRANSITIONS` only."""
        before = self.state_of(block)
        assert state in TRANSITIONS[before], f"a block cannot go from {before} to {state}"
        if state in _KNOWN:
            self.states[block] = state
        else:
            del self.states[block]

    @property
    def queued(self) -> set[BlockKey]:
        """Keys of blocks that wait or are being written, and were not recalled."""
        return {block.info.key for block, state in self.states.items() if state is not SaveState.RECALLED}

    @property
    def recalled(self) -> list[DramBlock]:
        """Blocks that plans write although the blocks are gone."""
        blocks = itertools.chain.from_iterable(plan.blocks for plan in self.committing.values())
        return [block for block in blocks if self.states[block] is SaveState.RECALLED]

    def lost(self, keys: Sequence[BlockKey]) -> None:
        """Durable blocks have gone with their disk: those that DRAM has are written anew."""
        self.removed(keys)
        self.add(filter(None, map(self._tiers.dram.get, keys)), used=True)

    def used(self, blocks: Iterable[DramBlock]) -> None:
        """Blocks are being used: those that were not admitted before are now."""
        if self._tiers.ssd is not None and self._tiers.ssd.admission.reused:
            self.add((block for block in blocks if block.info.key not in self.unsaved), used=True)

    def next_plan(self, disk: int = 0) -> WritePlan | None:
        """A disk's next batch for `SsdTier.commit`; None without work, or while a plan is under way."""
        ssd = self._tiers.ssd
        if ssd is None or disk in self.committing or ssd.disks[disk].out:
            return None
        recalled = {block.info.key for block in self.recalled}  # another disk writes what is gone for good
        batch = self._first_batch(itertools.takewhile(lambda block: block.info.key not in recalled, self.waiting))
        if not (batch or ssd.disks[disk].has_housekeeping):
            return None
        for _ in batch:
            self.waiting.popleft()
        plan = ssd.plan(batch, disk)
        for block in plan.blocks:
            self._move(block, SaveState.WRITING)
        self.committing[disk] = plan
        self.removed(plan.removed)
        self._not_durable(plan.rejected)
        return plan

    def _first_batch(self, blocks: Iterable[DramBlock]) -> list[DramBlock]:
        """The leading blocks that fit into one commit, at least one."""
        batch: list[DramBlock] = []
        nbytes = 0
        for block in blocks:
            nbytes += record_size(block.info)
            if batch and nbytes > self.batch_bytes:
                break
            batch.append(block)
        return batch

    def plan_done(self, error: BaseException | None, disk: int = 0, *, again: bool = False) -> None:
        """A disk's plan was committed, or failed with `error`; `again`: the plan's blocks are tried again at once."""
        plan, ssd = self.committing.pop(disk), self._tiers.ssd
        assert ssd is not None
        recalled = [block for block in plan.blocks if self.states[block] is SaveState.RECALLED]
        blocks = [block for block in plan.blocks if self.states[block] is SaveState.WRITING]
        for block in recalled:
            self._move(block, SaveState.DROPPED)
        if error is not None:
            self.failed_batches += 1
            ssd.failed(plan, error)
            self.removed(plan.lost)
            if again:
                for block in blocks:
                    self._move(block, SaveState.WAITING)
                self.waiting.extendleft(reversed(blocks))
            else:
                self._not_durable(blocks)
        else:
            ssd.committed(plan)
            self.removed(plan.lost)
            # Deleted while the plan wrote them: their records must go again (ADR 24).
            ssd.erase(place for block in recalled if (place := ssd.catalogue.find(block.info.key)) is not None)
            self._durable(blocks)
        self._tiers.release(recalled)

    @property
    def erasing(self) -> bool:
        """Whether something that was deleted may be on disk still."""
        return bool(self.recalled) or ((ssd := self._tiers.ssd) is not None and any(disk.erasing for disk in ssd.disks))

    def recall(self, blocks: Iterable[DramBlock]) -> None:
        """Blocks have left DRAM for good: none of them becomes durable."""
        queued = {block: state for block in blocks if (state := self.states.get(block)) in _QUEUED}
        waiting = [block for block, state in queued.items() if state is SaveState.WAITING]
        if waiting:
            self.waiting = collections.deque(block for block in self.waiting if block not in queued)
        for block, state in queued.items():
            self._move(block, SaveState.DROPPED if state is SaveState.WAITING else SaveState.RECALLED)
        self._tiers.release(waiting)

    def _durable(self, blocks: Sequence[DramBlock]) -> None:
        self.blocks_durable += len(blocks)
        retried = any(block.info.key in self.unsaved for block in blocks)
        for block in blocks:
            self._move(block, SaveState.DURABLE)
            self.unsaved.pop(block.info.key, None)
        self._tiers.release(blocks)
        self._on_durable([block.info.key for block in blocks])
        # The device takes blocks again: the next of those that it refused may follow.
        if retried:
            self.retry()

    def _not_durable(self, blocks: Sequence[DramBlock]) -> None:
        """Keep blocks in DRAM for as long as there is room; transfers go on waiting for them."""
        for block in blocks:
            key = block.info.key
            self._move(block, SaveState.UNSAVED)
            self.blocks_not_durable += key not in self.unsaved
            self.unsaved.pop(key, None)
            self.unsaved[key] = None
        self._tiers.release(blocks)
        if len(self.unsaved) > 2 * len(self._tiers.dram) + 1024:
            self.unsaved = dict.fromkeys(key for key in self.unsaved if key in self._tiers.dram)

    def retry(self) -> None:
        """Queue a batch of blocks that the SSD tier did not take; the next batch follows after success."""
        self.add(self._first_batch(self._to_retry()), used=True)

    def _to_retry(self) -> Iterator[DramBlock]:
        for key in list(self.unsaved):
            block = self._tiers.dram.get(key)
            if block is None:
                del self.unsaved[key]
            elif block not in self.states:
                yield block
