"""The kvstores: which of them holds how much of a chain, and which shall keep the chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from moonpool.base.kv import rendezvous
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.chain_forks import ChainForks
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.kv_links import KVLink
from moonpool.conductor.core.prefix_index import NO_SLOT
from moonpool.conductor.placement.base import make

MAX_REPLICAS = 8


class StorePool:
    """All kvstores.

    Args:
        replicas: stores that shall hold each chain, if there are so many.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._by_id: dict[str, StoreInstanceState] = {}
        self._weights: dict[str, float] = {}  # of those that take requests
        self._forks = ChainForks()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[StoreInstanceState]:
        return iter(self._by_id.values())

    def get(self, instance_id: str) -> StoreInstanceState | None:
        return self._by_id.get(instance_id)

    def add(self, store: StoreInstanceState) -> None:
        self._by_id[store.facts.id] = store
        self._weigh()

    def remove(self, store: StoreInstanceState) -> None:
        del self._by_id[store.facts.id]
        self._weigh()

    def report(self, store: StoreInstanceState, load: LoadFacts) -> None:
        weigh, store.load = load.draining != store.load.draining, load
        if weigh:
            self._weigh()

    def views(self, keys: Sequence[bytes], prompt_key: bytes, prefixes: Sequence[tuple[int, int]]) -> list[StoreView]:
        """Return the stores as a request sees them; `prefixes` are the result of `BlockTrie.match` for `keys`."""
        stores = [self._by_id[name] for name in self._weights]
        held: dict[int, int] = {}
        everyone = 0
        for store in stores:
            everyone |= 1 << store.slot
            if store.memory != NO_SLOT:
                everyone |= 1 << store.memory
        for blocks, mask in prefixes:
            if here := mask & everyone:
                held.update(dict.fromkeys(slots_in(here), blocks))
        views = []
        for store in stores:
            running, reads = store.load.running, len(store.link.reads)
            warm = None if store.memory == NO_SLOT else held.get(store.memory, 0)
            busy = running if running > reads else reads
            views.append(make(StoreView, (store.facts.id, held.get(store.slot, 0), busy, 0.0, warm)))
        # Scores decide among equals. If one store alone holds blocks, that store is read from and keeps the chain.
        alone = sum([view.blocks > 0 for view in views]) == 1 == self._replicas
        return views if alone else self._scored(keys, prompt_key, views)

    def _scored(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> list[StoreView]:
        """The views with scores for the first block that no store holds: the first that may be the chain's own."""
        longest = max([view.blocks for view in views], default=0)
        key = keys[min(longest, len(keys) - 1)] if keys else prompt_key
        return [view._replace(score=rendezvous.score(key, view.id, self._weights[view.id])) for view in views]

    def rows(self, key: bytes, prefixes: Sequence[tuple[int, int]]) -> RowsPlace | None:
        """Return which store keeps an encoded picture; None without stores.

        A store that holds the rows, else the one that rendezvous hashing says: so other engines find the rows there.

        Args:
            key: of the first block of the rows.
            prefixes: the result of `BlockTrie.match` for this key.
        """
        holders = 0
        for _, mask in prefixes:
            holders |= mask
        rated = [
            (bool(holders >> store.slot & 1), rendezvous.score(key, name, weight), name)
            for name, weight in self._weights.items()
            if (store := self._by_id[name])
        ]
        if not rated:
            return None
        held, _, name = max(rated)
        return RowsPlace(name, held)

    def write_back(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> tuple[StoreView, ...]:
        """The stores that shall hold the chain, also for a prompt without a full block: the answer may fill blocks."""
        holders = [view for view in views if view.blocks]
        longest = max([view.blocks for view in holders], default=0)
        parts = len(views) > self._replicas and 0 < longest < len(keys)  # else no decision is needed
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
        if len(holders) == self._replicas == 1 and not shared:
            return tuple(holders)  # as below
        rated = self._scored(keys, prompt_key, views) if shared else views
        return tuple(choose_write_back(rated, self._replicas, shared=shared))

    def digest(self) -> bytes:
        return digest_of(self._by_id, self._forks)

    def check_invariants(self) -> None:
        """Assert that ids and weights agree."""
        self._forks.check_invariants()
        assert all(store.facts.id == name for name, store in self._by_id.items())
        assert list(self._weights) == [name for name, store in self._by_id.items() if not store.load.draining]

    def _weigh(self) -> None:
        self._weights = rendezvous_weights(
            {name: store.facts.capacity_bytes for name, store in self._by_id.items() if not store.load.draining}
        )


@dataclass(slots=True)
class StoreInstanceState:
    """One kvstore.

    Prefixes are loaded over the store's `link`; `memory` is the slot of those in memory (`PrefixIndex`).
    """

    facts: InstanceFacts
    slot: int
    memory: int = NO_SLOT
    load: LoadFacts = field(default_factory=LoadFacts)
    link: KVLink = field(default_factory=KVLink)


class RowsPlace(NamedTuple):
    """Where the encoded rows of a picture are kept: the kvstore's id, and whether it holds them."""

    store: str
    held: bool


class StoreView(NamedTuple):
    """A kvstore's state for a request.

    `blocks`: leading blocks of the request's chain in the store. `warm`: those of them in memory, the others are on SSD
    only; None = unknown. `busy`: transfers that the store serves. `score`: of rendezvous hashing.
    """

    id: str
    blocks: int
    busy: int = 0
    score: float = 0.0
    warm: int | None = None


def in_reading_order(stores: Sequence[StoreView]) -> list[StoreView]:
    """Return the stores in the order to read the chain from: longest prefix, least busy, most in memory, score."""
    return sorted(stores, key=_reading_order)


def _reading_order(store: StoreView) -> tuple[int, int, int, float, str]:
    warm = store.blocks if store.warm is None else store.warm
    return -store.blocks, store.busy, -warm, -store.score, store.id


def choose_write_back(stores: Sequence[StoreView], copies: int, *, shared: bool = False) -> list[StoreView]:
    """Return the stores that shall hold the chain, at most `copies` of them, best first.

    A store that holds at least half as much as the best keeps the chain: completing the chain is quicker than filling
    another store. With `shared`, stores hold only a prefix that many chains share, and the score alone decides.
    """
    half = max((store.blocks for store in stores), default=0) / 2

    def order(store: StoreView) -> tuple[int, float, str]:
        kept = 0 if shared or store.blocks < half else store.blocks
        return -kept, -store.score, store.id

    return nsmallest(copies, stores, key=order)


def rendezvous_weights(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return rendezvous weights: capacities in bytes; an unknown capacity (0) counts as the mean of the others."""
    known = [capacity for capacity in capacities.values() if capacity > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: float(capacity) if capacity > 0 else usual for name, capacity in capacities.items()}
