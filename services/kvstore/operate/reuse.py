"""How often blocks would be found if the store were of another size: LRU's hit curve from a sample of the keys.

Owns the sample of reuse distances. Must not know of tiers, policies, bytes on disk or clocks. A key's reuse distance is
the number of different keys used since its last use, itself included: LRU over so many blocks finds it. Keys are
sampled by their hash, always the same ones, at most so many (SHARDS with a fixed size and its adjustment: Waldspurger,
Park, Garthwaite, Ahmad, FAST'15): when one too many is in the sample, those of the greatest hash leave and the share of
keys that is sampled falls. Distances among sampled keys stand for that many more, as do their uses.
"""

import bisect
import heapq
import math
import zlib
from collections.abc import Sequence

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey

SAMPLE_KEYS = 8192
"""Keys in the sample at most; about 300 bytes each."""
_HASHES = 1 << 32
_STEPS_PER_OCTAVE = 32
"""Distances are counted to within 1/32 of a power of two, that is 2.2 %."""

Curve = Sequence[tuple[int, float]]
"""(size, share of block uses that would be hits), ascending in both."""


class ReuseSample:
    """Reuse distances of a sample of the keys.

    Args:
        sample_keys: keys in it at most.

    Raises:
        ConfigError: `sample_keys` is not positive.

    Attributes:
        uses: block uses observed.
    """

    def __init__(self, sample_keys: int = SAMPLE_KEYS) -> None:
        if sample_keys <= 0:
            raise ConfigError("sample_keys", f"must be positive, is {sample_keys}")
        self._sample_keys = sample_keys
        self._below = _HASHES  # keys are in the sample whose hash is below
        self._last_use: dict[BlockKey, int] = {}
        self._times: list[int] = []  # all last uses, ascending
        self._greatest: list[tuple[int, BlockKey]] = []  # heap of (-hash, key)
        self._time = 0
        self._weights: dict[int, float] = {}  # uses by step of distance
        self._weight = 0.0  # uses that the sampled ones stand for, first ones included
        self.uses = 0

    @property
    def rate(self) -> float:
        """Share of the keys that is sampled."""
        return self._below / _HASHES

    def observe(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of one chain, head first, were asked for, found or not. The head counts as used last, as in LRU."""
        self.uses += len(chain)
        for key in reversed(chain):
            hashed = zlib.crc32(key)
            if hashed < self._below:
                self._use(key, hashed)

    def curve(self) -> Curve:
        """(blocks, hit share): LRU's, at every size where it rises."""
        if not self.uses:
            return []
        # The sample's uses are more or fewer than its share of all: mostly those of the hottest keys (SHARDS_adj).
        total = self.uses - self._weight
        points: list[tuple[int, float]] = []
        for step in sorted(self._weights):
            total += self._weights[step]
            share = min(1.0, max(total / self.uses, points[-1][1] if points else 0.0))
            points.append((_size_of(step), share))
        return points

    def _use(self, key: BlockKey, hashed: int) -> None:
        weight = 1 / self.rate
        self._time += 1
        self._weight += weight
        before = self._last_use.get(key)
        if before is None:
            heapq.heappush(self._greatest, (-hashed, key))
        else:
            place = bisect.bisect_left(self._times, before)
            step = _step_of((len(self._times) - place) * weight)
            self._weights[step] = self._weights.get(step, 0.0) + weight
            del self._times[place]
        self._times.append(self._time)
        self._last_use[key] = self._time
        if len(self._last_use) > self._sample_keys:
            self._thin()

    def _thin(self) -> None:
        """The keys of the greatest hash leave; what was counted so far keeps its weight."""
        self._below = -self._greatest[0][0]
        while self._greatest and -self._greatest[0][0] >= self._below:
            _, key = heapq.heappop(self._greatest)
            del self._times[bisect.bisect_left(self._times, self._last_use.pop(key))]

    def check_invariants(self) -> None:
        """The sample is within its bound, and its parts hold the same keys."""
        assert len(self._last_use) <= self._sample_keys
        assert self._times == sorted(self._last_use.values())
        assert {key for _, key in self._greatest} == set(self._last_use)
        assert all(zlib.crc32(key) < self._below for key in self._last_use)
        assert len(self._greatest) == len(self._last_use)
        assert all(weight >= 0 for weight in self._weights.values())


def _step_of(distance: float) -> int:
    return math.ceil(_STEPS_PER_OCTAVE * math.log2(distance))


def _size_of(step: int) -> int:
    return int(2 ** (step / _STEPS_PER_OCTAVE))


def hit_share(curve: Curve, size: float) -> float:
    """The hit share at a size; between two points of the curve that of the smaller."""
    place = bisect.bisect_right(curve, size, key=lambda point: point[0])
    return curve[place - 1][1] if place else 0.0


def in_bytes(curve: Curve, block_bytes: int) -> Curve:
    """The curve over bytes instead of blocks."""
    return [(blocks * block_bytes, share) for blocks, share in curve]


def worth(curve: Curve, size: int, more: int) -> float:
    """What `more` beside `size` adds to the hit share; both in the curve's unit. May be asked for less than nothing."""
    return hit_share(curve, size + more) - hit_share(curve, size)
