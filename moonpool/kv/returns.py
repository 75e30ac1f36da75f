"""How soon blocks are used again, by class and age: an estimate from a sample of the keys.

The model is that of proportional hazards (Cox 1972): the rate at which unused blocks are used again is one curve over
the age, common to all classes, times one factor per class: its returns over those the curve predicts for it. Evicted
keys are followed too, so a wrong eviction shows. Ages and times count block references.
"""

import bisect
import copy
import itertools
import operator

from moonpool.kv.keys import BlockKey
from moonpool.kv.sample import KeySample

SAMPLE_KEYS = 16384
EVIDENCE = 16.0  # weight, in returns, of the assumption that a class is like all others and a rate is zero
_AGES = 49
_EDGES = [0.0] + [2.0 ** (8 + step / 2) for step in range(_AGES)]  # ages below 256 references share one interval


def age_bin(age: int) -> int:
    """The interval an age lies in; intervals grow by the square root of two, the last has no end."""
    return min(bisect.bisect_right(_EDGES, age), _AGES) - 1


class _Tally:
    """The returns of one class, and the time its blocks spent at each age."""

    def __init__(self) -> None:
        self.returns = [0.0] * _AGES
        self.ends = [0.0] * _AGES  # periods without use that ended in an interval
        self.inside = [0.0] * _AGES  # time they had spent in it by then

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
    """Rates of return of `kinds` classes of blocks.

    Classes are numbered from 0. Marked blocks of a class have a class of their own, numbered `kinds` higher; with
    little evidence on it, the mark counts for what it is worth in all classes together. Class 0 is for blocks of which
    nothing is known yet: they are ranked with the best class.
    """

    def __init__(self, kinds: int, *, sample_keys: int = SAMPLE_KEYS) -> None:
        self.sample: KeySample[tuple[int, int]] = KeySample(sample_keys)  # time of the last use, class
        self.tallies = [_Tally() for _ in range(2 * kinds)]
        self.curve = [0.0] * (_AGES + 1)
        self._factors = [1.0] * 2 * kinds
        self._kinds = kinds

    def used(self, key: BlockKey, kind: int, now: int) -> None:
        """A block of a class came or was used; if its key is in the sample, its period without use ends."""
        if not self.sample.accepts(key):
            return
        if key in self.sample:
            since, last_kind = self.sample[key]
            self.tallies[last_kind].end(now - since, used=True)
        if self.sample.put(key, (now, kind)):
            self._halve()  # each key left stands for twice as many

    def classify(self, key: BlockKey, kind: int) -> None:
        """Changes the class of a block as from its last use."""
        if key in self.sample:
            self.sample[key] = (self.sample[key][0], kind)

    def forget(self, now: int, horizon: int) -> None:
        """Halves the weight of everything seen, and stops following keys not used for longer than `horizon`."""
        while self.sample:
            key, (since, kind) = next(iter(self.sample.items()))
            if now - since <= horizon:
                break
            del self.sample[key]
            self.tallies[kind].end(now - since, used=False)
        self._halve()

    def fit(self, now: int) -> None:
        """Estimates curve and factors from what was seen so far."""
        exposures, returns = self._exposures(now), [tally.returns for tally in self.tallies]
        times, counts = map(sum, zip(*exposures, strict=True)), map(sum, zip(*returns, strict=True))
        rates = list(map(_shrunk, counts, times))
        seen = list(map(sum, returns))
        expected = [sum(map(operator.mul, rates, exposure)) for exposure in exposures]
        self._factors = self._weigh(seen, expected)
        self._factors[0] = max(self._factors)
        # A block younger than the age of most returns is worth what it will be worth at that age.
        self.curve[:_AGES] = list(itertools.accumulate(reversed(rates), max))[::-1]

    def worth(self, kind: int, age: int) -> float:
        """Expected returns per reference of a block of a class, unused for `age`; never rises with the age."""
        place = age_bin(age)
        low, high = self.curve[place], self.curve[place + 1]
        part: float = (age - _EDGES[place]) / (_EDGES[place + 1] - _EDGES[place])
        return self._factors[kind] * (low + (high - low) * min(part, 1.0))

    def _weigh(self, seen: list[float], expected: list[float]) -> list[float]:
        """The factor of each class from its returns and those that the curve predicts."""
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


def _shrunk(count: float, time: float) -> float:
    """A rate, lowered where little was seen: one return at an age that few blocks reach is no evidence."""
    return count / time * count / (count + EVIDENCE) if count else 0.0
