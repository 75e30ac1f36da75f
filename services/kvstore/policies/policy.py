"""Eviction policies of the DRAM tier: in which order blocks leave when room is needed.

A policy knows keys and what is known about a block; it owns an order and nothing else. It must not know of bytes,
budgets, holds, clocks or I/O: the tier asks for candidates and takes the first that may go. A new policy is a module in
`services/kvstore/policies` with a class of these methods, and an entry in `POLICIES`. Time is what the policy has seen.

What a tier tells, in this order, of a request that reads a chain and stores what was missing of it: `touched` with what
was here, `added` for every block that came, `arrived` with what came once all of it is here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.policies.kv_aware import KVAware
from services.kvstore.policies.length_aware import LengthAware
from services.kvstore.policies.lfu import LFU
from services.kvstore.policies.lru import LRU
from services.kvstore.policies.s3_fifo import S3FIFO

__all__ = ["LFU", "LRU", "POLICIES", "S3FIFO", "EvictionPolicy", "KVAware", "LengthAware"]


class EvictionPolicy(Protocol):
    """An order of eviction over the keys that were added and not removed."""

    def added(self, info: BlockInfo) -> None:
        """A block came that the policy does not hold."""
        ...

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of one chain, head first, were used together; all are held."""
        ...

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of one chain, head first, that came together have all come; all are held. This is no use of them."""
        ...

    def removed(self, key: BlockKey) -> None:
        """A block left, evicted or not."""
        ...

    def candidates(self) -> Iterator[BlockKey]:
        """Keys in the order in which they should leave; the policy is not changed while it is walked."""
        ...

    def __len__(self) -> int:
        """Number of keys held."""
        ...

    def check_invariants(self) -> None:
        """The policy's parts agree with each other."""
        ...


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
    "s3-fifo": S3FIFO,
    "kv-aware": KVAware,
}
"""Policies by the name that the configuration uses."""
