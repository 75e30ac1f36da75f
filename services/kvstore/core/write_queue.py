"""Blocks on their way from DRAM to the SSD tier, in batches.

A block that waits is held, so that writers wait for room when the device is slower than they are. A block that the
device did not take stays in DRAM without a hold and is tried again: by `retry`, or when a writer offers it again.
Commits are done elsewhere, between `next_plan` and `plan_done`, one at a time per disk: each disk takes the next blocks
when it is free.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from moonpool.kv.blocks import DramBlock
from moonpool.kv.keys import BlockKey
from services.kvstore.core.tiered_store import TieredStore
from services.kvstore.ssd.commit import WritePlan
from services.kvstore.ssd.records import record_size


class WriteQueue:
    """The queue to the SSD tier, if there is one; `on_durable` is told keys of blocks that were committed.

    One commit has at most `batch_bytes`, unless one block is larger.
    """

    def __init__(self, tiers: TieredStore, on_durable: Callable[[Sequence[BlockKey]], None], batch_bytes: int) -> None:
        self._tiers = tiers
        self.removed = tiers.removed  # announces keys that have left a tier
        self._on_durable = on_durable
        # A plan cannot reclaim what it stores itself: what it refused for that, the next one would have taken.
        for disk in () if tiers.ssd is None else tiers.ssd.disks:
            batch_bytes = min(batch_bytes, disk.space.capacity_bytes // 2)
        self.batch_bytes = batch_bytes
        self.waiting: collections.deque[DramBlock] = collections.deque()
        self.committing: dict[int, WritePlan] = {}  # by disk
        self.recalled: set[DramBlock] = set()  # gone for good while a plan under way writes them
        self.queued: set[BlockKey] = set()  # in the queue or in a plan under way
        self.unsaved: dict[BlockKey, None] = {}  # not taken yet, the last tried at the end; some may be gone or queued
        self.blocks_durable = self.failed_batches = 0
        self.blocks_not_durable = 0  # at the first try

    def add(self, blocks: Iterable[DramBlock], *, used: bool = False) -> None:
        """Queues those blocks that are neither durable nor queued; if they are not `used`, those that are admitted."""
        ssd = self._tiers.ssd
        if ssd is None:
            return
        for block in blocks:
            key = block.info.key
            if key in self.queued or self._tiers.durable(key):
                continue
            if used or ssd.admission.admits(block.info, ssd.capacity_bytes // record_size(block.info)):
                self._tiers.dram.hold(block)
                self.queued.add(key)
                self.waiting.append(block)
        if self.waiting:
            self._tiers.listener.work()

    def lost(self, keys: Sequence[BlockKey]) -> None:
        """Durable blocks have gone with their disk: those that DRAM has are written anew."""
        self.removed(keys)
        self.add(filter(None, map(self._tiers.dram.get, keys)), used=True)

    def used(self, blocks: Iterable[DramBlock]) -> None:
        """Blocks are being used: those that were not admitted before are now."""
        if self._tiers.ssd is not None and self._tiers.ssd.admission.reused:
            self.add((block for block in blocks if block.info.key not in self.unsaved), used=True)

    def next_plan(self, disk: int = 0) -> WritePlan | None:
        """A disk's next batch for `SsdTier.commit`; None when there is nothing to do, or one is under way."""
        ssd = self._tiers.ssd
        if ssd is None or disk in self.committing or ssd.disks[disk].out:
            return None
        coming = {block.info.key for block in self.recalled}  # another disk writes what is gone for good
        batch = self._first_batch(itertools.takewhile(lambda block: block.info.key not in coming, self.waiting))
        if not (batch or ssd.disks[disk].has_housekeeping):
            return None
        for _ in batch:
            self.waiting.popleft()
        plan = self.committing[disk] = ssd.plan(batch, disk)
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
        """A disk's plan was committed, or failed with `error`; `again`: its blocks are tried again at once."""
        plan, ssd = self.committing.pop(disk), self._tiers.ssd
        assert ssd is not None
        recalled = self.recalled.intersection(plan.blocks)
        self.recalled -= recalled
        blocks = [block for block in plan.blocks if block not in recalled]
        if error is not None:
            self.failed_batches += 1
            ssd.failed(plan, error)
            self.removed(plan.lost)
            if again:
                self.waiting.extendleft(reversed(blocks))
            else:
                self._not_durable(blocks)
        else:
            ssd.committed(plan)
            self.removed(plan.lost)
            ssd.erase(place for block in recalled if (place := ssd.catalogue.find(block.info.key)) is not None)
            self._durable(blocks)
        self._tiers.release(list(recalled))

    @property
    def erasing(self) -> bool:
        """Whether something that was deleted may be on disk still."""
        return bool(self.recalled) or ((ssd := self._tiers.ssd) is not None and any(disk.erasing for disk in ssd.disks))

    def recall(self, blocks: Iterable[DramBlock]) -> None:
        """Blocks have left DRAM for good: none of them becomes durable."""
        coming = {block for block in blocks if block.info.key in self.queued}
        if not coming:
            return
        waiting = [block for block in self.waiting if block in coming]
        self.waiting = collections.deque(block for block in self.waiting if block not in coming)
        writing = coming.intersection(block for plan in self.committing.values() for block in plan.blocks)
        self.recalled |= writing
        self.queued.difference_update(block.info.key for block in (*waiting, *writing))
        self._tiers.release(waiting)

    def _durable(self, blocks: Sequence[DramBlock]) -> None:
        self.blocks_durable += len(blocks)
        retried = any(block.info.key in self.unsaved for block in blocks)
        for block in blocks:
            key = block.info.key
            self.queued.remove(key)
            self.unsaved.pop(key, None)
        self._tiers.release(blocks)
        self._on_durable([block.info.key for block in blocks])
        if retried:
            self.retry()

    def _not_durable(self, blocks: Sequence[DramBlock]) -> None:
        """Keeps blocks in DRAM for as long as there is room; sessions go on waiting for them."""
        for block in blocks:
            key = block.info.key
            self.queued.remove(key)
            self.blocks_not_durable += key not in self.unsaved
            self.unsaved.pop(key, None)
            self.unsaved[key] = None
        self._tiers.release(blocks)
        if len(self.unsaved) > 2 * len(self._tiers.dram) + 1024:
            self.unsaved = dict.fromkeys(key for key in self.unsaved if key in self._tiers.dram)

    def retry(self) -> None:
        """Queues one batch of the blocks that the SSD tier did not take; when it succeeds, the next one follows."""
        self.add(self._first_batch(self._to_retry()), used=True)

    def _to_retry(self) -> Iterator[DramBlock]:
        for key in list(self.unsaved):
            block = self._tiers.dram.get(key)
            if block is None:
                del self.unsaved[key]
            elif key not in self.queued:
                yield block
