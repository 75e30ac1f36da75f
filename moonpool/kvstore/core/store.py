"""The whole store: tiers, puts, read leases, and deleting blocks from both tiers.

A block is assembled; then the block is whole in DRAM (VISIBLE), and held until the SSD tier has committed the block
(DURABLE). Used by the event loop's thread only; device reads and commits run elsewhere, and their results are reported
here.

Deletions run in steps between which others may run: with the first step, puts that bring such blocks end; a block that
moves between the tiers stays in the same part of all keys, so no block is missed.
"""

import dataclasses
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence

from moonpool.base.kv.blocks import PARTS, BlockInfo, DramBlock
from moonpool.base.kv.delete_kv import DeletionIndex, KVSelection, ttl_of
from moonpool.base.kv.keys import BlockKey, with_window_keys
from moonpool.kvstore.core.put_transfers import PutTransfers
from moonpool.kvstore.core.read_leases import ReadLeases
from moonpool.kvstore.core.tiered_store import StoreListener, TieredStore
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.ssd.catalogue import RecordFilter, RecordLocation
from moonpool.kvstore.ssd.tier import SsdTier

STEP_BLOCKS = 2048  # deleted in one step, some 20 ms, or looked at; but at least one part of all keys


@dataclasses.dataclass(frozen=True, slots=True)
class DeletedCount:
    """Blocks that were here, and bytes of all their copies."""

    blocks: int = 0
    nbytes: int = 0

    def __add__(self, other: "DeletedCount") -> "DeletedCount":
        return DeletedCount(self.blocks + other.blocks, self.nbytes + other.nbytes)


DeletionSteps = Generator[None, None, DeletedCount]


class BlockStore:
    """Everything one kvstore holds.

    At most `max_transfers` write at once, and as many read; leases keep at most `lease_bytes` of DRAM, None: all.
    """

    def __init__(
        self,
        dram: DramTier,
        ssd: SsdTier | None,
        listener: StoreListener | None = None,
        *,
        max_transfers: int = 1024,
        batch_bytes: int = 32 << 20,
        lease_bytes: int | None = None,
        deletions: DeletionIndex | None = None,
    ) -> None:
        self.tiers = TieredStore(dram, ssd, listener or StoreListener())
        deletions = DeletionIndex() if deletions is None else deletions
        self.writes = PutTransfers(self.tiers, deletions, max_transfers=max_transfers, batch_bytes=batch_bytes)
        lease_bytes = dram.capacity_bytes if lease_bytes is None else lease_bytes
        self.reads = ReadLeases(self.tiers, self.writes, max_transfers=max_transfers, lease_bytes=lease_bytes)

    def delete_selected(self, selection: KVSelection, step_blocks: int = STEP_BLOCKS) -> DeletionSteps:
        """Delete a selection's blocks, in steps of `step_blocks`; return how many were deleted."""
        self.writes.end_matching(selection)

        def in_dram(info: BlockInfo) -> bool:
            return selection.matches(info.key, info.tenant, info.format.namespace)

        on_ssd = self.tiers.catalogue.chosen(selection)
        deleted = yield from self._sweep(in_dram, on_ssd, step_blocks)
        yield from self._erase_dead(on_ssd, step_blocks)
        return deleted

    def delete_keys(self, keys: Sequence[BlockKey]) -> DeletedCount:
        """Delete a few blocks by key, at once. Dead copies of them stay on the disk until their segments go."""
        tiers, keys = self.tiers, list(dict.fromkeys(with_window_keys(keys)))
        self.writes.end_matching(KVSelection(frozenset(keys)))
        blocks, places = map(tiers.dram.get, keys), map(tiers.catalogue.find, keys)
        deleted = self._remove(list(filter(None, blocks)), filter(None, places))
        tiers.listener.room()
        tiers.listener.work()
        return deleted

    def delete_encrypted(self, key_ids: Container[str]) -> DeletionSteps:
        """Delete what some keys encrypt on SSD, in steps."""
        on_ssd = self.tiers.catalogue.encrypted_with(key_ids)
        deleted = yield from self._sweep(lambda info: False, on_ssd, STEP_BLOCKS)
        yield from self._erase_dead(on_ssd, STEP_BLOCKS)
        return deleted

    def delete_expired(self, ttl_s: Mapping[str, float], now: float) -> DeletionSteps:
        """Delete blocks that are in a tier for longer than the `ttl_s` of their tenant; `now`: seconds since 1970."""
        on_ssd = self.tiers.catalogue.expired(ttl_s, now)
        return self._sweep(lambda info: info.written_at < now - ttl_of(ttl_s, info.tenant), on_ssd, STEP_BLOCKS)

    def _sweep(self, in_dram: Callable[[BlockInfo], bool], on_ssd: RecordFilter, step_blocks: int) -> DeletionSteps:
        dram, catalogue = self.tiers.dram, self.tiers.catalogue
        deleted, looked_at = DeletedCount(), 0
        for part in range(PARTS):
            more = True
            while more:
                blocks = [block for block in dram.parts[part].values() if in_dram(block.info)][:step_blocks]
                places = catalogue.places(part, on_ssd)[:step_blocks]
                looked_at += len(dram.parts[part]) + len(catalogue.parts[part])
                if blocks or places:
                    deleted += self._remove(blocks, places)
                more = step_blocks in (len(blocks), len(places))  # then the part is looked at once more
                if more or looked_at >= step_blocks:
                    looked_at = 0
                    yield
        self.tiers.listener.room()
        self.tiers.listener.work()
        return deleted

    def _remove(self, blocks: Sequence[DramBlock], places: Iterable[RecordLocation]) -> DeletedCount:
        dram, ssd = self.tiers.dram, self.tiers.ssd
        for block in blocks:
            dram.drop(block)
        keys, nbytes = [block.info.key for block in blocks], sum(block.info.nbytes for block in blocks)
        if ssd is not None:
            before = ssd.catalogue.live.total_bytes
            keys += ssd.erase(places)
            nbytes += before - ssd.catalogue.live.total_bytes
        self.writes.on_removed(blocks)
        keys = list(dict.fromkeys(keys))
        self.tiers.removed(keys)
        return DeletedCount(len(keys), nbytes)

    def _erase_dead(self, on_ssd: RecordFilter, step_blocks: int) -> Generator[None, None, None]:
        """Have dead copies overwritten too: without an index, a start would find them again."""
        ssd, catalogue = self.tiers.ssd, self.tiers.catalogue
        for segment in list(catalogue.segments.values()):
            for first in range(0, len(segment.keys), step_blocks):
                if ssd is not None and catalogue.segments.get(segment.id) is segment:
                    rows = range(first, min(first + step_blocks, len(segment.keys)))
                    ssd.erase(catalogue.dead(segment, rows, on_ssd))
                    yield
        if ssd is not None:  # at the end: dead copies that were not reached may have been reclaimed meanwhile
            ssd.erase_tails()
        self.tiers.listener.work()
