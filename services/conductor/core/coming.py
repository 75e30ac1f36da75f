"""Prefixes that are being computed: who comes next with the same beginning finds it at that instance.

An instance computes what several of its prompts begin with once. So a prompt that has been placed there, and has no
token yet, counts as its prefix for the next one, after the queue of which it is a part. Only some lengths are looked
at, so a common beginning may count as up to a fifth shorter than it is.
"""

from collections.abc import Sequence

from moonpool.core.digest import digest_of

MARKS = tuple(sorted({round(2 ** (step / 4)) for step in range(4 * 20)}))
"""Lengths in blocks at which chains are compared."""


class Coming:
    """Chains of the prompts that are placed at prefill instances and have no token yet, by claim."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self._at: dict[bytes, dict[str, int]] = {}  # by the key at a mark: prompts of each instance

    def placed(self, claim: int, instance: str, keys: Sequence[bytes]) -> None:
        """A prompt is placed."""
        marked = _marked(keys)
        self._claims[claim] = instance, marked
        for key in marked:
            there = self._at.setdefault(key, {})
            there[instance] = there.get(instance, 0) + 1

    def over(self, claim: int) -> None:
        """It has its token, or is not there any more; unknown claims are fine."""
        instance, marked = self._claims.pop(claim, ("", ()))
        for key in marked:
            there = self._at[key]
            there[instance] -= 1
            if not there[instance]:
                del there[instance]
                if not there:
                    del self._at[key]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Instances where the beginning of a chain is being computed, and how many blocks of it."""
        levels: list[tuple[int, dict[str, int]]] = []
        for blocks in MARKS if self._at else ():
            there = self._at.get(keys[blocks - 1]) if blocks <= len(keys) else None
            if there is None:
                break
            levels.append((blocks, there))
        found: dict[str, int] = {}
        for blocks, there in reversed(levels):  # who computes more is in all that follow
            if len(there) > len(found):
                found = dict.fromkeys(there, blocks) | found
        return found

    @property
    def claims(self) -> list[int]:
        """Of the prompts."""
        return list(self._claims)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(sorted(self._claims.items()))

    def check_invariants(self) -> None:
        """Asserts that the counts are those of the claims."""
        counted: dict[bytes, dict[str, int]] = {}
        for instance, marked in self._claims.values():
            for key in marked:
                there = counted.setdefault(key, {})
                there[instance] = there.get(instance, 0) + 1
        assert counted == self._at


def _marked(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    found = []
    for blocks in MARKS:
        if blocks > len(keys):
            break
        found.append(keys[blocks - 1])
    return tuple(found)


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
