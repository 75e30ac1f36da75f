"""The contract of the eviction policies: an order in which blocks leave when room is needed.

A policy keeps only an order of keys: no bytes, clocks or I/O. The tier asks for candidates and evicts the first that is
neither pinned nor being read. For each request that reads a chain and stores missing blocks, the tier calls `touched`
with the blocks already there, `added` for every block that comes, and `arrived` once all are there.
"""

import abc
from collections.abc import Iterator, Sequence

from moonpool.base.kv.blocks import BlockInfo
from moonpool.base.kv.keys import BlockKey


class EvictionPolicy(abc.ABC):
    """An order of eviction over the keys that were added and not removed."""

    @abc.abstractmethod
    def added(self, info: BlockInfo) -> None:
        """A block came that the policy does not hold."""

    @abc.abstractmethod
    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Blocks from one chain, head first, were used together; all are held."""

    def arrived(self, chain: Sequence[BlockKey]) -> None:  # noqa: B027 (most policies have nothing to do)
        """All blocks from one chain that came together are held, head first. This is not a use."""

    @abc.abstractmethod
    def removed(self, key: BlockKey) -> None:
        """A block left, evicted or not."""

    @abc.abstractmethod
    def candidates(self) -> Iterator[BlockKey]:
        """Keys in the order in which they should leave; the policy is not changed during the walk."""
