"""Eviction policies of the DRAM tier: in which order blocks leave when room is needed.

A policy knows keys and what is known about a block; it owns an order and nothing else. It must not know of bytes,
budgets, holds, clocks or I/O: the tier asks for candidates and takes the first that may go. A new policy is a class
with these five methods and an entry in `POLICIES`.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from moonpool.kv.keys import BlockKey
from services.kvstore.blocks import BlockInfo


class EvictionPolicy(Protocol):
    """An order of eviction over the keys that were added and not removed."""

    def added(self, info: BlockInfo) -> None:
        """A block came that the policy does not hold."""
        ...

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of one chain, head first, were used together; all are held."""
        ...

    def removed(self, key: BlockKey) -> None:
        """A block left, evicted or not."""
        ...

    def candidates(self) -> Iterator[BlockKey]:
        """Keys in the order in which they should leave; not changed while it is walked."""
        ...

    def __len__(self) -> int:
        """Number of keys held."""
        ...


class LRU:
    """Least recently used first; of blocks used together a chain's tail leaves before its head.

    A chain without its head is useless, so the head counts as used last (as SGLang's radix cache and Mooncake evict).
    """

    def __init__(self) -> None:
        self._order: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()

    def added(self, info: BlockInfo) -> None:
        """The block counts as just used."""
        assert info.key not in self._order
        self._order[info.key] = None

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Moves the chain to the end, its head last."""
        for key in reversed(chain):
            self._order.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """Forgets the key."""
        del self._order[key]

    def candidates(self) -> Iterator[BlockKey]:
        """Oldest use first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LRU}
"""Policies by the name that the configuration uses."""
