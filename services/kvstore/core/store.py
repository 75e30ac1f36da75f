"""The store as a whole: how blocks come in, where they are kept, and how they are read.

A block is assembled; then it is whole in DRAM (VISIBLE), and held until the SSD tier has committed it (DURABLE). After
that it may be evicted from DRAM at any time, and is removed when its room on the SSD tier is reclaimed. Used by the
event loop's thread only; device reads and commits run elsewhere, and their results are reported here.
"""

from moonpool.kv.deletions import Deletions
from services.kvstore.core.reads import Reads
from services.kvstore.core.tiered_store import StoreListener, TieredStore
from services.kvstore.core.writes import Writes
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.tier import SsdTier


class BlockStore:
    """Everything one kvstore holds.

    Args:
        dram: the DRAM tier, empty.
        ssd: the SSD tier with what it recovered; None for none.
        max_sessions: most writing sessions at once, and most reading ones.
        batch_bytes: most bytes in one commit, unless one block is larger.
        lease_bytes: most DRAM that leases keep; None for all of it.
        deletions: those that this store knows of.
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
        deletions: Deletions | None = None,
    ) -> None:
        self.tiers = TieredStore(dram, ssd, listener or StoreListener())
        deletions = Deletions() if deletions is None else deletions
        self.writes = Writes(self.tiers, deletions, max_sessions=max_sessions, batch_bytes=batch_bytes)
        lease_bytes = dram.capacity_bytes if lease_bytes is None else lease_bytes
        self.reads = Reads(self.tiers, self.writes, max_sessions=max_sessions, lease_bytes=lease_bytes)

    def check_invariants(self) -> None:
        """Checks every part, and the parts against each other. Only while no plan is being committed."""
        dram, ssd = self.tiers.dram, self.tiers.ssd
        dram.check_invariants()
        if ssd is not None:
            ssd.check_invariants()
        self.writes.check_invariants()
        self.reads.check_invariants()
        dram.pins.check_invariants()
        assert len(set(self.tiers)) == len(list(self.tiers))
        if not self.reads.leases and not self.writes.sessions:
            assert not dram.reserved
            assert self.writes.queue.queued or dram.held_bytes == 0
