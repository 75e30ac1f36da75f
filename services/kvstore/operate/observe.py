"""What happens in a store, as distributions: how long reads and commits take, how long blocks live and lie unused.

Owns the histograms and the sample of blocks whose ages are followed. Must not know of tiers, sessions or RPCs: others
say what happened. Ages are followed for a sample of keys only, so that the books stay small beside a million blocks; a
key is a hash, so its first bytes choose the sample evenly and the same after a restart.
"""

import collections
import time
from collections.abc import Callable, Sequence

from moonpool.kv.keys import BlockKey
from moonpool.telemetry.metrics import AGES, SECONDS, Metrics

SAMPLE_ONE_IN = 16
MAX_FOLLOWED = 65536
"""Blocks followed at most; the one followed longest without news is given up for a new one."""


class Observer:
    """Tells a store's histograms what happens.

    Args:
        metrics: where the histograms are.
        clock: seconds, never going back.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        reads = metrics.histogram("read_seconds", "of a reading session, by its coldest tier", SECONDS, ["tier"])
        self._warm_reads, self._cold_reads = reads.labels(tier="dram"), reads.labels(tier="ssd")
        self._commits = metrics.histogram("commit_seconds", "of a batch becoming durable", SECONDS)
        self._lifetimes = metrics.histogram("block_lifetime_seconds", "from stored to gone, of a sample", AGES)
        self._gaps = metrics.histogram("block_reuse_gap_seconds", "between two uses of a block, of a sample", AGES)
        self._followed: collections.OrderedDict[BlockKey, tuple[float, float]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Blocks that are followed."""
        return len(self._followed)

    def read(self, *, cold: bool, seconds: float) -> None:
        """A reading session has ended well; `cold` when some of its blocks came from the durable tier."""
        (self._cold_reads if cold else self._warm_reads).observe(seconds)

    def committed(self, seconds: float) -> None:
        """A batch was committed."""
        self._commits.observe(seconds)

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """Somebody asks for a chain."""
        now = self._clock()
        for key in _sampled(keys):
            followed = self._followed.get(key)
            if followed is not None:
                stored, used = followed
                self._gaps.observe(now - used)
                self._followed[key] = (stored, now)
                self._followed.move_to_end(key)

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        """Blocks came and went."""
        now = self._clock()
        for key in _sampled(removed):
            followed = self._followed.pop(key, None)
            if followed is not None:
                self._lifetimes.observe(now - followed[0])
        for key in _sampled(stored):
            self._followed[key] = (now, now)
            if len(self._followed) > MAX_FOLLOWED:
                self._followed.popitem(last=False)


def _sampled(keys: Sequence[BlockKey]) -> list[BlockKey]:
    return [key for key in keys if not key[0] % SAMPLE_ONE_IN]
