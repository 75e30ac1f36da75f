"""Least recently used."""

import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey


class LRU:
    """Least recently used first; of blocks used together a chain's tail leaves before its head.

    A chain without its head is useless, so the head counts as used last (as SGLang's radix cache and Mooncake evict).

    Args:
        tail_first: False for the textbook's order, in which a chain's head leaves first; for comparison only.
    """

    def __init__(self, *, tail_first: bool = True) -> None:
        self._order: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()
        self._tail_first = tail_first

    def added(self, info: BlockInfo) -> None:
        """The block counts as just used."""
        assert info.key not in self._order
        self._order[info.key] = None

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Moves the chain to the end, its head last."""
        for key in reversed(chain) if self._tail_first else chain:
            self._order.move_to_end(key)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Puts blocks that came head first in their order of leaving."""
        if self._tail_first:
            self.touched(chain)

    def removed(self, key: BlockKey) -> None:
        """Forgets the key."""
        del self._order[key]

    def candidates(self) -> Iterator[BlockKey]:
        """Oldest use first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def check_invariants(self) -> None:
        """Nothing but the order is kept."""
