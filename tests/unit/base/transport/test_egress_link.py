"""The link: one slot after the other at a rate, decode first, nothing stuck after a cancel."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.transport.flow_control import BURST_S, TO_DECODE, TO_STORE, EgressLink
from tests.unit.base.transport.turns import turn


class Clock:
    """Time that passes only when the link sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def link(self, rate_bytes_per_s: float) -> EgressLink:
        return EgressLink(rate_bytes_per_s, clock=lambda: self.now, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleeping.append((seconds, future))
        await future

    async def step(self) -> float:
        """Ends the one sleep there is; returns its length."""
        ((seconds, future),) = self.sleeping
        self.sleeping = []
        self.now += seconds
        future.set_result(None)
        await turn()
        return seconds


async def test_unlimited_lets_everything_pass() -> None:
    link = EgressLink()
    await link.slot(1 << 30, TO_DECODE)
    await link.slot(1 << 30, TO_STORE)
    assert link.waiting == 0


async def test_slots_follow_one_another_at_the_rate_and_decode_goes_first() -> None:
    clock, order = Clock(), list[tuple[str, float]]()
    link = clock.link(1000.0)

    async def send(name: str, nbytes: int, priority: int) -> None:
        await link.slot(nbytes, priority)
        order.append((name, round(clock.now, 6)))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send("store 1", 1000, TO_STORE))
        tasks.create_task(send("store 2", 2000, TO_STORE))
        tasks.create_task(send("decode 1", 500, TO_DECODE))
        tasks.create_task(send("decode 2", 500, TO_DECODE))
        await turn()
        assert link.waiting == 3
        for _ in range(4):
            await clock.step()
    begin = 100.0 - BURST_S
    assert order == [
        ("store 1", round(begin + 1, 6)),
        ("decode 1", round(begin + 1.5, 6)),
        ("decode 2", round(begin + 2, 6)),
        ("store 2", round(begin + 4, 6)),
    ]
    assert link.waiting == 0


async def test_a_late_timer_is_made_up_for_but_idle_time_is_lost() -> None:
    clock = Clock()
    link = clock.link(1000.0)
    clock.now += 50.0
    first = asyncio.ensure_future(link.slot(1000, TO_DECODE))
    await turn()
    assert await clock.step() == pytest.approx(1.0 - BURST_S)
    await first
    clock.now += 0.002
    second = asyncio.ensure_future(link.slot(1000, TO_DECODE))
    await turn()
    assert await clock.step() == pytest.approx(1.0 - 0.002)
    await second


async def test_cancelled_waiters_do_not_hold_the_link() -> None:
    clock = Clock()
    link = clock.link(1000.0)
    slots = [asyncio.ensure_future(link.slot(100, TO_DECODE)) for _ in range(4)]
    await turn()
    slots[1].cancel()  # waits
    slots[0].cancel()  # has the link
    clock.sleeping = []
    await turn()
    assert link.waiting == 1
    await clock.step()
    await slots[2]
    await clock.step()
    await slots[3]
    assert (link.waiting, clock.sleeping) == (0, [])
    last = asyncio.ensure_future(link.slot(1, TO_STORE))
    await turn()
    await clock.step()
    await last


async def test_cancelled_when_its_turn_has_just_come() -> None:
    clock = Clock()
    link = clock.link(1000.0)
    tasks: list[asyncio.Task[None]] = []

    async def first() -> None:
        await link.slot(100, TO_DECODE)
        tasks[1].cancel()  # the link has given it the turn, and it has not run since

    tasks += [asyncio.create_task(first()), *(asyncio.create_task(link.slot(100, TO_DECODE)) for _ in range(2))]
    await turn()
    await clock.step()
    assert tasks[0].done()
    assert tasks[1].cancelled()
    await clock.step()
    await tasks[2]
    assert link.waiting == 0


async def test_cancelled_when_the_one_before_has_just_ended() -> None:
    """The turn passes over a waiter that was cancelled and has not run since."""
    clock = Clock()
    link = clock.link(1000.0)
    first = asyncio.create_task(link.slot(1000, TO_DECODE))
    await turn()
    second, third = (asyncio.create_task(link.slot(1000, TO_DECODE)) for _ in range(2))
    await turn()
    assert link.waiting == 2
    ((_, sleeping),) = clock.sleeping
    clock.sleeping = []
    sleeping.set_result(None)
    second.cancel()  # `first` runs before it and passes the turn on
    await turn()
    await clock.step()
    await third
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert link.waiting == 0


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rate"):
        EgressLink(0)
