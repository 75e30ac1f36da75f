"""What hit share another size would have had: reuse distances of a fixed number of sampled blocks.

SHARDS with a fixed size (Waldspurger, Park, Garthwaite, Ahmad: "Efficient MRC Construction with SHARDS", FAST'15,
sections 3.2 to 3.4): a block is followed when its hash lies below a threshold, which falls whenever more than `size`
blocks would be followed; a distance among the followed ones, divided by the share that is followed, estimates the
distance among all. An LRU store of n blocks would have had every reference whose distance is below n.

Blocks count one by one: that a request's hits end at its first miss is not modelled, so small sizes look a little
better than they are. Pure: no clock, no randomness beyond the keys, which are hashes.
"""

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.kv.keys import BlockKey

SPACE = 1 << 32
PER_OCTAVE = 8
"""Distances are kept in buckets that grow by the eighth root of two: 9 % wide."""


@dataclass(frozen=True, slots=True)
class Point:
    """One size.

    Attributes:
        blocks: that a store would hold.
        hit_share: of the references that it would have had, in [0, 1].
    """

    blocks: int
    hit_share: float


class ReuseCurve:
    """Follows some blocks of all that are asked for.

    Args:
        size: blocks followed at most; about 200 bytes each. Some thousands give errors of about 0.01.

    Attributes:
        references: blocks asked for.
    """

    def __init__(self, size: int = 8192) -> None:
        assert size > 0
        self._size = size
        self._threshold = SPACE
        self._clock = 0
        self._last: dict[BlockKey, int] = {}
        self._times: list[int] = []  # of the last use of every followed block, ascending
        self._highest: list[tuple[int, BlockKey]] = []  # heap of (-hash, key) of followed blocks
        self._counts: dict[int, float] = {}
        self._seen = 0.0  # references to followed blocks, at the present rate
        self.references = 0

    @property
    def rate(self) -> float:
        """Share of all blocks that is followed."""
        return self._threshold / SPACE

    @property
    def followed(self) -> int:
        """Blocks that are followed."""
        return len(self._last)

    def observe(self, keys: Sequence[BlockKey]) -> None:
        """A chain was asked for; its tail counts as used before its head, as the store's policies have it."""
        self.references += len(keys)
        for key in reversed(keys):
            number = int.from_bytes(key[:4], "little")
            if number < self._threshold:
                self._use(key, number)

    def _use(self, key: BlockKey, number: int) -> None:
        self._seen += 1.0
        self._clock += 1
        before = self._last.get(key)
        self._last[key] = self._clock
        self._times.append(self._clock)
        if before is None:
            heapq.heappush(self._highest, (-number, key))
            if len(self._last) > self._size:
                self._follow_fewer()
            return
        place = bisect.bisect_left(self._times, before)
        del self._times[place]
        distance = (len(self._times) - place) / self.rate  # blocks used since, this one included
        bucket = math.ceil(PER_OCTAVE * math.log2(distance))
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1.0

    def _follow_fewer(self) -> None:
        """Gives up the block with the highest hash, and all as high; what was counted counts at the new rate."""
        before = self._threshold
        self._threshold = -self._highest[0][0]
        while self._highest and -self._highest[0][0] >= self._threshold:
            _, key = heapq.heappop(self._highest)
            del self._times[bisect.bisect_left(self._times, self._last.pop(key))]
        scale = self._threshold / before
        self._seen *= scale
        self._counts = {bucket: count * scale for bucket, count in self._counts.items()}

    def curve(self) -> list[Point]:
        """Sizes in blocks, ascending, with the hit shares they would have had; empty before the first reference.

        The number of references to followed blocks differs by chance from what the rate lets expect; the difference
        is put to the shortest distances, as the paper's "adjustment" does (section 3.4).
        """
        expected = self.references * self.rate
        if not expected:
            return []
        hits = expected - self._seen
        points = []
        for bucket in sorted(self._counts):
            hits += self._counts[bucket]
            points.append(Point(math.ceil(2 ** (bucket / PER_OCTAVE)), min(1.0, max(0.0, hits / expected))))
        return points

    def check_invariants(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        assert len(self._last) == len(self._times) == len(self._highest) <= self._size
        assert self._times == sorted(self._last.values())
        assert all(int.from_bytes(key[:4], "little") < self._threshold for key in self._last)


def hit_share_at(points: Sequence[Point], blocks: float) -> float:
    """The hit share of a store of so many blocks: that of the largest size that is not larger; 0 below all."""
    place = bisect.bisect_right([point.blocks for point in points], blocks)
    return points[place - 1].hit_share if place else 0.0
