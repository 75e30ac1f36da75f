"""The store as a whole: how blocks come in, where they are kept, and how they are read.

A block is assembled; then it is whole in DRAM (VISIBLE), and held until the SSD tier has committed it (DURABLE). Used
by the event loop's thread only; device reads and commits run elsewhere, and their results are reported here.
"""

from moonpool.kv.deletions import Deletions
from services.kvstore.core.reads import Reads
from services.kvstore.core.tiered_store import StoreListener, TieredStore
from services.kvstore.core.writes import Writes
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.tier import SsdTier


class BlockStore:
    """Everything one kvstore holds.

    At most `max_sessions` write at once, and as many read; leases keep `lease_bytes` of DRAM, None for all of it.
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
