"""The DRAM tier: whole blocks, and bytes reserved for blocks that are being written or read in, within a budget.

A block that is in use is held. Held blocks and pinned blocks are never evicted, nor those that a guarantee covers.
Rows of pictures have an order of their own: their share is guaranteed, and who looks for KV to evict passes over none.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.kv.blocks import PICTURES, BlockInfo, DramBlock, PartTable
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.dram.arena import RETRY_AFTER_S, Arena
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.policies import LRU
from moonpool.kvstore.eviction.retention import Pins, SessionRetention
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantBytes, sum_by_tenant


class DramTier(PartTable[DramBlock]):
    """Blocks in memory, evicted in the order of `policy`, and of what is known of sessions, when bytes are needed.

    Blocks and reservations together never exceed `capacity_bytes`. The policy holds all blocks of KV, and `pictures`
    those of rows of pictures, but no pinned ones, which count as new when they are released. The account of what
    tenants are granted and have is kept up to date here.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy,
        *,
        pins: Pins | None = None,
        account: TenantAccount | None = None,
        arena: Arena | None = None,
        clock: Callable[[], float] = world.monotonic,
    ) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.pins = Pins() if pins is None else pins
        self.account = account or TenantAccount()
        self.arena = arena or Arena(capacity_bytes)
        self.policy, self.pictures = SessionRetention(policy, clock), LRU()
        self.reserved = TenantBytes()
        self.pinned = TenantBytes()
        self.fixed = TenantBytes()  # of blocks that are held or pinned
        self.held_bytes = 0
        self.leaving: dict[DramBlock, None] = {}  # no look-up finds these; their bytes go with their last hold
        self.evictions = self.picture_evictions = 0  # blocks, since the start; of pictures among them

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Count those of `chain` (head first) that are here as used now."""
        for policy, keys in self._ordered(chain):
            policy.touched(keys)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of `chain` (head first) that came together have all come; some may have left. Not a use of them."""
        for policy, keys in self._ordered(chain):
            policy.arrived(keys)

    def _ordered(self, chain: Sequence[BlockKey]) -> list[tuple[EvictionPolicy, list[BlockKey]]]:
        there = [block.info for block in filter(None, map(self.get, chain)) if not block.pinned]
        rows = [info.key for info in there if info.format.of_pictures]
        kv = [info.key for info in there if not info.format.of_pictures] if rows else [info.key for info in there]
        return [(policy, keys) for policy, keys in ((self.policy, kv), (self.pictures, rows)) if keys]

    def _order_of(self, info: BlockInfo) -> EvictionPolicy:
        return self.pictures if info.format.of_pictures else self.policy

    def _candidates(self, tenant: str, *, own_only: bool) -> Iterator[BlockKey]:
        """Blocks that may go for a tenant, in order; for pictures within their share, KV goes first."""
        if own_only:
            return (self.pictures if tenant == PICTURES else self.policy).candidates()
        return itertools.chain(self.policy.candidates(), self.pictures.candidates())

    @property
    def block_bytes(self) -> int:
        return self.account.used.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved without evicting anything."""
        return self.capacity_bytes - self.block_bytes - self.reserved.total_bytes

    def check_possible(self, nbytes: int, tenant: str, now: float) -> None:
        """Check that `reserve` can succeed once holds and reservations have ended.

        Raises:
            InvalidRequest: `reserve` can never succeed.
            Overloaded: pins or guarantees of others leave too little now.
        """
        if nbytes > self.capacity_bytes:
            raise InvalidRequest("keys", f"the transfer needs {nbytes} bytes, all DRAM has {self.capacity_bytes}")
        quota = self.account.quota(tenant)
        if quota is not None and nbytes > quota:
            raise InvalidRequest("keys", f"the transfer needs {nbytes} bytes, its quota in DRAM is {quota}")
        unguarded = self.capacity_bytes - self.account.guarded_from(tenant, self.pinned)
        free = unguarded - self.pinned.total_bytes
        if quota is not None:
            free = min(free, quota - self.pinned[tenant])
        if nbytes > unguarded:
            message = f"{nbytes} bytes are needed; what other tenants are guaranteed leaves less"
            raise Overloaded(message, reason="kvstore_guaranteed", retry_after_s=RETRY_AFTER_S)
        if nbytes > free:
            retry_after_s = max(0.0, self.pins.next_expiry - now)
            message = f"{nbytes} bytes are needed; pinned blocks leave {max(0, free)}"
            raise Overloaded(message, reason="kvstore_pinned", retry_after_s=retry_after_s)

    def reserve(self, nbytes: int, tenant: str = "") -> list[BlockKey] | None:
        """Reserve bytes for a tenant's blocks, evicting others; a tenant over its quota evicts its own blocks first.

        Returns:
            The evicted keys, or None when too little can be evicted; then nothing has changed.
        """
        victims = [] if self.has_room(nbytes, tenant) else self._victims(nbytes, tenant)
        if victims is None:
            return None
        if victims:
            self._discard(victims)
            self.evictions += len(victims)
            self.picture_evictions += sum(block.info.format.of_pictures for block in victims)
        self.reserved.add(tenant, nbytes)
        return [block.info.key for block in victims]

    def has_room(self, nbytes: int, tenant: str) -> bool:
        """Whether `reserve` would succeed now without evicting anything."""
        incoming = self.reserved.get(tenant, 0) + nbytes
        return nbytes <= self.free_bytes and not self.account.over_quota(tenant, incoming)

    def can_reserve(self, nbytes: int, tenant: str) -> bool:
        """Whether `reserve` would succeed now; evict no block."""
        return self.has_room(nbytes, tenant) or self._victims(nbytes, tenant) is not None

    def _victims(self, nbytes: int, tenant: str) -> list[DramBlock] | None:
        """Blocks to evict, in the policy's order; None if too few may go.

        The tenant's own blocks come first if the tenant exceeds the quota. Each block is judged as if the earlier
        blocks had left. Guarantees do not protect a tenant's blocks from the same tenant.
        """
        over = nbytes - self.free_bytes
        own = self.account.over_quota(tenant, self.reserved.get(tenant, 0) + nbytes)
        evictable = self.block_bytes - self.fixed.total_bytes - self.account.guarded_from(tenant, self.fixed)
        if over > evictable or own > self.account.used[tenant] - self.fixed[tenant]:
            return None  # decides the common cases without a walk over the blocks
        victims: dict[BlockKey, DramBlock] = {}
        going = {tenant: 0}  # bytes by tenant
        for own_only, wanted in ((True, own), (False, over)):
            gone = going[tenant] if own_only else sum(going.values())
            for key in self._candidates(tenant, own_only=own_only) if gone < wanted else ():
                block = self[key]
                owner, size = block.info.account, block.info.nbytes
                if block.holds or key in victims:
                    continue
                if owner != tenant and (own_only or self.account.guards(owner, going.get(owner, 0) + size)):
                    continue
                victims[key] = block
                going[owner] = going.get(owner, 0) + size
                gone += size
                if gone >= wanted:
                    break
            if gone < wanted:
                return None
        return list(victims.values())

    def unreserve(self, nbytes: int, tenant: str = "") -> None:
        self.reserved.add(tenant, -nbytes)

    def insert(self, blocks: Sequence[DramBlock]) -> None:
        """Take whole blocks in, in the place of as many bytes that were reserved for their tenants."""
        for tenant, nbytes in _by_tenant(blocks).items():
            self.reserved.add(tenant, -nbytes)
            self.account.used.add(tenant, nbytes)
        for block in blocks:
            key = block.info.key
            assert key not in self
            assert block.holds == 0
            self[key] = block
            self._order_of(block.info).added(block.info)
            if key in self.pins:
                self._set_pinned(block, True)

    def drop(self, block: DramBlock) -> None:
        """Remove a block, pinned or not. The bytes go with the last hold; pins stay."""
        if block.pinned:
            self._set_pinned(block, False)
        if not block.holds:
            self._discard([block])
            return
        del self[block.info.key]
        self._order_of(block.info).removed(block.info.key)
        self.leaving[block] = None

    def _discard(self, blocks: Sequence[DramBlock]) -> None:
        for block in blocks:
            assert block.holds == 0
            assert not block.pinned
            del self[block.info.key]
            self._order_of(block.info).removed(block.info.key)
        for tenant, nbytes in _by_tenant(blocks).items():
            self.account.used.add(tenant, -nbytes)

    def hold(self, block: DramBlock) -> None:
        """Keep a block in DRAM until each hold is released."""
        block.holds += 1
        if block.holds == 1:
            self._count_held(block, block.info.nbytes)

    def release(self, block: DramBlock) -> None:
        assert block.holds > 0
        block.holds -= 1
        if not block.holds:
            self._count_held(block, -block.info.nbytes)
            if block in self.leaving:
                del self.leaving[block]
                self.account.used.add(block.info.account, -block.info.nbytes)

    def _count_held(self, block: DramBlock, nbytes: int) -> None:
        self.held_bytes += nbytes
        if not block.pinned:
            self.fixed.add(block.info.account, nbytes)

    def pins_changed(self, keys: Iterable[BlockKey]) -> None:
        """Apply what may have changed about the pins of `keys`, which need not be here."""
        for block in filter(None, map(self.get, keys)):
            pinned = block.info.key in self.pins
            if block.pinned != pinned:
                self._set_pinned(block, pinned)

    def _set_pinned(self, block: DramBlock, pinned: bool) -> None:
        block.pinned = pinned
        if pinned:
            self._order_of(block.info).removed(block.info.key)
        else:
            self._order_of(block.info).added(block.info)
        nbytes = block.info.nbytes if pinned else -block.info.nbytes
        self.pinned.add(block.info.account, nbytes)
        if not block.holds:
            self.fixed.add(block.info.account, nbytes)


def _by_tenant(blocks: Iterable[DramBlock]) -> dict[str, int]:
    return sum_by_tenant([(block.info.account, block.info.nbytes) for block in blocks])
