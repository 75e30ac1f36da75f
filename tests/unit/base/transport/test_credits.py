"""Byte credits: exact counts, first come first served, nothing lost on cancel, timeout or close."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import StreamBroken, TransferFailed
from moonpool.base.transport.flow_control import ByteCredits, CreditReturn, StreamTraffic
from tests.examples import examples
from tests.unit.base.transport.turns import turn

SMALL = settings(max_examples=examples(60), database=None)
LONG_S = 60.0


async def test_acquire_and_grant() -> None:
    given = ByteCredits(100)
    await given.acquire(60, timeout_s=LONG_S)
    assert (given.available, given.window) == (40, 100)
    waiting = asyncio.ensure_future(given.acquire(50, timeout_s=LONG_S))
    await turn()
    assert not waiting.done()
    given.grant(9)
    await turn()
    assert not waiting.done()
    given.grant(1)
    await waiting
    assert (given.available, given.waiting) == (0, 0)


async def test_first_come_first_served() -> None:
    given = ByteCredits(100)
    await given.acquire(100, timeout_s=LONG_S)
    order: list[str] = []

    async def take(name: str, n: int) -> None:
        await given.acquire(n, timeout_s=LONG_S)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, n in (("large", 70), ("small", 1), ("middle", 20)):
            tasks.create_task(take(name, n))
        await turn()
        given.grant(69)
        await turn()
        assert order == []
        given.grant(2)
        await turn()
        assert order == ["large", "small"]
        given.grant(29)
    assert order == ["large", "small", "middle"]
    assert given.available == 9


async def test_nobody_overtakes_a_waiter() -> None:
    given = ByteCredits(100)
    await given.acquire(50, timeout_s=LONG_S)
    large = asyncio.ensure_future(given.acquire(75, timeout_s=LONG_S))
    await turn()
    small = asyncio.ensure_future(given.acquire(1, timeout_s=LONG_S))
    await turn()
    assert not small.done()
    given.grant(50)
    await asyncio.gather(large, small)
    assert given.available == 24


async def test_oversize_goes_when_the_window_is_full_and_must_be_paid_back() -> None:
    given = ByteCredits(100)
    await given.acquire(1000, timeout_s=LONG_S)
    assert given.available == -900
    after = asyncio.ensure_future(given.acquire(1, timeout_s=LONG_S))
    await turn()
    given.grant(900)
    await turn()
    assert not after.done()
    given.grant(1)
    await after
    assert given.window == 100


@SMALL
@given(st.integers(1, 200), st.lists(st.integers(1, 400), max_size=30))
def test_with_a_batching_receiver_every_message_goes(window: int, sizes: list[int]) -> None:
    """No message waits for credits that the receiver holds back, whatever the sizes."""

    async def run() -> None:
        given, returns = ByteCredits(window), CreditReturn(window)
        for n in sizes:
            await asyncio.wait_for(given.acquire(n, timeout_s=LONG_S), LONG_S)
            given.grant(returns.consumed(n))
            assert given.available + returns.pending == window == given.window

    asyncio.run(run())


async def test_timeout_takes_nothing() -> None:
    given = ByteCredits(10)
    await given.acquire(10, timeout_s=LONG_S)
    with pytest.raises(TransferFailed, match="no credit"):
        await given.acquire(1, timeout_s=0.001)
    assert (given.available, given.waiting) == (0, 0)


async def test_a_cancelled_waiter_takes_nothing_and_lets_others_go() -> None:
    given = ByteCredits(100)
    await given.acquire(60, timeout_s=LONG_S)
    large = asyncio.ensure_future(given.acquire(75, timeout_s=LONG_S))
    small = asyncio.ensure_future(given.acquire(30, timeout_s=LONG_S))
    await turn()
    assert given.waiting == 2
    large.cancel()
    await small
    assert large.cancelled()
    assert (given.available, given.waiting) == (10, 0)


async def test_cancelled_just_after_it_was_served_gives_back() -> None:
    given = ByteCredits(100)
    await given.acquire(100, timeout_s=LONG_S)
    waiting = asyncio.ensure_future(given.acquire(75, timeout_s=LONG_S))
    await turn()
    given.grant(100)
    waiting.cancel()  # it has been served and has not run yet
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given.available == 100


async def test_close_fails_present_and_later_waiters() -> None:
    given = ByteCredits(0)
    waiting = [asyncio.ensure_future(given.acquire(1, timeout_s=LONG_S)) for _ in range(3)]
    await turn()
    error = StreamBroken("gone")
    given.close(error)
    given.close(StreamBroken("again"))
    assert await asyncio.gather(*waiting, return_exceptions=True) == [error] * 3
    with pytest.raises(StreamBroken, match="gone"):
        await given.acquire(1, timeout_s=LONG_S)
    given.grant(5)
    assert given.waiting == 0


async def test_a_window_that_has_not_been_given_lets_nothing_pass() -> None:
    given = ByteCredits()
    waiting = asyncio.ensure_future(given.acquire(1, timeout_s=LONG_S))
    await turn()
    assert not waiting.done()
    given.grant(8)
    await waiting
    assert (given.available, given.window) == (7, 8)


def test_credits_return_in_batches() -> None:
    returns = CreditReturn(100)
    assert [returns.consumed(n) for n in (10, 14, 1, 24, 40, 1)] == [0, 0, 25, 0, 64, 0]
    assert returns.pending == 1
    assert CreditReturn(0).consumed(3) == 3


def test_everything_goes_back_when_nothing_more_is_expected() -> None:
    returns = CreditReturn(100)
    assert returns.consumed(10) == 0
    assert returns.pending == 10
    assert returns.flush() == 10
    assert returns.flush() == 0
    assert returns.consumed(3, idle=True) == 3
    assert returns.consumed(0, idle=True) == 0


def test_what_is_out_is_what_was_taken_and_has_not_come_back() -> None:
    allowance = ByteCredits()
    allowance.grant(100)
    assert allowance.out == 0
    asyncio.run(allowance.acquire(70, timeout_s=1))
    assert allowance.out == 70
    allowance.grant(70)
    assert allowance.out == 0


def test_traffic_adds_up() -> None:
    assert sum([StreamTraffic(1, 2, 3), StreamTraffic(10, 20, 30)], StreamTraffic()) == StreamTraffic(11, 22, 33)
