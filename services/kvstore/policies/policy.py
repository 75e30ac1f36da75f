"""Eviction policies of the DRAM tier: the order in which blocks leave when room is needed.

A policy keeps an order of keys and nothing else: no bytes, clocks or I/O. The tier asks for candidates and evicts the
first that is neither pinned nor being read. A new policy is a class with the methods of `EvictionPolicy` and an entry
in `POLICIES`.

For each request that reads a chain and stores its missing blocks, the tier calls `touched` with the blocks it holds,
`added` for every block that comes, and `arrived` once all of them are there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.policies.kv_aware import KVAware
from services.kvstore.policies.lfu import LFU, LengthAware
from services.kvstore.policies.lru import LRU
from services.kvstore.policies.s3_fifo import S3FIFO

__all__ = ["LFU", "LRU", "POLICIES", "S3FIFO", "EvictionPolicy", "KVAware", "LengthAware"]


class EvictionPolicy(Protocol):
    """An order of eviction over the keys that were added and not removed; `len` is the number of keys held."""

    def added(self, info: BlockInfo) -> None:
        """A block came that the policy does not hold."""
        ...

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of one chain, head first, were used together; all are held."""
        ...

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """All blocks of one chain that came together are held, head first. This is not a use."""
        ...

    def removed(self, key: BlockKey) -> None:
        """A block left, evicted or not."""
        ...

    def candidates(self) -> Iterator[BlockKey]:
        """Keys in the order in which they should leave; the policy is not changed during the walk."""
        ...

    def __len__(self) -> int: ...

    def check_invariants(self) -> None:
        """Asserts that the policy's parts agree with each other."""
        ...


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
    "s3-fifo": S3FIFO,
    "kv-aware": KVAware,
}
"""Policies by the name that the configuration uses."""
