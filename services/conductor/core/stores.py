"""Which kvstore a chain is read from and which ones its new blocks go to (docs/stores.md has the reasons).

Only leading blocks of a chain are of use, so the unit of placement is the whole chain: a store holds it from the first
block on. The store that holds most of a chain keeps it. A chain that no store holds, or that leaves a prefix which many
chains share, goes to the stores that rendezvous hashing picks by its first own block.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from moonpool.core.digest import digest_of
from moonpool.kv import rendezvous
from services.conductor.core.facts import InstanceFacts, LoadFacts
from services.conductor.core.index import NO_SLOT
from services.conductor.core.reads import Link
from services.conductor.core.sets import members

SHARED_BY = 4
"""A prefix that so many different chains continue is shared; fewer may be one turn asked again."""

MAX_FORKS = 1 << 14
MAX_REPLICAS = 8


class StoreView(NamedTuple):
    """A kvstore as a request sees it.

    `blocks` are the leading blocks of the request's chain it holds, `busy` the sessions it serves, `score` that of
    rendezvous hashing. `warm` of the blocks are in its memory, the others on its SSD only; None = it does not tell.
    """

    id: str
    blocks: int
    busy: int = 0
    score: float = 0.0
    warm: int | None = None


def by_reading(stores: Sequence[StoreView]) -> list[StoreView]:
    """Return the stores in the order to read the chain from: longest prefix, least busy, most in memory, score."""
    return sorted(stores, key=_reading_order)


def _reading_order(store: StoreView) -> tuple[int, int, int, float, str]:
    warm = store.blocks if store.warm is None else store.warm
    return -store.blocks, store.busy, -warm, -store.score, store.id


def choose_write_back(stores: Sequence[StoreView], copies: int, *, shared: bool = False) -> list[StoreView]:
    """Return the stores that shall hold the chain, at most `copies` of them, best first.

    A store that holds at least half of what the best one does keeps the chain: completing it is quicker than filling
    another. With `shared`, stores hold only a prefix that many chains share, and the score alone decides.
    """
    half = max((store.blocks for store in stores), default=0) / 2

    def order(store: StoreView) -> tuple[int, float, str]:
        kept = 0 if shared or store.blocks < half else store.blocks
        return -kept, -store.score, store.id

    return nsmallest(copies, stores, key=order)


def weights(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return rendezvous weights: capacities in bytes; one that is not known (0) counts as the mean of the others."""
    known = [capacity for capacity in capacities.values() if capacity > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: float(capacity) if capacity > 0 else usual for name, capacity in capacities.items()}


class Forks:
    """Where chains fork: for each last held block the different blocks that followed it, in bounded memory.

    A conversation's next turn follows its last block once. A block that many different chains follow ends a prefix that
    they share, such as a system prompt, and those chains may go to different stores.
    """

    def __init__(self, max_blocks: int = MAX_FORKS) -> None:
        """Start empty; beyond `max_blocks` blocks, the least recently met are dropped."""
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._limit = max_blocks
        self._followers: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._followers)

    def shared(self, block: bytes, follower: bytes) -> bool:
        """Note that a chain continues `block` with `follower`; return whether `block` ends a shared prefix."""
        known = self._followers.pop(block, ())
        if len(known) < SHARED_BY and follower not in known:
            known = (*known, follower)
        self._followers[block] = known
        if len(self._followers) > self._limit:
            self._followers.popitem(last=False)
        return len(known) >= SHARED_BY

    def check_invariants(self) -> None:
        """Raise AssertionError when the memory is inconsistent."""
        assert len(self._followers) <= self._limit
        for known in self._followers.values():
            assert 0 < len(set(known)) == len(known) <= SHARED_BY


@dataclass(slots=True)
class Store:
    """One kvstore. Prefixes are loaded over its `link`; `memory` is the slot of those in memory (`PrefixIndex`)."""

    facts: InstanceFacts
    slot: int
    memory: int = NO_SLOT
    load: LoadFacts = field(default_factory=LoadFacts)
    link: Link = field(default_factory=Link)


class Stores:
    """All kvstores.

    Args:
        replicas: stores that shall hold each chain, if there are so many.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._by_id: dict[str, Store] = {}
        self._weights: dict[str, float] = {}  # of those that take requests
        self._forks = Forks()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Store]:
        """All, in order of joining."""
        return iter(self._by_id.values())

    def get(self, instance_id: str) -> Store | None:
        """The store of that id."""
        return self._by_id.get(instance_id)

    def add(self, store: Store) -> None:
        """Takes a store in."""
        self._by_id[store.facts.id] = store
        self._weigh()

    def remove(self, store: Store) -> None:
        """Takes a store out."""
        del self._by_id[store.facts.id]
        self._weigh()

    def report(self, store: Store, load: LoadFacts) -> None:
        """Takes a report."""
        weigh, store.load = load.draining != store.load.draining, load
        if weigh:
            self._weigh()

    def views(self, keys: Sequence[bytes], prompt_key: bytes, prefixes: Sequence[tuple[int, int]]) -> list[StoreView]:
        """The stores as a request sees them; `prefixes` are what `Forest.match` gives for its keys."""
        stores = [self._by_id[name] for name in self._weights]
        held: dict[int, int] = {}
        everyone = 0
        for store in stores:
            everyone |= 1 << store.slot
            if store.memory != NO_SLOT:
                everyone |= 1 << store.memory
        for blocks, mask in prefixes:
            if here := mask & everyone:
                held.update(dict.fromkeys(members(here), blocks))
        views = [
            StoreView(
                store.facts.id,
                held.get(store.slot, 0),
                max(store.load.running, len(store.link.reads)),
                0.0,
                None if store.memory == NO_SLOT else held.get(store.memory, 0),
            )
            for store in stores
        ]
        # Scores decide among equals. Where one store alone holds something, it is read from and keeps the chain.
        alone = sum([view.blocks > 0 for view in views]) == 1 == self._replicas
        return views if alone else self._scored(keys, prompt_key, views)

    def _scored(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> list[StoreView]:
        """The views with scores for the first block that no store holds: the first that may be the chain's own."""
        longest = max([view.blocks for view in views], default=0)
        key = keys[min(longest, len(keys) - 1)] if keys else prompt_key
        return [view._replace(score=rendezvous.score(key, view.id, self._weights[view.id])) for view in views]

    def write_back(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> tuple[StoreView, ...]:
        """The stores that shall hold the chain, also for a prompt without a full block: its answer may fill some."""
        longest = max([view.blocks for view in views], default=0)
        parts = len(views) > self._replicas and 0 < longest < len(keys)  # else there is nothing to decide
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
        rated = self._scored(keys, prompt_key, views) if shared else views
        return tuple(choose_write_back(rated, self._replicas, shared=shared))

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._by_id, self._forks)

    def check_invariants(self) -> None:
        """Asserts that ids and weights agree."""
        self._forks.check_invariants()
        assert all(store.facts.id == name for name, store in self._by_id.items())
        assert list(self._weights) == [name for name, store in self._by_id.items() if not store.load.draining]

    def _weigh(self) -> None:
        self._weights = weights(
            {name: store.facts.capacity_bytes for name, store in self._by_id.items() if not store.load.draining}
        )
