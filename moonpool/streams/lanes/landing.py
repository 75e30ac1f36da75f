"""Where a payload lands that is not to be copied twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory that takes a payload as it comes, before anything of it is verified.

    Attributes:
        targets: the payload's parts go there, in order; together as long as it is.
        live: asked before each write: whether the memory may still be written. What comes later is dropped.
        landed: to be called when all of the payload has come, whatever has become of it.
    """

    targets: list[memoryview]
    live: Callable[[], bool]
    landed: Callable[[], None]


def copy_parts(parts: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copies bytes that lie in parts to targets that are cut otherwise; both have the same number of bytes."""
    left = list(reversed(parts))
    for target in targets:
        at = 0
        while at < target.nbytes:
            part = left.pop()
            count = min(part.nbytes, target.nbytes - at)
            target[at : at + count] = part[:count]
            at += count
            if count < part.nbytes:
                left.append(part[count:])
