"""What a store observes: histograms of its reads, commits and blocks, and how soon blocks are used again."""

import time
from collections.abc import Callable, Sequence

from moonpool.kv.keys import BlockKey
from moonpool.kv.reuse import ReuseSample
from moonpool.kv.sample import KeySample
from moonpool.telemetry.metrics import AGES, SECONDS, Metrics

FOLLOWED_KEYS = 4096


class Observer:
    """Fills the histograms and the reuse sample of a store. Lives of blocks are followed for `sample_keys` at most."""

    def __init__(
        self, metrics: Metrics, clock: Callable[[], float] = time.monotonic, sample_keys: int = FOLLOWED_KEYS
    ) -> None:
        self._clock = clock
        reads = metrics.histogram("read_seconds", "of a reading session, by its coldest tier", SECONDS, ["tier"])
        self._warm_reads, self._cold_reads = reads.labels(tier="dram"), reads.labels(tier="ssd")
        self.committed = metrics.histogram("commit_seconds", "of a batch becoming durable", SECONDS).observe
        self._lifetimes = metrics.histogram("block_lifetime_seconds", "from stored to gone, of a sample", AGES)
        self._gaps = metrics.histogram("block_reuse_gap_seconds", "between two uses of a block, of a sample", AGES)
        self.reuse = ReuseSample()
        self.followed: KeySample[tuple[float, float]] = KeySample(sample_keys)  # times: stored, used last

    def read(self, cold: bool, seconds: float) -> None:
        (self._cold_reads if cold else self._warm_reads).observe(seconds)

    def asked(self, keys: Sequence[BlockKey]) -> None:
        self.reuse.observe(keys)
        now = self._clock()
        for key in keys:
            if key in self.followed:
                stored, used = self.followed[key]
                self._gaps.observe(now - used)
                self.followed[key] = (stored, now)

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        now = self._clock()
        for key in removed:
            if key in self.followed:
                self._lifetimes.observe(now - self.followed.pop(key)[0])
        for key in stored:
            if key not in self.followed and self.followed.accepts(key):
                self.followed.put(key, (now, now))
