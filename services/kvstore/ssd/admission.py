"""Which blocks are written to the SSD tier: what is never read again wears it out for nothing."""

import collections
from collections.abc import Container

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey

ALL, REUSED = "all", "reused"
MAX_GHOSTS = 1 << 18  # refused keys that are remembered, some 130 bytes each


class Admission:
    """The rule "reused": a block is admitted once it is used again; the rule "all" admits each when it comes.

    A use is a read, another Put of it, or that it comes back after it was evicted: keys of refused blocks are
    remembered, as in LARC (Huang et al., "Improving flash-based disk cache with lazy adaptive replacement", MSST'13).
    Blocks in `pins` are admitted always.
    """

    def __init__(self, rule: str = ALL, pins: Container[BlockKey] = ()) -> None:
        self.reused = rule == REUSED
        self.pins = pins
        self.refused_blocks = self.refused_bytes = 0
        self.ghosts: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()

    def admits(self, info: BlockInfo, room: int) -> bool:
        """Judges a block that comes; as many refused keys are remembered as the tier has `room` for such blocks."""
        if not self.reused or info.key in self.pins:
            return True
        if info.key in self.ghosts:
            del self.ghosts[info.key]
            return True
        self.ghosts[info.key] = None
        if len(self.ghosts) > min(room, MAX_GHOSTS):
            self.ghosts.popitem(last=False)
        self.refused_blocks += 1
        self.refused_bytes += info.nbytes
        return False
