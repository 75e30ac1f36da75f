"""The DRAM tier: whole blocks within a budget of bytes.

Owns the blocks and the account of bytes: those of blocks, and those reserved for blocks that are still being written
or read in. Must not know of files, sessions, events or asyncio. Who needs a block to stay holds it; a held block is
never evicted.
"""

from collections.abc import Iterator, Sequence

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey
from services.kvstore.blocks import DramBlock
from services.kvstore.policy import EvictionPolicy


class DramTier:
    """Blocks in memory, evicted by `policy` when bytes are needed.

    Args:
        capacity_bytes: budget; blocks and reservations together never exceed it.
        policy: order of eviction.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        if capacity_bytes <= 0:
            raise ConfigError("dram_bytes", f"must be positive, is {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._policy = policy
        self._blocks: dict[BlockKey, DramBlock] = {}
        self.block_bytes = 0
        self.reserved_bytes = 0
        self.held_bytes = 0
        self.evictions = 0

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def get(self, key: BlockKey) -> DramBlock | None:
        """The block, without counting it as used."""
        return self._blocks.get(key)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Counts those of `chain` (head first) that are here as used now."""
        self._policy.touched([key for key in chain if key in self._blocks])

    @property
    def evictable_bytes(self) -> int:
        """Bytes of blocks that nobody holds."""
        return self.block_bytes - self.held_bytes

    def can_reserve(self, nbytes: int) -> bool:
        """Whether `reserve` would succeed."""
        return nbytes <= self.capacity_bytes - self.held_bytes - self.reserved_bytes

    def reserve(self, nbytes: int) -> list[BlockKey] | None:
        """Sets bytes aside, evicting what must go for it.

        Returns:
            The evicted keys, or None when holds and reservations leave too little; then nothing has changed.
        """
        if not self.can_reserve(nbytes):
            return None
        over = self.block_bytes + self.reserved_bytes + nbytes - self.capacity_bytes
        victims: list[BlockKey] = []
        for key in self._policy.candidates() if over > 0 else ():
            block = self._blocks[key]
            if block.holds:
                continue
            victims.append(key)
            over -= len(block.data)
            if over <= 0:
                break
        assert over <= 0
        for key in victims:
            self.discard(key)
        self.evictions += len(victims)
        self.reserved_bytes += nbytes
        return victims

    def unreserve(self, nbytes: int) -> None:
        """Gives reserved bytes back."""
        self.reserved_bytes -= nbytes
        assert self.reserved_bytes >= 0

    def insert(self, block: DramBlock) -> None:
        """Takes a whole block in, in the place of as many reserved bytes."""
        key, size = block.info.key, len(block.data)
        assert key not in self._blocks
        assert block.holds == 0
        self.unreserve(size)
        self._blocks[key] = block
        self._policy.added(block.info)
        self.block_bytes += size

    def discard(self, key: BlockKey) -> None:
        """Drops a block that nobody holds."""
        block = self._blocks.pop(key)
        assert block.holds == 0
        self._policy.removed(key)
        self.block_bytes -= len(block.data)

    def hold(self, block: DramBlock) -> None:
        """The block stays until it is let go as often as it was held."""
        if not block.holds:
            self.held_bytes += len(block.data)
        block.holds += 1

    def let_go(self, block: DramBlock) -> None:
        """Ends one hold."""
        assert block.holds > 0
        block.holds -= 1
        if not block.holds:
            self.held_bytes -= len(block.data)

    def check_invariants(self) -> None:
        """The account equals the blocks, within the budget, and the policy knows the same keys."""
        assert self.block_bytes == sum(len(block.data) for block in self._blocks.values())
        assert self.held_bytes == sum(len(block.data) for block in self._blocks.values() if block.holds)
        assert self.reserved_bytes >= 0
        assert self.block_bytes + self.reserved_bytes <= self.capacity_bytes
        assert set(self._policy.candidates()) == set(self._blocks)
        assert all(block.info.key == key and block.holds >= 0 for key, block in self._blocks.items())
