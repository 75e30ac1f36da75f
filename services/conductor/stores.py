"""Which kvstore a chain is read from and which ones its new blocks go to (docs/stores.md has the reasons).

Only leading blocks of a chain are of use, so the unit of placement is the whole chain: a store holds it from the first
block on. The store that holds most of a chain keeps it. A chain that no store holds, or that leaves a prefix which many
chains share, goes to the stores that rendezvous hashing picks by its first own block. Pure, except that `Forks` has
memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.kv import rendezvous

SHARED_BY = 4
"""A prefix that so many different chains continue is shared; fewer may be one turn asked again."""

MAX_FORKS = 1 << 14
MAX_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class StoreView:
    """A kvstore as a request sees it.

    `blocks` are the leading blocks of the request's chain it holds, `busy` the sessions it serves, `score` that of
    rendezvous hashing.
    """

    id: str
    blocks: int
    busy: int = 0
    score: float = 0.0


def by_reading(stores: Sequence[StoreView]) -> list[StoreView]:
    """Return the stores in the order to read the chain from: longest prefix, least busy, highest score."""
    return sorted(stores, key=lambda store: (-store.blocks, store.busy, -store.score, store.id))


def choose_write_back(stores: Sequence[StoreView], copies: int, *, shared: bool = False) -> list[StoreView]:
    """Return the stores that shall hold the chain, at most `copies` of them, best first.

    A store that holds at least half of what the best one does keeps the chain: completing it is quicker than filling
    another. With `shared`, stores hold only a prefix that many chains share, and the score alone decides.
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
