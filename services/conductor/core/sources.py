"""Whom a prefix can be loaded from: a kvstore, or the pool of another prefill or decode instance."""

from collections.abc import Callable, Sequence
from itertools import islice

from services.conductor.core.decodes import Decode, Decodes
from services.conductor.core.prefills import Prefill, Prefills
from services.conductor.core.reads import Source
from services.conductor.core.sets import members
from services.conductor.core.stores import Stores, StoreView, by_reading

MAX_PEERS = 2
"""Engine instances that are considered for one prompt: of those that hold most, and of those that hold less."""
MAX_LOOKED_AT = 16
"""Of instances that hold equally much, so many are compared by how busy their links are."""
MAX_OTHERS = 2
"""Further instances to load a prefix from if the chosen one fails."""
Prefixes = Sequence[tuple[int, int]]


class Sources:
    """Finds them.

    Args:
        pools: of the engine instances; none = only kvstores are read from.
        stores: the kvstores; None = they are not read from.
    """

    def __init__(self, pools: Sequence[Prefills | Decodes], stores: Stores | None) -> None:
        self._pools = pools
        self._stores = stores

    def of(
        self,
        views: Sequence[StoreView],
        prefixes: Prefixes,
        suspects: Callable[[Prefills | Decodes], int],
        now: float,
    ) -> list[Source]:
        """Whom a request may load from: kvstores first, as they are to be read, then engine instances."""
        return [*self._kvstores(views, now), *self._peers(prefixes, suspects, now)]

    def _kvstores(self, views: Sequence[StoreView], now: float) -> list[Source]:
        """The best ones that hold something."""
        best = by_reading([view for view in views if view.blocks])[: 1 + MAX_OTHERS]
        links = [(view, store.link) for view in best if self._stores and (store := self._stores.get(view.id))]
        return [
            Source(
                view.id, view.blocks, link.wait_s(now), link.memory.known(now),
                warm=view.warm, cold_bytes_per_s=link.ssd.known(now),
            )
            for view, link in links
        ]  # fmt: skip

    def _peers(self, prefixes: Prefixes, suspects: Callable[[Prefills | Decodes], int], now: float) -> list[Source]:
        """Engine instances that hold most, and the best of those that hold less.

        Args:
            prefixes: who holds how much, as `Forest.match` says it.
            suspects: mask of the instances of a pool that are not asked.
            now: seconds.
        """
        there = [(pool, pool.mask & ~pool.draining & ~pool.resting & ~suspects(pool)) for pool in self._pools]
        allowed = sum([mask for _, mask in there])
        found: list[Source] = []
        for blocks, mask in reversed(prefixes):
            if len(found) == MAX_PEERS:
                break
            if here := mask & allowed:
                found.append(self._freest(blocks, here, now))
                allowed &= ~mask
        return found

    def _freest(self, blocks: int, mask: int, now: float) -> Source:
        holders = [self._at(slot) for slot in islice(members(mask), MAX_LOOKED_AT)]
        best = min(holders, key=lambda it: (it.link.wait_s(now), it.turn, it.facts.id))
        return Source(best.facts.id, blocks, best.link.wait_s(now), best.link.memory.known(now), peer=True)

    def _at(self, slot: int) -> Prefill | Decode:
        return next(pool.by_slot[slot] for pool in self._pools if slot in pool.by_slot)


def planned(sources: Sequence[Source], chosen: str, local_blocks: int, held_blocks: int) -> tuple[Source, ...]:
    """Whom to load from, the chosen one first, then who holds most; none when nothing is to be loaded.

    Where nobody is chosen as other prompts bring what the instance lacks, these may not: then it loads after all.

    Args:
        sources: those that were considered.
        chosen: by the prediction; "" = nobody.
        local_blocks: that the instance which loads holds itself, or will hold when other prompts are computed.
        held_blocks: that it holds now.
    """
    least = local_blocks if chosen else held_blocks
    holders = [source for source in sources if source.blocks > least] if chosen or held_blocks < local_blocks else []
    holders.sort(key=lambda source: (source.id != chosen, -source.blocks))
    return tuple(holders[: 1 + MAX_OTHERS])
