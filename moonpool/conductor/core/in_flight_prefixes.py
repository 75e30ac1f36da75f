"""Prefixes that are being computed and count as hits for later prompts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from moonpool.base.scheduling.state_machine import digest_of

COMPARED_LENGTHS = tuple(sorted({round(2 ** (step / 4)) for step in range(4 * 20)}))
"""Lengths in blocks at which chains are compared."""
_TAKE_MARKS = [
    itemgetter(*[mark - 1 for mark in COMPARED_LENGTHS[:marks]]) for marks in range(2, len(COMPARED_LENGTHS) + 1)
]
"""By the number of marks, from two on: takes a chain's keys at the marks."""
REPORTS_AWAITED = 2
"""Load reports after a first token by which the prompt's blocks are reported, or were not kept.

The first report may have been under way when the token came.
"""


class InFlightPrefixes:
    """Chains of prompts placed at prefill instances, until their blocks are reported."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self._computed: dict[str, list[_ComputedChain]] = {}  # by instance
        self._at: dict[bytes, dict[str, int]] = {}  # by the key at a mark: prompts of each instance

    def placed(self, claim: int, instance: str, keys: Sequence[bytes]) -> None:
        marked = _keys_at_marks(keys)
        self._claims[claim] = instance, marked
        at = self._at
        for key in marked:
            there = at.get(key)
            if there is None:
                at[key] = {instance: 1}
            else:
                there[instance] = there.get(instance, 0) + 1

    def released(self, claim: int) -> None:
        """Drop a prompt; claims that are unknown or computed are fine."""
        self._drop(*self._claims.pop(claim, ("", ())))

    def computed(self, claim: int) -> str:
        """A prompt has a first token: the blocks will be reported soon.

        Returns the prompt's instance; "" = unknown claim.
        """
        instance, marked = self._claims.pop(claim, ("", ()))
        if marked:
            self._computed.setdefault(instance, []).append(_ComputedChain(marked))
        return instance

    def keys_reported(self, instance: str, holds: Callable[[bytes], bool]) -> None:
        """An instance has reported which blocks are there."""
        if instance in self._computed:
            self._keep(instance, lambda chain: not holds(chain.marked[-1]))

    def reported(self, instance: str) -> None:
        if instance in self._computed:
            for chain in self._computed[instance]:
                chain.reports += 1
            self._keep(instance, lambda chain: chain.reports < REPORTS_AWAITED)

    def lost(self, instance: str) -> None:
        """The instance and all its blocks are gone."""
        self._keep(instance, lambda _: False)

    def _keep(self, instance: str, wanted: Callable[[_ComputedChain], bool]) -> None:
        """Keep the computed chains of an instance for which `wanted` is true."""
        kept: list[_ComputedChain] = []
        for chain in self._computed.pop(instance, ()):
            if wanted(chain):
                kept.append(chain)
            else:
                self._drop(instance, chain.marked)
        if kept:
            self._computed[instance] = kept

    def _drop(self, instance: str, marked: Sequence[bytes]) -> None:
        for key in marked:
            there = self._at[key]
            there[instance] -= 1
            if not there[instance]:
                del there[instance]
                if not there:
                    del self._at[key]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Instances where a chain's beginning is being computed, and how many blocks."""
        at = self._at
        marked = _keys_at_marks(keys) if at else ()
        if not marked or marked[0] not in at:
            return {}
        # An instance with more blocks is at all shorter marks: the known marks are the first ones.
        known = bisect_left(marked, True, key=lambda key: key not in at)
        most, found = len(at[marked[0]]), dict[str, int]()
        for place in range(known - 1, -1, -1):
            there = at[marked[place]]
            if len(there) > len(found):
                found = dict.fromkeys(there, COMPARED_LENGTHS[place]) | found
                if len(found) == most:
                    break
        return found

    @property
    def claims(self) -> list[int]:
        """Claims of prompts without a first token."""
        return list(self._claims)

    @property
    def awaited(self) -> list[str]:
        """Instances with computed chains that are not reported yet."""
        return list(self._computed)

    def digest(self) -> bytes:
        return digest_of(sorted(self._claims.items()), sorted(self._computed.items()))

    def check_invariants(self) -> None:
        """Assert that the counts are those of the chains."""
        counted: dict[bytes, dict[str, int]] = {}
        computed = [(instance, chain.marked) for instance, here in self._computed.items() for chain in here]
        for instance, marked in [*self._claims.values(), *computed]:
            for key in marked:
                there = counted.setdefault(key, {})
                there[instance] = there.get(instance, 0) + 1
        assert counted == self._at


@dataclass(slots=True)
class _ComputedChain:
    """A computed chain with blocks not yet reported, and the load reports since."""

    marked: tuple[bytes, ...]
    reports: int = 0


def _keys_at_marks(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the keys at the marks."""
    marks = bisect_right(COMPARED_LENGTHS, len(keys))
    return _TAKE_MARKS[marks - 2](keys) if marks > 1 else tuple(keys[:marks])


def with_in_flight(
    prefixes: Sequence[tuple[int, int]], in_flight: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Return the prefixes as `BlockTrie.match` gives them, where some slots will soon hold more: (blocks, slot)."""
    if not in_flight:
        return prefixes
    levels = dict(prefixes)
    for blocks, slot in in_flight:
        levels[blocks] = levels.get(blocks, 0) | 1 << slot
    mask, found = 0, []
    for blocks in sorted(levels, reverse=True):  # a slot with more blocks has these, too
        mask |= levels[blocks]
        found.append((blocks, mask))
    return found[::-1]
