"""The store as a whole: blocks come in through sessions, become VISIBLE in DRAM, then DURABLE behind it, and are read.

A block's way: assembled; whole in DRAM (VISIBLE), and held until the SSD tier has committed it (DURABLE); evicted from
DRAM at any time, still here; its room on the SSD tier reclaimed, removed. One object, used by the event loop's thread
only; device reads and commits are done by others who report back.
"""

from collections.abc import Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.core.reads import Reads
from services.kvstore.core.tiered_store import StoreListener, TieredStore
from services.kvstore.core.writes import Writes
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.pins import PinChange, PinOutcome
from services.kvstore.tenancy.tenants import Account


class BlockStore:
    """Everything one kvstore holds.

    Args:
        dram: the DRAM tier, empty.
        ssd: the SSD tier with what it recovered; None for none.
        listener: is told of changes.
        max_sessions: writing sessions at once, and as many reading ones.
        batch_bytes: most bytes in one commit, unless one block is larger.
        lease_bytes: most DRAM that leases keep; None for all of it.
        ssd_account: what tenants are granted in the SSD tier, which keeps it up to date; None for nothing.

    Attributes:
        tiers: what is here.
        writes: how blocks come.
        reads: how blocks are read.
        pins: what stays by name.
    """

    def __init__(
        self,
        dram: DramTier,
        ssd: SsdTier | None,
        listener: StoreListener | None = None,
        *,
        max_sessions: int = 1024,
        batch_bytes: int = 32 << 20,
        lease_bytes: int | None = None,
        ssd_account: Account | None = None,
    ) -> None:
        self.tiers = TieredStore(dram, ssd, listener or StoreListener())
        self.writes = Writes(self.tiers, max_sessions=max_sessions, batch_bytes=batch_bytes, ssd_account=ssd_account)
        lease_bytes = dram.capacity_bytes if lease_bytes is None else lease_bytes
        self.reads = Reads(self.tiers, self.writes, max_sessions=max_sessions, lease_bytes=lease_bytes)
        self.pins = dram.pins

    def pin(self, tenant: str, name: str, keys: Sequence[BlockKey], *, now: float, ttl_s: float) -> PinOutcome:
        """Pins the leading ones of `keys` that are here, in whichever tier; see `Pins.pin`."""
        self.expire_pins(now)
        outcome, change = self.pins.pin(tenant, name, keys, self.tiers.size_of, now=now, ttl_s=ttl_s)
        self._pins_changed(change)
        return outcome

    def unpin(self, tenant: str, name: str) -> bool:
        """Ends a pin; False when there is none."""
        change = self.pins.unpin(tenant, name)
        if change is not None:
            self._pins_changed(change)
        return change is not None

    def expire_pins(self, now: float) -> None:
        """Ends the pins whose time is over."""
        self._pins_changed(self.pins.expire(now))

    def _pins_changed(self, change: PinChange) -> None:
        self.tiers.dram.pins_changed(change)
        if change.unpinned:
            self.tiers.listener.room()

    def check_invariants(self) -> None:
        """Every part agrees with itself and with the others. Only while no plan is being committed."""
        dram, ssd = self.tiers.dram, self.tiers.ssd
        dram.check_invariants()
        if ssd is not None:
            ssd.check_invariants()
        self.writes.check_invariants()
        self.reads.check_invariants()
        self.pins.check_invariants()
        assert dram.reserved_bytes >= self.writes.unfinished_bytes
        assert len(set(self.tiers)) == len(list(self.tiers))
        if not self.reads.leases and not self.writes.sessions:
            assert dram.reserved_bytes == 0
            if not self.writes.pending:
                assert dram.held_bytes == 0
