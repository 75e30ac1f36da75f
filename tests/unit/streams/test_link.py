"""The link: one slot after the other at a rate, decode first, nothing stuck after a cancel."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.streams import link as link_module
from moonpool.streams.link import TO_DECODE, TO_STORE, Link


class Clock:
    """Time that passes only when the link sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sleeping: list[tuple[float, asyncio.Future[None]]] = []
        monkeypatch.setattr(link_module, "_now", lambda: self.now)
        monkeypatch.setattr(link_module, "_sleep", self.sleep)

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


async def turn() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_unlimited_lets_everything_pass() -> None:
    link = Link()
    await link.slot(1 << 30, TO_DECODE)
    await link.slot(1 << 30, TO_STORE)
    assert link.waiting == 0


async def test_slots_follow_one_another_at_the_rate_and_decode_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link, order = Clock(monkeypatch), Link(1000.0), []

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
    begin = 100.0 - link_module.BURST_S
    assert order == [
        ("store 1", round(begin + 1, 6)),
        ("decode 1", round(begin + 1.5, 6)),
        ("decode 2", round(begin + 2, 6)),
        ("store 2", round(begin + 4, 6)),
    ]
    assert link.waiting == 0


async def test_a_late_timer_is_made_up_for_but_idle_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(monkeypatch), Link(1000.0)
    clock.now += 50.0
    first = asyncio.ensure_future(link.slot(1000, TO_DECODE))
    await turn()
    assert await clock.step() == pytest.approx(1.0 - link_module.BURST_S)
    await first
    clock.now += 0.002
    second = asyncio.ensure_future(link.slot(1000, TO_DECODE))
    await turn()
    assert await clock.step() == pytest.approx(1.0 - 0.002)
    await second


async def test_cancelled_waiters_do_not_hold_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(monkeypatch), Link(1000.0)
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


async def test_cancelled_when_its_turn_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(monkeypatch), Link(1000.0)
    first, second, third = (asyncio.ensure_future(link.slot(100, TO_DECODE)) for _ in range(3))
    await turn()
    ((_, future),) = clock.sleeping
    clock.sleeping = []
    pass_on = link._next

    def pass_on_and_cancel() -> None:
        pass_on()
        second.cancel()

    monkeypatch.setattr(link, "_next", pass_on_and_cancel)
    future.set_result(None)
    await turn()
    assert first.done()
    assert second.cancelled()
    await clock.step()
    await third
    assert link.waiting == 0


async def test_cancelled_when_the_one_before_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn passes over a waiter that was cancelled and has not run since."""
    clock, link = Clock(monkeypatch), Link(1000.0)
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
        Link(0)
