"""Prefixes that are being computed: who comes next with the same beginning finds it at that instance.

An instance computes what several of its prompts begin with once. So a prompt that has been placed there counts as its
prefix for the next one, after the queue of which it is a part, until its blocks are reported: some 20 ms after its
token. Only some lengths are looked at, so a common beginning may count as up to a fifth shorter than it is.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from moonpool.core.digest import digest_of

MARKS = tuple(sorted({round(2 ** (step / 4)) for step in range(4 * 20)}))
"""Lengths in blocks at which chains are compared."""
REPORTS = 2
"""Load reports after a token with which its prompt's blocks are reported at the latest, or they were not kept. The
first of them may have been under way when the token was."""


@dataclass(slots=True)
class _Computed:
    """A chain that is computed and not reported; so many reports have come since."""

    marked: tuple[bytes, ...]
    reports: int = 0


class Coming:
    """Chains of the prompts that are placed at prefill instances, by claim, until their blocks are reported."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self._computed: dict[str, list[_Computed]] = {}  # by instance
        self._at: dict[bytes, dict[str, int]] = {}  # by the key at a mark: prompts of each instance

    def placed(self, claim: int, instance: str, keys: Sequence[bytes]) -> None:
        """A prompt is placed."""
        marked = _marked(keys)
        self._claims[claim] = instance, marked
        at = self._at
        for key in marked:
            there = at.get(key)
            if there is None:
                at[key] = {instance: 1}
            else:
                there[instance] = there.get(instance, 0) + 1

    def over(self, claim: int) -> None:
        """It is not there any more; claims that are unknown, or computed, are fine."""
        self._drop(*self._claims.pop(claim, ("", ())))

    def computed(self, claim: int) -> str:
        """It has its token: its blocks will be reported soon. Returns at which instance; "" = the claim is unknown."""
        instance, marked = self._claims.pop(claim, ("", ()))
        if marked:
            self._computed.setdefault(instance, []).append(_Computed(marked))
        return instance

    def told(self, instance: str, holds: Callable[[bytes], bool]) -> None:
        """An instance has told which blocks it holds."""
        if instance in self._computed:
            self._keep(instance, lambda one: not holds(one.marked[-1]))

    def reported(self, instance: str) -> None:
        """An instance has reported its load."""
        if instance in self._computed:
            for one in self._computed[instance]:
                one.reports += 1
            self._keep(instance, lambda one: one.reports < REPORTS)

    def lost(self, instance: str) -> None:
        """Nothing is known of what an instance holds any more."""
        self._keep(instance, lambda _: False)

    def _keep(self, instance: str, wanted: Callable[[_Computed], bool]) -> None:
        """Keeps those of an instance's computed chains that are wanted."""
        kept: list[_Computed] = []
        for one in self._computed.pop(instance, ()):
            if wanted(one):
                kept.append(one)
            else:
                self._drop(instance, one.marked)
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
        """Instances where the beginning of a chain is being computed, and how many blocks of it."""
        if not self._at:
            return {}
        at = map(self._at.get, _marked(keys))
        levels = [(blocks, there) for blocks, there in zip(MARKS, takewhile(bool, at), strict=False) if there]
        found: dict[str, int] = {}
        for blocks, there in reversed(levels):  # who computes more is in all that follow
            if len(there) > len(found):
                found = dict.fromkeys(there, blocks) | found
        return found

    @property
    def claims(self) -> list[int]:
        """Of the prompts that have no token yet."""
        return list(self._claims)

    @property
    def awaited(self) -> list[str]:
        """Instances that will report what they have computed."""
        return list(self._computed)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(sorted(self._claims.items()), sorted(self._computed.items()))

    def check_invariants(self) -> None:
        """Asserts that the counts are those of the chains."""
        counted: dict[bytes, dict[str, int]] = {}
        computed = [(instance, one.marked) for instance, here in self._computed.items() for one in here]
        for instance, marked in [*self._claims.values(), *computed]:
            for key in marked:
                there = counted.setdefault(key, {})
                there[instance] = there.get(instance, 0) + 1
        assert counted == self._at


def _marked(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys at the marks."""
    return tuple([keys[blocks - 1] for blocks in MARKS[: bisect_right(MARKS, len(keys))]])


def with_coming(prefixes: Sequence[tuple[int, int]], coming: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Prefixes as `Forest.match` gives them, where some slots will soon have more: (blocks, slot)."""
    if not coming:
        return prefixes
    levels = dict(prefixes)
    for blocks, slot in coming:
        levels[blocks] = levels.get(blocks, 0) | 1 << slot
    mask, found = 0, []
    for blocks in sorted(levels, reverse=True):  # who has more has so many, too
        mask |= levels[blocks]
        found.append((blocks, mask))
    return found[::-1]
