"""How soon blocks come back: learnt from a sample of the keys, by what is known of a block and its age.

Owns the estimate and the sample behind it. Must not know what the classes mean, which blocks are held, or in which
order they leave. Ages and times are numbers of block references.

The model is that of proportional hazards (Cox 1972): the rate at which unused blocks come back is one curve over the
age, common to all, times one factor per class. The curve is returns over time spent at an age; a class's factor is its
returns over those that the curve would have it expect (indirect standardisation), so that a class whose blocks were
only seen young is compared with others at that age. Keys are sampled by their hash (as SHARDS does, Waldspurger et al.,
FAST'15): a sampled key is followed whether its block is held or not, so that what is evicted early can be seen to have
been evicted wrongly. The sample has a fixed size; when it is full the share of keys in it is halved.
"""

import bisect
import collections
import itertools
import operator
import zlib

from moonpool.kv.keys import BlockKey

SAMPLE_KEYS = 16384
"""Keys followed at most."""
EVIDENCE = 16.0
"""Returns that count for as much as the assumption that a class is like all others, or a rate nothing."""
_PER_OCTAVE = 2
_FIRST_OCTAVE = 8  # ages below 256 references are one
_AGES = 1 + _PER_OCTAVE * 24
_EDGES = [0.0] + [2.0 ** (_FIRST_OCTAVE + step / _PER_OCTAVE) for step in range(_AGES)]
_HASHES = 1 << 32


def age_bin(age: int) -> int:
    """The interval of ages in which one is; intervals grow by the square root of two, the last has no end."""
    return min(bisect.bisect_right(_EDGES, age), _AGES) - 1


class _Tally:
    """One class: its blocks' returns, and the time they spent at each age, as ends by interval."""

    __slots__ = ("ends", "inside", "returns")

    def __init__(self) -> None:
        self.returns = [0.0] * _AGES
        self.ends = [0.0] * _AGES  # periods without use that ended in an interval
        self.inside = [0.0] * _AGES  # time they had spent in it by then

    def end(self, age: int) -> None:
        place = age_bin(age)
        self.ends[place] += 1
        self.inside[place] += age - _EDGES[place]

    def exposure(self) -> list[float]:
        """Time spent in each interval."""
        times, beyond = [0.0] * _AGES, 0.0
        for place in range(_AGES - 1, -1, -1):
            times[place] = beyond * (_EDGES[place + 1] - _EDGES[place]) + self.inside[place]
            beyond += self.ends[place]
        return times

    def halve(self) -> None:
        for numbers in (self.returns, self.ends, self.inside):
            numbers[:] = [number / 2 for number in numbers]


class _Period:
    """Time without use of one sampled key."""

    __slots__ = ("kind", "since")

    def __init__(self, since: int, kind: int) -> None:
        self.since = since
        self.kind = kind


class ReturnRates:
    """Rates of return of `kinds` classes of blocks.

    Class 0 is that of blocks of which nothing is known yet: they are thought as good as those of the best class.

    Every class has a twin, numbered `kinds` higher, for those of its blocks that bear a mark; what the mark is worth is
    learnt for each class, and until it is, from all of them.

    Args:
        kinds: number of classes without their twins; they are numbered from 0.
        sample_keys: keys followed at most.
    """

    def __init__(self, kinds: int, *, sample_keys: int = SAMPLE_KEYS) -> None:
        self._sample_keys = sample_keys
        self._sample: collections.OrderedDict[BlockKey, _Period] = collections.OrderedDict()
        self._below = _HASHES  # keys are sampled whose hash is below
        self._kinds = kinds
        self._tallies = [_Tally() for _ in range(2 * kinds)]
        self._curve = [0.0] * (_AGES + 1)
        self._factors = [1.0] * 2 * kinds

    def used(self, key: BlockKey, kind: int, now: int) -> None:
        """A block of a class came or was used; if its key is in the sample, its period without use ends."""
        if zlib.crc32(key) >= self._below:
            return
        period = self._sample.pop(key, None)
        if period is not None:
            tally = self._tallies[period.kind]
            tally.end(now - period.since)
            tally.returns[age_bin(now - period.since)] += 1
        self._sample[key] = _Period(now, kind)
        if len(self._sample) > self._sample_keys:
            self._thin()

    def classify(self, key: BlockKey, kind: int) -> None:
        """A block is of another class than was known when it was used."""
        period = self._sample.get(key)
        if period is not None:
            period.kind = kind

    def forget(self, now: int, horizon: int) -> None:
        """Halves the weight of everything seen, and stops following keys not used for longer than `horizon`."""
        while self._sample:
            key, period = next(iter(self._sample.items()))
            if now - period.since <= horizon:
                break
            del self._sample[key]
            self._tallies[period.kind].end(now - period.since)
        self._halve()

    def fit(self, now: int) -> None:
        """Takes what was seen so far into account from now on."""
        exposures, returns = self._exposures(now), [tally.returns for tally in self._tallies]
        times = [sum(column) for column in zip(*exposures, strict=True)]
        counts = [sum(column) for column in zip(*returns, strict=True)]
        rates = [_shrunk(count, time) for count, time in zip(counts, times, strict=True)]
        seen = [sum(column) for column in returns]
        expected = [sum(map(operator.mul, rates, exposure)) for exposure in exposures]
        self._weigh(seen, expected)
        self._factors[0] = max(self._factors)
        # A block that is not due yet is worth what it will be worth when it is.
        self._curve[:_AGES] = list(itertools.accumulate(reversed(rates), max))[::-1]

    def worth(self, kind: int, age: int) -> float:
        """Expected returns per reference of a block of a class, unused for `age`; never rises with the age."""
        place = age_bin(age)
        low, high = self._curve[place], self._curve[place + 1]
        part: float = (age - _EDGES[place]) / (_EDGES[place + 1] - _EDGES[place])
        return self._factors[kind] * (low + (high - low) * min(part, 1.0))

    def _weigh(self, seen: list[float], expected: list[float]) -> None:
        """Every class's factor from its returns and those that the curve would have it expect."""
        plain, marked = range(self._kinds), range(self._kinds, 2 * self._kinds)
        for kind in plain:
            self._factors[kind] = (seen[kind] + EVIDENCE) / (expected[kind] + EVIDENCE)
        as_plain = sum(self._factors[kind] * expected[self._kinds + kind] for kind in plain)
        mark = (sum(seen[kind] for kind in marked) + EVIDENCE) / (as_plain + EVIDENCE)
        for kind in marked:
            prior = mark * self._factors[kind - self._kinds]
            self._factors[kind] = (seen[kind] + EVIDENCE * prior) / (expected[kind] + EVIDENCE)

    def _exposures(self, now: int) -> list[list[float]]:
        """Times at each age by class, those of periods that have not ended included."""
        open_periods = [_Tally() for _ in self._tallies]
        place = 0
        for period in reversed(self._sample.values()):  # the youngest first: ages only rise
            age = now - period.since
            while age >= _EDGES[place + 1] and place < _AGES - 1:
                place += 1
            tally = open_periods[period.kind]
            tally.ends[place] += 1
            tally.inside[place] += age - _EDGES[place]
        both = zip(self._tallies, open_periods, strict=True)
        return [[*map(operator.add, done.exposure(), still.exposure())] for done, still in both]

    def _thin(self) -> None:
        self._below //= 2
        for key in [key for key in self._sample if zlib.crc32(key) >= self._below]:
            del self._sample[key]
        self._halve()  # one key less stands for as many as two

    def _halve(self) -> None:
        for tally in self._tallies:
            tally.halve()

    def check_invariants(self) -> None:
        """The sample is within its bound and in the order of uses; no tally is negative."""
        assert len(self._sample) <= self._sample_keys
        since = [period.since for period in self._sample.values()]
        assert since == sorted(since)
        assert all(zlib.crc32(key) < self._below for key in self._sample)
        for tally in self._tallies:
            assert min(*tally.ends, *tally.inside, *tally.returns) >= 0
            assert all(count <= ends for count, ends in zip(tally.returns, tally.ends, strict=True))
        assert self._curve == sorted(self._curve, reverse=True)


def _shrunk(count: float, time: float) -> float:
    """A rate, the lower the less it was seen: one return at an age that few blocks reach is no evidence."""
    return count / time * count / (count + EVIDENCE) if count else 0.0
