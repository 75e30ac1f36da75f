"""Least recently used."""

import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey


class LRU:
    """Least recently used first; of blocks used together a chain's tail leaves before its head.

    Blocks behind a missing one cannot be used, so the head counts as used last (as SGLang's radix cache and Mooncake
    evict).
    """

    def __init__(self) -> None:
        self._order: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._order
        self._order[info.key] = None

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in reversed(chain):
            self._order.move_to_end(key)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Puts blocks that came head first in their order of leaving."""
        self.touched(chain)

    def removed(self, key: BlockKey) -> None:
        del self._order[key]

    def candidates(self) -> Iterator[BlockKey]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def check_invariants(self) -> None:
        """The order is all there is."""
