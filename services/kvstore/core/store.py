"""The store as a whole: blocks come in through sessions, become VISIBLE in DRAM, then DURABLE behind it, and are read.

Owns how the parts stand together. One object, used by the event loop's thread only; whatever blocks (device reads,
commits) is done by others who report back. Must not know of streams, threads, clocks or asyncio.

A block's way: assembled -> whole in DRAM: VISIBLE, and held until -> committed by the durable tier: DURABLE -> evicted
from DRAM at any time, still here -> its room on the durable tier reclaimed: gone.
"""

from collections.abc import Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.core.holdings import Holdings
from services.kvstore.core.reads import Reads
from services.kvstore.core.writes import Writes
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.pins import PinOutcome
from services.kvstore.tenancy.tenants import Account


class BlockStore:
    """Everything one kvstore holds.

    Args:
        dram: the DRAM tier, empty.
        backend: the durable tier with what it recovered; None for none.
        max_sessions: writing sessions at once, and as many reading ones.
        batch_bytes: most bytes in one commit, unless one block is larger.
        durable_account: what tenants are granted in the durable tier, which keeps it; None for nothing.

    Attributes:
        holdings: what is here.
        writes: how blocks come.
        reads: how blocks are read.
        pins: what stays by name.
    """

    def __init__(
        self,
        dram: DramTier,
        backend: SsdTier | None,
        *,
        max_sessions: int = 1024,
        batch_bytes: int = 32 << 20,
        durable_account: Account | None = None,
    ) -> None:
        self.holdings = Holdings(dram, backend)
        self.writes = Writes(
            self.holdings, max_sessions=max_sessions, batch_bytes=batch_bytes, durable_account=durable_account
        )
        self.reads = Reads(self.holdings, max_sessions=max_sessions)
        self.reads.on_promoted = self.writes.arrived
        self.pins = dram.pins
        self.pins.on_change = self._pins_changed

    def pin(self, tenant: str, name: str, keys: Sequence[BlockKey], *, now: float, ttl_s: float) -> PinOutcome:
        """Pins the leading ones of `keys` that are here, in whichever tier; see `Pins.pin`."""
        return self.pins.pin(tenant, name, keys, self.holdings.size_of, now=now, ttl_s=ttl_s)

    def _pins_changed(self, pinned: Sequence[BlockKey], unpinned: Sequence[BlockKey]) -> None:
        self.holdings.dram.pins_changed(pinned, unpinned)
        if unpinned:
            self.holdings.room()

    def check_invariants(self) -> None:
        """Every part agrees with itself and with the others. Only while no plan is being committed."""
        dram, backend = self.holdings.dram, self.holdings.backend
        dram.check_invariants()
        if backend is not None:
            backend.check_invariants()
        self.writes.check_invariants()
        self.pins.check_invariants()
        assert dram.reserved_bytes >= self.writes.unfinished_bytes
        assert len(set(self.holdings)) == len(list(self.holdings))
        if not self.reads.leases and not self.writes.sessions:
            assert dram.reserved_bytes == 0
            if not self.writes.pending:
                assert dram.held_bytes == 0
