"""Deadlines of many waits with one timer."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.transport.async_utils import Deadlines

LONG_S = 60.0


async def wait(deadlines: Deadlines, seconds: float) -> str:
    try:
        with deadlines.within(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        return "late"
    return "never"


async def test_a_wait_ends_at_its_deadline_and_later_ones_go_on() -> None:
    deadlines = Deadlines()
    waits = [asyncio.ensure_future(wait(deadlines, seconds)) for seconds in (LONG_S, 0.002, 0.0, LONG_S)]
    assert await asyncio.gather(*waits[1:3]) == ["late", "late"]
    assert (len(deadlines), [each.done() for each in waits]) == (2, [False, True, True, False])
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert ([waits[0].cancelled(), waits[3].cancelled()], len(deadlines)) == ([True, True], 0)
    deadlines.close()


async def test_what_is_over_in_time_and_what_fails_otherwise_is_as_it_was() -> None:
    deadlines = Deadlines()
    with deadlines.within(0.0):
        pass
    with pytest.raises(KeyError), deadlines.within(LONG_S):
        raise KeyError
    assert len(deadlines) == 0
    assert await wait(deadlines, 0.0) == "late"
    deadlines.close()


async def test_who_is_cancelled_is_cancelled_also_at_its_deadline() -> None:
    deadlines = Deadlines()

    async def outer() -> None:
        async with asyncio.timeout(0.0):
            await wait(deadlines, LONG_S)

    with pytest.raises(TimeoutError):
        await outer()
    waiting = asyncio.ensure_future(wait(deadlines, LONG_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    deadlines.close()
