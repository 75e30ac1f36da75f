"""Where a prefix can be loaded from: kvstores, and engine instances that hold the blocks."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import islice
from operator import or_

from moonpool.conductor.core.block_trie import Prefixes
from moonpool.conductor.core.decode_instance import DecodeInstanceState
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.prefill_pool import PrefillPool
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.store_pool import StorePool, StoreView, in_reading_order
from moonpool.conductor.placement.base import make

MAX_PEERS = 2
"""Engine instances considered for one prompt: among those with most blocks, and among those with fewer."""
MAX_LOOKED_AT = 16
"""Of instances that hold equally much, so many are compared by how busy their links are."""
MAX_FALLBACK_HOLDERS = 2
"""Further instances to load a prefix from if the chosen one fails."""


class PrefixSources:
    """The instances that a prefix can be loaded from.

    Args:
        pools: the engine instances' pools; none = only kvstores are read from.
        stores: the kvstores; None = they are not read from.
    """

    def __init__(self, pools: Sequence[PrefillPool | DecodePool], stores: StorePool | None) -> None:
        self._pools = pools
        self._stores = stores

    def of(
        self,
        views: Sequence[StoreView],
        prefixes: Prefixes,
        suspects: Callable[[PrefillPool | DecodePool], int],
        now: float,
    ) -> list[PrefixHolder]:
        """Instances a request may load from: kvstores first, in reading order, then engine instances."""
        return [*self._kvstores(views, now), *self._peers(prefixes, suspects, now)]

    def _kvstores(self, views: Sequence[StoreView], now: float) -> list[PrefixHolder]:
        """Return the best ones that hold something."""
        best = in_reading_order([view for view in views if view.blocks])[: 1 + MAX_FALLBACK_HOLDERS]
        links = [(view, store.link) for view in best if self._stores and (store := self._stores.get(view.id))]
        return [
            PrefixHolder(
                view.id, view.blocks, link.wait_s(now), link.memory.known(now),
                warm=view.warm, cold_bytes_per_s=link.ssd.known(now),
            )
            for view, link in links
        ]  # fmt: skip

    def _peers(
        self, prefixes: Prefixes, suspects: Callable[[PrefillPool | DecodePool], int], now: float
    ) -> list[PrefixHolder]:
        """Return the engine instances that hold most, and the best of those that hold less.

        Args:
            prefixes: instances by length of the prefix, as `BlockTrie.match` gives them.
            suspects: mask of a pool's instances that are not asked.
            now: seconds.
        """
        there = [pool.domain_mask("") & ~pool.draining_mask & ~pool.slow_mask & ~suspects(pool) for pool in self._pools]
        allowed = reduce(or_, there, 0)  # an instance in the role both is in both pools
        found: list[PrefixHolder] = []
        # The longest prefix, and a shorter one whose link may be freer.
        for blocks, mask in reversed(prefixes):
            if len(found) == MAX_PEERS:
                break
            if here := mask & allowed:
                found.append(self._freest(blocks, here, now))
                allowed &= ~mask
        return found

    def _freest(self, blocks: int, mask: int, now: float) -> PrefixHolder:
        if mask & (mask - 1):
            holders = [self._at(slot) for slot in islice(slots_in(mask), MAX_LOOKED_AT)]
            best = min(holders, key=lambda holder: (holder.link.wait_s(now), holder.turn, holder.facts.id))
        else:
            best = self._at(mask.bit_length() - 1)
        link = best.link
        return make(PrefixHolder, (best.facts.id, blocks, link.wait_s(now), link.memory.known(now), True, None, 0.0))

    def _at(self, slot: int) -> PrefillInstanceState | DecodeInstanceState:
        prefills, decodes = self._pools
        return prefills.by_slot[slot] if slot in prefills.by_slot else decodes.by_slot[slot]


def holders_to_load_from(
    sources: Sequence[PrefixHolder], chosen: str, local_blocks: int, held_blocks: int
) -> tuple[PrefixHolder, ...]:
    """Return the instances to load from: the chosen instance first, then by prefix length; none if no load is needed.

    If prompts in flight are expected to bring what the instance lacks, no source is chosen. Fallbacks are given all the
    same, as those prompts may fail.

    Args:
        sources: instances that were considered.
        chosen: id of the instance that the prediction assumes; "" = none.
        local_blocks: leading blocks that the loading instance holds, or will hold when prompts in flight are computed.
        held_blocks: leading blocks there now.
    """
    least = local_blocks if chosen else held_blocks
    holders = [source for source in sources if source.blocks > least] if chosen or held_blocks < local_blocks else []
    holders.sort(key=lambda source: (source.id != chosen, -source.blocks))
    return tuple(holders[: 1 + MAX_FALLBACK_HOLDERS])
