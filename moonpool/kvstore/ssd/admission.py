"""Which blocks are written to SSD."""

import collections
from collections.abc import Container

from moonpool.base.kv.blocks import BlockInfo
from moonpool.base.kv.keys import BlockKey

ADMIT_ALL, ADMIT_REUSED = "all", "reused"
MAX_GHOSTS = 1 << 18  # refused keys that are remembered, some 130 bytes each


class SsdAdmission:
    """The rule "reused": a block is admitted once used again; the rule "all" admits each on arrival.

    A use is a read, another Put, or a return after eviction: keys of refused blocks are remembered, as in LARC (Huang
    et al., "Improving flash-based disk cache with lazy adaptive replacement", MSST'13). Blocks in `pins` are admitted
    always.
    """

    def __init__(self, rule: str = ADMIT_ALL, pins: Container[BlockKey] = ()) -> None:
        self.reused = rule == ADMIT_REUSED
        self.pins = pins
        self.refused_blocks = self.refused_bytes = 0
        self.ghosts: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()

    def admits(self, info: BlockInfo, room: int) -> bool:
        """Judge a block that comes; as many refused keys are remembered as the tier has `room` for such blocks."""
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
