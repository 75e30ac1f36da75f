"""The DRAM tier: whole blocks, and bytes reserved for blocks that are being written or read in, within a budget.

A user of a block holds it. A held block is never evicted, nor is one that is pinned or that its tenant is guaranteed.
"""

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence

from moonpool.errors import ConfigError, InvalidRequest, Overloaded
from moonpool.kv.blocks import BlockInfo, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.parts import PartTable
from services.kvstore.dram.arena import Arena
from services.kvstore.policies.policy import EvictionPolicy
from services.kvstore.tenancy.pins import PinChange, Pins
from services.kvstore.tenancy.protection import Protection
from services.kvstore.tenancy.tenants import Account

RETRY_AFTER_S = 1.0


class DramTier:
    """Blocks in memory, evicted in the order of `policy` when bytes are needed.

    Args:
        capacity_bytes: budget; blocks and reservations together never exceed it.
        policy: order of eviction. It holds all blocks but pinned ones, which count as new when they are released.
        pins: which blocks are pinned.
        account: what tenants are granted.

    Attributes:
        protection: what may not be evicted, beside what is held.
        arena: where the bytes lie.
        block_bytes, reserved_bytes: the two parts of the budget that are taken.
        held_bytes, pinned_bytes, fixed_bytes: of blocks that are held, that are pinned, and that are either.
        evictions: blocks evicted since the start.
    """

    def __init__(
        self, capacity_bytes: int, policy: EvictionPolicy, *, pins: Pins | None = None, account: Account | None = None
    ) -> None:
        if capacity_bytes <= 0:
            raise ConfigError("dram_bytes", f"must be positive, is {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.pins = Pins() if pins is None else pins
        self.account = Account() if account is None else account
        self.protection = Protection(self.pins.__contains__, self.account)
        self.arena = Arena(capacity_bytes)
        self._policy = policy
        self._blocks = PartTable[DramBlock]()
        self._reserved: collections.Counter[str] = collections.Counter()
        self._fixed: collections.Counter[str] = collections.Counter()  # bytes of held or pinned blocks by tenant
        self._pinned: collections.Counter[str] = collections.Counter()  # those of pinned ones
        self.block_bytes = 0
        self.reserved_bytes = 0
        self.held_bytes = 0
        self.fixed_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks.parts[key[0]]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def part(self, number: int) -> Collection[BlockKey]:
        """Keys of one part of all blocks."""
        return self._blocks.parts[number].keys()

    def get(self, key: BlockKey) -> DramBlock | None:
        """The block, without counting it as used."""
        return self._blocks.parts[key[0]].get(key)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Counts those of `chain` (head first) that are here as used now."""
        self._policy.touched(self._ordered(chain))

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of `chain` (head first) that came together have all come; some may have left. Not a use of them."""
        self._policy.arrived(self._ordered(chain))

    def _ordered(self, chain: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that the policy holds."""
        here = (self._blocks.get(key) for key in chain)
        return [block.info.key for block in here if block is not None and not block.pinned]

    # Room

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved without evicting anything."""
        return self.capacity_bytes - self.block_bytes - self.reserved_bytes

    def check_possible(self, nbytes: int, tenant: str, now: float) -> None:
        """Whether `reserve` could succeed once nothing is held or reserved any more.

        Args:
            nbytes: what is to be reserved.
            tenant: for whom.
            now: the time.

        Raises:
            InvalidRequest: it never could.
            Overloaded: pins or guarantees of others leave too little; says when the next pin ends.
        """
        if nbytes > self.capacity_bytes:
            raise InvalidRequest("keys", f"the session needs {nbytes} bytes, all DRAM has {self.capacity_bytes}")
        quota = self.account.grants.quota(tenant)
        if quota is not None and nbytes > quota:
            raise InvalidRequest("keys", f"the session needs {nbytes} bytes, its tenant may have {quota} in DRAM")
        guarded = sum(
            max(0, min(self.account.used[other], guarantee) - self._pinned[other])
            for other, guarantee in self.account.grants.guarantees.items()
            if other != tenant
        )
        free = self.capacity_bytes - guarded - self.pinned_bytes
        if quota is not None:
            free = min(free, quota - self._pinned[tenant])
        if nbytes <= free:
            return
        if nbytes > self.capacity_bytes - guarded:
            raise Overloaded(
                f"{nbytes} bytes are needed; what other tenants are guaranteed leaves less",
                reason="kvstore_guaranteed",
                retry_after_s=RETRY_AFTER_S,
            )
        expiry = self.pins.next_expiry
        raise Overloaded(
            f"{nbytes} bytes are needed; pinned blocks leave {max(0, free)}",
            reason="kvstore_pinned",
            retry_after_s=RETRY_AFTER_S if expiry is None else max(0.0, expiry - now),
        )

    def reserve(self, nbytes: int, tenant: str = "") -> list[BlockKey] | None:
        """Sets bytes aside, evicting what must go for it; a tenant over its quota evicts its own blocks first.

        Args:
            nbytes: how much.
            tenant: for whose blocks.

        Returns:
            The evicted keys, or None when too little may go; then nothing has changed.
        """
        victims = self._victims(nbytes, tenant)
        if victims is None:
            return None
        for block in victims:
            self.discard(block.info.key)
        self.evictions += len(victims)
        self.reserved_bytes += nbytes
        if nbytes:
            self._reserved[tenant] += nbytes
        return [block.info.key for block in victims]

    def can_reserve(self, nbytes: int, tenant: str) -> bool:
        """Whether `reserve` would succeed now; evicts nothing."""
        return self._victims(nbytes, tenant) is not None

    def _victims(self, nbytes: int, tenant: str) -> list[DramBlock] | None:
        over = self.block_bytes + self.reserved_bytes + nbytes - self.capacity_bytes
        own = self.account.over_quota(tenant, self._reserved[tenant] + nbytes)
        if over > self._evictable(tenant) or own > self.account.used[tenant] - self._fixed[tenant]:
            return None  # the common cases, without a walk
        victims: dict[BlockKey, DramBlock] = {}
        own -= self._choose(victims, own, tenant, own_only=True)
        freed = sum(block.info.nbytes for block in victims.values())
        over -= freed + self._choose(victims, over - freed, tenant, own_only=False)
        return list(victims.values()) if own <= 0 and over <= 0 else None

    def _choose(self, victims: dict[BlockKey, DramBlock], wanted: int, tenant: str, *, own_only: bool) -> int:
        """Adds blocks to `victims` in the policy's order until `wanted` more bytes go; returns how many do.

        Each block is judged with those before it gone. The tenant's own blocks are not protected from it.
        """
        found = 0
        if wanted <= 0:
            return found
        going = _by_tenant(victims.values())
        for key in self._policy.candidates():
            block = self._blocks[key]
            info = block.info
            if block.holds or key in victims or not self._may_go(info, tenant, going[info.tenant], own_only):
                continue
            victims[key] = block
            going[info.tenant] += info.nbytes
            found += info.nbytes
            if found >= wanted:
                break
        return found

    def _may_go(self, info: BlockInfo, tenant: str, going: int, own_only: bool) -> bool:
        if info.tenant == tenant:
            return True
        return not own_only and not self.protection.keeps(info.key, info.tenant, going + info.nbytes)

    def _evictable(self, tenant: str) -> int:
        """Bytes that may go for `tenant`, were blocks as small as bytes."""
        kept = sum(
            max(0, min(self.account.used[other], guarantee) - self._fixed[other])
            for other, guarantee in self.account.grants.guarantees.items()
            if other != tenant
        )
        return self.block_bytes - self.fixed_bytes - kept

    def unreserve(self, nbytes: int, tenant: str = "") -> None:
        """Gives reserved bytes back."""
        self.reserved_bytes -= nbytes
        _take(self._reserved, tenant, nbytes)

    def allocate(self, nbytes: int) -> memoryview:
        """Memory for a block whose bytes are reserved; free when the last view of it is gone.

        Raises:
            Overloaded: the operating system gives none.
        """
        try:
            return self.arena.allocate(nbytes)
        except OSError as error:
            raise Overloaded(
                f"no memory for {nbytes} bytes: {error}", reason="kvstore_memory", retry_after_s=RETRY_AFTER_S
            ) from error

    # Blocks

    def insert(self, block: DramBlock) -> None:
        """Takes a whole block in, in the place of as many bytes that were reserved for its tenant."""
        key, size, tenant = block.info.key, block.info.nbytes, block.info.tenant
        assert key not in self._blocks
        assert block.holds == 0
        self.unreserve(size, tenant)
        self._blocks[key] = block
        self.block_bytes += size
        self.account.add(tenant, size)
        self._policy.added(block.info)
        if key in self.pins:
            self._pin(block)

    def discard(self, key: BlockKey) -> None:
        """Drops a block that is neither held nor pinned."""
        block = self._blocks.pop(key)
        assert block.holds == 0
        assert not block.pinned
        self._policy.removed(key)
        self.block_bytes -= block.info.nbytes
        self.account.remove(block.info.tenant, block.info.nbytes)

    def drop(self, block: DramBlock) -> None:
        """Drops a block that nobody holds, pinned or not; its pins stay, for when it comes again."""
        if block.pinned:
            self._unpin(block)
        self.discard(block.info.key)

    def hold(self, block: DramBlock) -> None:
        """The block stays until it is released as often as it was held."""
        block.holds += 1
        if block.holds == 1:
            self.held_bytes += block.info.nbytes
            if not block.pinned:
                self._fix(block, 1)

    def release(self, block: DramBlock) -> None:
        """Ends one hold."""
        assert block.holds > 0
        block.holds -= 1
        if not block.holds:
            self.held_bytes -= block.info.nbytes
            if not block.pinned:
                self._fix(block, -1)

    def pins_changed(self, change: PinChange) -> None:
        """Some keys, here or not, are pinned from now on, others not any more."""
        for key in change.pinned:
            if (block := self._blocks.get(key)) is not None:
                self._pin(block)
        for key in change.unpinned:
            if (block := self._blocks.get(key)) is not None:
                self._unpin(block)

    def _pin(self, block: DramBlock) -> None:
        self._policy.removed(block.info.key)
        block.pinned = True
        self._pinned[block.info.tenant] += block.info.nbytes
        self.pinned_bytes += block.info.nbytes
        if not block.holds:
            self._fix(block, 1)

    def _unpin(self, block: DramBlock) -> None:
        self._policy.added(block.info)
        block.pinned = False
        self.pinned_bytes -= block.info.nbytes
        _take(self._pinned, block.info.tenant, block.info.nbytes)
        if not block.holds:
            self._fix(block, -1)

    def _fix(self, block: DramBlock, sign: int) -> None:
        self.fixed_bytes += sign * block.info.nbytes
        _take(self._fixed, block.info.tenant, -sign * block.info.nbytes)

    def check_invariants(self) -> None:
        """The accounts equal the blocks, within the budget and the quotas, and the policy knows the same keys."""
        blocks = list(self._blocks.values())
        assert self.block_bytes == sum(block.info.nbytes for block in blocks)
        assert self.held_bytes == sum(block.info.nbytes for block in blocks if block.holds)
        assert self.reserved_bytes == self._reserved.total()
        assert self.block_bytes + self.reserved_bytes <= self.capacity_bytes
        assert set(self._policy.candidates()) == {key for key, block in self._blocks.items() if not block.pinned}
        assert all(block.info.key == key and block.holds >= 0 for key, block in self._blocks.items())
        assert all(block.pinned == (key in self.pins) for key, block in self._blocks.items())
        self.account.check_invariants(_by_tenant(blocks))
        assert self._fixed == _by_tenant(block for block in blocks if block.holds or block.pinned)
        assert self._pinned == _by_tenant(block for block in blocks if block.pinned)
        assert (self.fixed_bytes, self.pinned_bytes) == (self._fixed.total(), self._pinned.total())
        for tenant, used in self.account.used.items():
            quota = self.account.grants.quota(tenant)
            assert quota is None or used + self._reserved[tenant] <= quota
        self.arena.check_invariants()


def _take(counter: collections.Counter[str], tenant: str, nbytes: int) -> None:
    """Counts bytes less, and forgets tenants that have none."""
    counter[tenant] -= nbytes
    assert counter[tenant] >= 0
    if not counter[tenant]:
        del counter[tenant]


def _by_tenant(blocks: Iterable[DramBlock]) -> collections.Counter[str]:
    counter: collections.Counter[str] = collections.Counter()
    for block in blocks:
        counter[block.info.tenant] += block.info.nbytes
    return counter
