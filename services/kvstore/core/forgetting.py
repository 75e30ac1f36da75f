"""Deleting blocks from both tiers, at one moment: from then on nobody finds them.

A read that has begun may end with what it has in DRAM; what it has not read from the SSD tier yet is a miss. Writing
sessions that bring deleted blocks end. Records are overwritten with the next plan (`SsdTier.erasing`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from moonpool.kv.blocks import DramBlock
from moonpool.kv.selection import Selection, ttl_of
from services.kvstore.core.assembly import PutSpec
from services.kvstore.core.store import BlockStore
from services.kvstore.ssd.catalogue import Place


@dataclasses.dataclass(frozen=True, slots=True)
class Forgotten:
    """Blocks that were here, and bytes of all their copies."""

    blocks: int = 0
    nbytes: int = 0


def forget(store: BlockStore, selection: Selection) -> Forgotten:
    """Deletes the chosen blocks. Looks at every block: 0.1 s for a million of them."""
    ssd, takes = store.tiers.ssd, selection.takes

    def concerns(spec: PutSpec) -> bool:
        return any(takes(key, spec.tenant, spec.format.namespace) for key in spec.keys)

    infos = ((block, block.info) for block in store.tiers.dram.values())
    blocks = [block for block, info in infos if takes(info.key, info.tenant, info.format.namespace)]
    return _remove(store, blocks, [] if ssd is None else ssd.catalogue.chosen(selection), concerns)


def expire(store: BlockStore, ttl_s: Mapping[str, float], now: float) -> Forgotten:
    """Deletes blocks that are in a tier for longer than `ttl_s` says of their tenant; `now` is seconds since 1970."""
    dram, ssd = store.tiers.dram, store.tiers.ssd
    blocks = [one for one in dram.values() if one.info.written_at < now - ttl_of(ttl_s, one.info.tenant)]
    return _remove(store, blocks, [] if ssd is None else ssd.catalogue.expired(ttl_s, now), lambda _: False)


def _remove(
    store: BlockStore, blocks: Sequence[DramBlock], places: Iterable[Place], concerns: Callable[[PutSpec], bool]
) -> Forgotten:
    dram, ssd = store.tiers.dram, store.tiers.ssd
    for block in blocks:
        dram.drop(block)
    keys, nbytes = [block.info.key for block in blocks], sum(block.info.nbytes for block in blocks)
    if ssd is not None:
        before = ssd.catalogue.live.total_bytes
        keys += ssd.erase(places)
        nbytes += before - ssd.catalogue.live.total_bytes
    store.writes.recall(set(blocks), concerns)
    store.tiers.removed(list(dict.fromkeys(keys)))
    store.tiers.listener.room()
    store.tiers.listener.work()
    return Forgotten(len(set(keys)), nbytes)
