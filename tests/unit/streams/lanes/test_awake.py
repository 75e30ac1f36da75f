"""An event loop turns for a moment for who asks again at once, where it takes the processor from nobody."""

from __future__ import annotations

import asyncio

from moonpool.streams.lanes.awake import AWAKE_S, LOOK_S, REST_S, Awake, run_and_wait

SOON_S = AWAKE_S / 2


class Watched:
    """Something to keep awake, on a clock that stands still; counts how often that is looked at."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0
        self.run = self.wait = 0
        self.awake = Awake(self.clock, self.run_and_wait)

    def clock(self) -> float:
        self.looks += 1
        return self.now

    def run_and_wait(self) -> tuple[int, int]:
        return self.run, self.wait

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
    for _ in range(2):
        watched.ask(SOON_S)
        assert await watched.turns() == 10
    watched.now += AWAKE_S
    assert await watched.turns() == 1
    watched.ask(0.0)
    assert await watched.turns() == 0, "the question came late"


async def test_where_others_want_the_processor_the_loop_sleeps_for_a_while() -> None:
    watched = Watched()
    watched.ask(0.0)
    watched.ask(SOON_S)
    watched.now += LOOK_S
    watched.run, watched.wait = 90, 10
    watched.awake.answered()
    assert await watched.turns() == 1
    watched.run, watched.wait = 1000, 10
    for after_s, turns in ((SOON_S, 0), (REST_S, 0), (SOON_S, 10)):
        watched.ask(after_s)
        assert await watched.turns() == turns


async def test_what_the_system_says_of_this_thread_is_understood() -> None:
    """Where it says nothing the loop sleeps as ever."""
    try:
        run, wait = run_and_wait()
    except OSError:
        run = wait = 0
    assert min(run, wait) >= 0

    def nothing() -> tuple[int, int]:
        raise FileNotFoundError

    watched = Watched()
    watched.awake = Awake(watched.clock, nothing)
    for _ in range(3):
        watched.ask(SOON_S)
    assert await watched.turns() == 0
