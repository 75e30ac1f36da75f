"""An event loop turns for a moment for a peer that asks again at once, and for no other."""

from __future__ import annotations

import asyncio

from moonpool.streams.lanes.awake import AWAKE_S, Awake

SOON_S = AWAKE_S / 2


class Watched:
    """Something to keep awake, on a clock that stands still; counts how often that is looked at."""

    def __init__(self, awake_s: float = AWAKE_S) -> None:
        self.now, self.looks = 100.0, 0
        self.awake = Awake(awake_s, self.clock)

    def clock(self) -> float:
        self.looks += 1
        return self.now

    def ask(self, after_s: float) -> None:
        self.now += after_s
        self.awake.asked()
        self.awake.answered()

    async def turns(self, of: int = 10) -> int:
        """In how many of so many turns of the loop it is looked at."""
        before = self.looks
        for _ in range(of):
            await asyncio.sleep(0)
        return self.looks - before


async def test_who_asks_again_at_once_is_waited_for_without_sleep_but_for_a_moment_only() -> None:
    watched = Watched()
    watched.ask(0.0)
    assert await watched.turns() == 0
    watched.ask(SOON_S)
    assert await watched.turns() == 10
    watched.ask(SOON_S)
    assert await watched.turns() == 10
    watched.now += AWAKE_S
    assert await watched.turns() == 1
    watched.ask(0.0)
    assert await watched.turns() == 0, "the question came late"


async def test_on_one_processor_the_loop_sleeps() -> None:
    watched = Watched(awake_s=0.0)
    for _ in range(3):
        watched.ask(0.0)
    assert await watched.turns() == 0
