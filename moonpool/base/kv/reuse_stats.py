"""How often and how soon blocks are used again, estimated from a hash-chosen sample of the keys.

`ReuseSample` estimates LRU's hit rate at every store size from reuse distances (fixed-size SHARDS: Waldspurger et al.,
FAST'15; a use in the sample stands for 1 / rate uses). `ReturnRates` is a proportional-hazards model (Cox 1972): one
curve for the reuse rate over a block's age, common to all classes, times one factor per class.
"""

import bisect
import collections
import copy
import itertools
import math
import operator
import zlib
from collections.abc import Sequence
from typing import TypeVar

from moonpool.base.kv.keys import BlockKey

T = TypeVar("T")
_HASHES = 1 << 32
REUSE_KEYS = 16384  # at most, about 250 bytes each
_STEPS_PER_OCTAVE = 32  # distances are counted to within 1/32 of a power of two, that is 2.2 %
SAMPLE_KEYS = 16384
EVIDENCE = 16.0  # weight, in returns, of the assumption that a class is like all others and a rate is zero
_AGES = 49
_EDGES = [0.0] + [2.0 ** (8 + step / 2) for step in range(_AGES)]  # ages below 256 references share one interval


class KeySample(collections.OrderedDict[BlockKey, T]):
    """At most `size` keys and what is known about each key, in the order they were set.

    A key is in the sample if the key's hash is below a bound, so the same keys are followed from use to use. If there
    are too many keys, the bound is halved. `rate` is the share of all keys that belong to the sample.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.rate = 1.0

    def accepts(self, key: BlockKey) -> bool:
        return zlib.crc32(key) < self.rate * _HASHES

    def put(self, key: BlockKey, value: T) -> bool:
        """Set a sampled key's value, as the latest; return whether keys had to leave."""
        self[key] = value
        self.move_to_end(key)
        before = self.rate
        while len(self) > self.size:
            self.rate /= 2
            for other in [other for other in self if not self.accepts(other)]:
                del self[other]
        return self.rate < before


HitCurve = Sequence[tuple[int, float]]  # (size, share of block uses that would be hits), ascending in both


class ReuseSample:
    """Reuse distances in a sample with at most `sample_keys` keys."""

    def __init__(self, sample_keys: int = REUSE_KEYS) -> None:
        self.last_uses: KeySample[int] = KeySample(sample_keys)  # time of each key's last use
        self.times: list[int] = []  # all last uses, ascending
        self._time = 0
        self.weights: dict[int, float] = {}  # uses by step of distance
        self._weight = 0.0  # uses that the sampled uses stand for, first uses included
        self.uses = 0  # blocks asked for, in the sample or not

    def observe(self, chain: Sequence[BlockKey]) -> None:
        """Count a request for a chain, head first, found or not. The head counts as used last, as in LRU."""
        self.uses += len(chain)
        for key in reversed(chain):
            if self.last_uses.accepts(key):
                self._use(key)

    def curve(self) -> HitCurve:
        """(blocks, hit share) for LRU, at every size where the share rises."""
        if not self.uses:
            return []
        # The sample's uses are more or fewer than the sample's share: mostly the hottest keys' (SHARDS_adj).
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


def age_bin(age: int) -> int:
    """The interval that an age lies in; intervals grow by the square root of two; the last interval has no end."""
    return min(bisect.bisect_right(_EDGES, age), _AGES) - 1


class _ClassTally:
    """One class's returns, and the time that the class's blocks spent at each age."""

    def __init__(self) -> None:
        self.returns = [0.0] * _AGES
        self.ends = [0.0] * _AGES  # periods without use that ended in an interval
        self.inside = [0.0] * _AGES  # time spent there by then

    def end(self, age: int, *, used: bool) -> None:
        place = age_bin(age)
        self.ends[place] += 1
        self.inside[place] += age - _EDGES[place]
        self.returns[place] += used

    def exposure(self) -> list[float]:
        times, beyond = [0.0] * _AGES, 0.0
        for place in range(_AGES - 1, -1, -1):
            times[place] = beyond * (_EDGES[place + 1] - _EDGES[place]) + self.inside[place]
            beyond += self.ends[place]
        return times

    def halve(self) -> None:
        for numbers in (self.returns, self.ends, self.inside):
            numbers[:] = [number / 2 for number in numbers]


class ReturnRates:
    """Return rates for `kinds` classes of blocks.

    Classes are numbered from 0. A class's marked blocks have a separate class, numbered `kinds` higher; with little
    evidence there, the mark counts for its worth in all classes together. Class 0 is for blocks of which without any
    evidence, they are ranked with the best class.
    """

    def __init__(self, kinds: int, *, sample_keys: int = SAMPLE_KEYS) -> None:
        self.sample: KeySample[tuple[int, int]] = KeySample(sample_keys)  # time of the last use, class
        self.tallies = [_ClassTally() for _ in range(2 * kinds)]
        self.curve = [0.0] * (_AGES + 1)
        self._factors = [1.0] * 2 * kinds
        self._kinds = kinds

    def used(self, key: BlockKey, kind: int, now: int) -> None:
        """Note that a block of a class came or was used. If the sample has the key, the period without use ends."""
        if not self.sample.accepts(key):
            return
        if key in self.sample:
            since, last_kind = self.sample[key]
            self.tallies[last_kind].end(now - since, used=True)
        if self.sample.put(key, (now, kind)):
            self._halve()  # each key left stands for twice as many

    def classify(self, key: BlockKey, kind: int) -> None:
        """Change a block's class as from the last use."""
        if key in self.sample:
            self.sample[key] = (self.sample[key][0], kind)

    def forget(self, now: int, horizon: int) -> None:
        """Halve the weight of all observations, and stop following keys not used for longer than `horizon`."""
        while self.sample:
            key, (since, kind) = next(iter(self.sample.items()))
            if now - since <= horizon:
                break
            del self.sample[key]
            self.tallies[kind].end(now - since, used=False)
        self._halve()

    def fit(self, now: int) -> None:
        """Estimate curve and factors from what was seen so far."""
        exposures, returns = self._exposures(now), [tally.returns for tally in self.tallies]
        times, counts = map(sum, zip(*exposures, strict=True)), map(sum, zip(*returns, strict=True))
        rates = list(map(_shrunk_rate, counts, times))
        seen = list(map(sum, returns))
        expected = [sum(map(operator.mul, rates, exposure)) for exposure in exposures]
        self._factors = self._weigh(seen, expected)
        self._factors[0] = max(self._factors)
        # A block younger than most returns is worth what the block will be worth at that age.
        self.curve[:_AGES] = list(itertools.accumulate(reversed(rates), max))[::-1]

    def worth(self, kind: int, age: int) -> float:
        """Expected returns per reference for a class's block, unused for `age`; never rises with the age."""
        place = age_bin(age)
        low, high = self.curve[place], self.curve[place + 1]
        part: float = (age - _EDGES[place]) / (_EDGES[place + 1] - _EDGES[place])
        return self._factors[kind] * (low + (high - low) * min(part, 1.0))

    def _weigh(self, seen: list[float], expected: list[float]) -> list[float]:
        """Each class's factor: observed returns over the returns that the curve predicts."""
        kinds = self._kinds
        plain = [(seen[kind] + EVIDENCE) / (expected[kind] + EVIDENCE) for kind in range(kinds)]
        as_plain = sum(map(operator.mul, plain, expected[kinds:]))
        mark = (sum(seen[kinds:]) + EVIDENCE) / (as_plain + EVIDENCE)
        marked = zip(plain, seen[kinds:], expected[kinds:], strict=True)
        return plain + [(count + EVIDENCE * mark * factor) / (wanted + EVIDENCE) for factor, count, wanted in marked]

    def _exposures(self, now: int) -> list[list[float]]:
        """Times at each age by class, periods that have not ended included."""
        tallies = copy.deepcopy(self.tallies)
        for since, kind in self.sample.values():
            tallies[kind].end(now - since, used=False)
        return [tally.exposure() for tally in tallies]

    def _halve(self) -> None:
        for tally in self.tallies:
            tally.halve()


def _shrunk_rate(count: float, time: float) -> float:
    """A rate, lowered if few uses were seen: one return at an age that few blocks reach is no evidence."""
    return count / time * count / (count + EVIDENCE) if count else 0.0
