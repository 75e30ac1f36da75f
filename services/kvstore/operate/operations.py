"""What operators ask of a running store: to compact, to warm up, and what another size would bring."""

import dataclasses
import math

from moonpool.errors import InvalidRequest, Unsupported
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.reuse import Curve, ReuseSample
from services.kvstore.operate.warming import Warmer
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
        """Begins to rewrite segments with a smaller share of live bytes (0 = the default); returns how many there are.

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

    def sizes(self) -> Curve:
        """(bytes, hit share) of stores of other sizes, with blocks of the average size of those held."""
        dram, ssd = self.store.tiers.dram, self.ssd
        blocks, nbytes = len(dram), dram.block_bytes
        if ssd is not None:
            blocks, nbytes = blocks + len(ssd), nbytes + ssd.live_bytes
        return [(size * (nbytes // blocks), share) for size, share in self.reuse.curve()] if blocks else []
