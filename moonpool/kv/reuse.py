"""LRU's hit share at every store size, estimated from the reuse distances of a sample of the keys.

A key's reuse distance is the number of different keys used since its last use, itself included. The sample and the
adjustment are those of fixed-size SHARDS (Waldspurger et al., FAST'15): a use in it stands for 1 / rate uses.
"""

import bisect
import math
from collections.abc import Sequence

from moonpool.kv.keys import BlockKey
from moonpool.kv.sample import KeySample

REUSE_KEYS = 16384  # at most, about 250 bytes each
_STEPS_PER_OCTAVE = 32  # distances are counted to within 1/32 of a power of two, that is 2.2 %

Curve = Sequence[tuple[int, float]]  # (size, share of block uses that would be hits), ascending in both


class ReuseSample:
    """Reuse distances of a sample of at most `sample_keys` keys."""

    def __init__(self, sample_keys: int = REUSE_KEYS) -> None:
        self.last_uses: KeySample[int] = KeySample(sample_keys)  # time of each key's last use
        self.times: list[int] = []  # all last uses, ascending
        self._time = 0
        self.weights: dict[int, float] = {}  # uses by step of distance
        self._weight = 0.0  # uses that the sampled ones stand for, first ones included
        self.uses = 0  # blocks asked for, in the sample or not

    def observe(self, chain: Sequence[BlockKey]) -> None:
        """Counts a request for a chain, head first, found or not. The head counts as used last, as in LRU."""
        self.uses += len(chain)
        for key in reversed(chain):
            if self.last_uses.accepts(key):
                self._use(key)

    def curve(self) -> Curve:
        """(blocks, hit share) of LRU, at every size where it rises."""
        if not self.uses:
            return []
        # The sample's uses are more or fewer than its share of all: mostly those of the hottest keys (SHARDS_adj).
        total = self.uses - self._weight
        points: list[tuple[int, float]] = []
        for step in sorted(self.weights):
            total += self.weights[step]
            share = min(1.0, max(total / self.uses, points[-1][1] if points else 0.0))
            points.append((int(2 ** (step / _STEPS_PER_OCTAVE)), share))
        return points

    def _use(self, key: BlockKey) -> None:
        weight = 1 / self.last_uses.rate
        self._time += 1
        self._weight += weight
        before = self.last_uses.get(key)
        if before is not None:
            place = bisect.bisect_left(self.times, before)
            step = math.ceil(_STEPS_PER_OCTAVE * math.log2((len(self.times) - place) * weight))
            self.weights[step] = self.weights.get(step, 0.0) + weight
            del self.times[place]
        self.times.append(self._time)
        if self.last_uses.put(key, self._time):
            self.times = list(self.last_uses.values())
