"""Long work on the event loop in steps, between which other tasks have a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_turns(steps: Generator[None, None, T]) -> T:
    """What `steps` return at their end; others have a turn before each of them."""
    while True:
        await asyncio.sleep(0)
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
