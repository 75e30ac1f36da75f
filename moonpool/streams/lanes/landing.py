"""Payloads that are not copied twice: memory in which they land, and payloads that stay where they lie meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.kv.hashes import slice_hash
from moonpool.kv.scattered import Bytes


class Landing(NamedTuple):
    """Memory that takes a payload as it comes.

    Attributes:
        targets: the payload's slices go there, in order; together as long as it is.
        hashes: of each.
        live: asked before each write: whether the memory may still be written. What comes later is dropped.
        landed: to be called when all of the payload has come, whatever has become of it, with the number of leading
            targets that have their hash.
    """

    targets: list[memoryview]
    hashes: Sequence[int]
    live: Callable[[], bool]
    landed: Callable[[int], None]

    def intact(self) -> int:
        """How many leading targets have their hash."""
        for number, (target, value) in enumerate(zip(self.targets, self.hashes, strict=True)):
            if slice_hash(target) != value:
                return number
        return len(self.targets)


class Landed(NamedTuple):
    """A payload that has landed: where, and how many leading targets have their hash."""

    landing: Landing
    intact: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return sum(target.nbytes for target in self.landing.targets)

    def tell(self) -> None:
        """Tells whoever gave the memory."""
        self.landing.landed(self.intact)


class Lent(NamedTuple):
    """A payload in memory that its sender can still write, until `give_back`.

    Whoever uses it copies it to memory of its own first, and then verifies the copy.
    """

    data: Bytes
    give_back: Callable[[], None]
