"""An instance that holds a prefix, with what decides how long loading the prefix takes."""

from typing import NamedTuple

from moonpool.base.scheduling.latency import DEFAULT_BYTES_PER_S, Speeds


class PrefixHolder(NamedTuple):
    """An instance that a request can load a prefix from.

    Attributes:
        id: the instance's id.
        blocks: leading blocks of the request's chain held there.
        wait_s: seconds that reads of this conductor still take there.
        bytes_per_s: the link's learned rate; 0 = not known.
        peer: the instance is an engine, not a kvstore.
        warm: leading blocks in memory; the others may be on SSD only. None = all, as far as is known.
        cold_bytes_per_s: the SSD's learned rate; 0 = not known.
    """

    id: str
    blocks: int
    wait_s: float = 0.0
    bytes_per_s: float = 0.0
    peer: bool = False
    warm: int | None = None
    cold_bytes_per_s: float = 0.0

    def cold_blocks(self, local_blocks: int) -> int:
        """Return the number of blocks on SSD only that an instance with `local_blocks` leading blocks would read."""
        return 0 if self.warm is None else max(0, self.blocks - max(self.warm, local_blocks))

    def rate(self, speeds: Speeds) -> float:
        """Bytes per second at which an instance of these speeds reads from memory: the slower end decides."""
        rate = (speeds.peer_bytes_per_s if self.peer else 0.0) or speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        return min(rate, self.bytes_per_s) if self.bytes_per_s else rate

    def read_s(self, rate: float, nbytes: int, cold_bytes: int = 0) -> float:
        """Return the predicted seconds of reading `nbytes` at this rate; `cold_bytes` of them are on SSD only."""
        if not (cold_bytes and self.cold_bytes_per_s):
            return nbytes / rate
        cold_bytes = min(cold_bytes, nbytes)
        return (nbytes - cold_bytes) / rate + cold_bytes / min(rate, self.cold_bytes_per_s)
