"""Which kvstore a chain is read from and which ones its new blocks go to (docs/stores.md has the reasons).

A store is of use for the leading blocks of a chain only, so the unit of placement is the whole chain: what a store
holds of it, it holds from the first block on. Whoever holds most of a chain keeps it. A chain that nobody holds, or
that parts here from a prefix which many share, goes to the stores that rendezvous hashing picks by the first block it
does not share.

Pure: no grpc, asyncio, clock or randomness. `Forks` remembers, everything else is a function of what the caller knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.kv import rendezvous

SHARED_BY = 4
"""A prefix that so many chains have continued in different ways is shared: more than a turn that was asked again."""

MAX_FORKS = 1 << 14
MAX_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class StoreView:
    """A kvstore as a request sees it.

    `blocks` are the leading blocks of the request's chain it holds, `busy` the sessions it serves, `score` how much
    rendezvous hashing wants the chain there.
    """

    id: str
    blocks: int
    busy: int = 0
    score: float = 0.0


def by_reading(stores: Sequence[StoreView]) -> list[StoreView]:
    """Return the stores in the order in which the chain had best be read: longest prefix, least busy, score."""
    return sorted(stores, key=lambda store: (-store.blocks, store.busy, -store.score, store.id))


def choose_write_back(stores: Sequence[StoreView], copies: int, *, shared: bool = False) -> list[StoreView]:
    """Return the stores that shall hold the chain, at most `copies` of them, the most wanted first.

    A store that holds at least half of what the best one does keeps the chain: it is quicker filled up than another
    is filled. With `shared`, nobody has it yet but for a prefix that is not its own, and the score alone decides.
    """
    half = max((store.blocks for store in stores), default=0) / 2

    def order(store: StoreView) -> tuple[int, float, str]:
        kept = 0 if shared or store.blocks < half else store.blocks
        return -kept, -store.score, store.id

    return sorted(stores, key=order)[:copies]


def weights(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return rendezvous weights: capacities in bytes; one that is not known (0) counts as the mean of the others."""
    known = [capacity for capacity in capacities.values() if capacity > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: float(capacity) if capacity > 0 else usual for name, capacity in capacities.items()}


def scores(key: bytes, capacities: Mapping[str, int]) -> dict[str, float]:
    """Return the score of each store for a key by weighted rendezvous hashing; the highest is preferred."""
    return {name: rendezvous.score(key, name, weight) for name, weight in weights(capacities).items()}


class Forks:
    """Where chains part: for each last held block the different blocks that followed it, in bounded memory.

    A conversation's next turn follows its tip, once. A block that ever new chains follow ends a prefix that they share,
    a system prompt, and those chains need not stay together. What was forgotten is learnt again.
    """

    def __init__(self, max_blocks: int = MAX_FORKS) -> None:
        """Remember nothing; beyond `max_blocks` blocks, the ones that were not met for longest are forgotten."""
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._limit = max_blocks
        self._followers: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._followers)

    def shared(self, block: bytes, follower: bytes) -> bool:
        """Note that a chain goes on from `block` with `follower`; tell whether `block` ends a shared prefix."""
        known = self._followers.pop(block, ())
        if len(known) < SHARED_BY and follower not in known:
            known = (*known, follower)
        self._followers[block] = known
        if len(self._followers) > self._limit:
            self._followers.popitem(last=False)
        return len(known) >= SHARED_BY

    def check_invariants(self) -> None:
        """Raise AssertionError when the memory is not what it says."""
        assert len(self._followers) <= self._limit
        for known in self._followers.values():
            assert 0 < len(set(known)) == len(known) <= SHARED_BY
