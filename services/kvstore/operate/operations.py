"""What operators ask of a running store: to compact, to warm up, and what another size would bring."""

import dataclasses
import math

from moonpool.errors import InvalidRequest, Unsupported
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.reuse import Curve, ReuseSample
from services.kvstore.operate.warming import Warmed, Warmer
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.ssd.tier import MIN_LIVE_SHARE, SsdTier


@dataclasses.dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one store; `ssd` and `writer` are None without an SSD tier. `capacity_bytes` is of both."""

    store: BlockStore
    ssd: SsdTier | None
    writer: WriteBehind | None
    warmer: Warmer
    reuse: ReuseSample
    capacity_bytes: int

    def compact(self, min_live_share: float) -> int:
        """Begins to rewrite segments of which less than this share is live; returns how many there are.

        Args:
            min_live_share: in (0, 1]; 0 = the tier's default.

        Raises:
            InvalidRequest: the share is not between 0 and 1.
            Unsupported: there is no SSD tier.
        """
        if math.isnan(min_live_share) or not 0.0 <= min_live_share <= 1.0:
            raise InvalidRequest("min_live_share", f"must be between 0 and 1, is {min_live_share}")
        if self.ssd is None or self.writer is None:
            raise Unsupported("this kvstore has no SSD tier")
        segments = self.ssd.compact(min_live_share or MIN_LIVE_SHARE)
        self.writer.wake()
        return segments

    async def warm(self, max_bytes: int) -> Warmed:
        """Fills free DRAM from the SSD tier, with at most `max_bytes`; 0 = no bound.

        Raises:
            Overloaded: too many reading sessions are open.
            Unsupported: there is no SSD tier.
        """
        if self.ssd is None:
            raise Unsupported("this kvstore has no SSD tier")
        return await self.warmer.warm(max_bytes)

    def sizes(self) -> Curve:
        """(bytes, hit share) of stores of other sizes, with blocks of the average size of those held."""
        dram, ssd = self.store.tiers.dram, self.ssd
        blocks = len(dram) + (len(ssd) if ssd is not None else 0)
        nbytes = dram.block_bytes + (ssd.live_bytes if ssd is not None else 0)
        return [(size * (nbytes // blocks), share) for size, share in self.reuse.curve()] if blocks else []
