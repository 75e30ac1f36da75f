"""Deleting blocks from both tiers, in steps between which others may run.

With the first step, writing sessions that bring such blocks end. The steps go through the parts of all keys: a block
that moves between the tiers stays in its part, so none is missed. A read that has begun may end with what it has in
DRAM; what it has not read from the SSD tier yet is a miss, unless its segment was being rewritten when it began: then
it reads on, and nothing of it is kept (`Reads.close`). Records are overwritten with the next plans.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from moonpool.kv.blocks import BlockInfo, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.parts import PARTS
from moonpool.kv.selection import Selection, ttl_of
from services.kvstore.core.store import BlockStore
from services.kvstore.ssd.catalogue import Place, Wanted

STEP_BLOCKS = 2048  # deleted in one step, some 20 ms, or looked at; but one part of all at least


@dataclasses.dataclass(frozen=True, slots=True)
class Forgotten:
    """Blocks that were here, and bytes of all their copies."""

    blocks: int = 0
    nbytes: int = 0

    def __add__(self, other: "Forgotten") -> "Forgotten":
        return Forgotten(self.blocks + other.blocks, self.nbytes + other.nbytes)


Steps = Generator[None, None, Forgotten]


def forget(store: BlockStore, selection: Selection, step_blocks: int = STEP_BLOCKS) -> Steps:
    """Deletes the chosen blocks."""
    store.writes.forget(selection)

    def in_dram(info: BlockInfo) -> bool:
        return selection.takes(info.key, info.tenant, info.format.namespace)

    on_ssd = store.tiers.catalogue.chosen(selection)
    forgotten = yield from _sweep(store, in_dram, on_ssd, step_blocks)
    yield from _erase_dead(store, on_ssd, step_blocks)
    return forgotten


def drop(store: BlockStore, keys: Sequence[BlockKey]) -> Forgotten:
    """Deletes a few blocks by key, at once. Dead copies of them stay on the disk until their segments go."""
    tiers, keys = store.tiers, list(dict.fromkeys(keys))
    store.writes.forget(Selection(frozenset(keys)))
    blocks, places = map(tiers.dram.get, keys), map(tiers.catalogue.find, keys)
    dropped = _remove(store, list(filter(None, blocks)), filter(None, places))
    tiers.listener.room()
    tiers.listener.work()
    return dropped


def expire(store: BlockStore, ttl_s: Mapping[str, float], now: float) -> Steps:
    """Deletes blocks that are in a tier for longer than `ttl_s` says of their tenant; `now` is seconds since 1970."""
    on_ssd = store.tiers.catalogue.expired(ttl_s, now)
    return _sweep(store, lambda info: info.written_at < now - ttl_of(ttl_s, info.tenant), on_ssd, STEP_BLOCKS)


def _sweep(store: BlockStore, in_dram: Callable[[BlockInfo], bool], on_ssd: Wanted, step_blocks: int) -> Steps:
    dram, catalogue = store.tiers.dram, store.tiers.catalogue
    forgotten, looked_at = Forgotten(), 0
    for part in range(PARTS):
        more = True
        while more:
            blocks = [block for block in dram.parts[part].values() if in_dram(block.info)][:step_blocks]
            places = catalogue.places(part, on_ssd)[:step_blocks]
            looked_at += len(dram.parts[part]) + len(catalogue.parts[part])
            if blocks or places:
                forgotten += _remove(store, blocks, places)
            more = step_blocks in (len(blocks), len(places))  # then the part is looked at once more
            if more or looked_at >= step_blocks:
                looked_at = 0
                yield
    store.tiers.listener.room()
    store.tiers.listener.work()
    return forgotten


def _remove(store: BlockStore, blocks: Sequence[DramBlock], places: Iterable[Place]) -> Forgotten:
    dram, ssd = store.tiers.dram, store.tiers.ssd
    for block in blocks:
        dram.drop(block)
    keys, nbytes = [block.info.key for block in blocks], sum(block.info.nbytes for block in blocks)
    if ssd is not None:
        before = ssd.catalogue.live.total_bytes
        keys += ssd.erase(places)
        nbytes += before - ssd.catalogue.live.total_bytes
    store.writes.recall(blocks)
    keys = list(dict.fromkeys(keys))
    store.tiers.removed(keys)
    return Forgotten(len(keys), nbytes)


def _erase_dead(store: BlockStore, on_ssd: Wanted, step_blocks: int) -> Generator[None, None, None]:
    """Has dead copies overwritten too: without an index, a start would find them again."""
    ssd, catalogue = store.tiers.ssd, store.tiers.catalogue
    for segment in list(catalogue.segments.values()):
        for first in range(0, len(segment.keys), step_blocks):
            if ssd is not None and catalogue.segments.get(segment.id) is segment:
                slots = range(first, min(first + step_blocks, len(segment.keys)))
                ssd.erase(catalogue.dead(segment, slots, on_ssd))
                yield
    if ssd is not None:  # at the end: dead copies that were not reached may have been reclaimed meanwhile
        ssd.erase_tails()
    store.tiers.listener.work()
