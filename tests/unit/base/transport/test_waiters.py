"""The waiter queue: order, priorities, and nothing lost when a task is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.transport.async_utils import WaiterQueue
from tests.unit.base.transport.turns import turn


class Tokens:
    """Something scarce: an integer number of tokens, taken by a waiter queue."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.queue: WaiterQueue[int, int] = WaiterQueue(self.take, self.put_back)

    def take(self, n: int) -> int | None:
        if n < 0:
            raise ValueError(n)
        if n > self.free:
            return None
        self.free -= n
        return n

    def put_back(self, n: int, result: int) -> None:
        assert n == result
        self.free += n

    def add(self, n: int) -> None:
        self.free += n
        self.queue.notify()


async def test_what_is_there_is_returned_at_once_unless_another_task_waits() -> None:
    tokens = Tokens(3)
    assert await tokens.queue.get(2) == 2
    first = asyncio.ensure_future(tokens.queue.get(5))
    await turn()
    second = asyncio.ensure_future(tokens.queue.get(1))
    await turn()
    assert (first.done(), second.done(), len(tokens.queue)) == (False, False, 2)
    tokens.add(5)
    assert (await first, await second) == (5, 1)
    assert (tokens.free, len(tokens.queue), bool(tokens.queue)) == (0, 0, False)


async def test_priority_goes_before_arrival() -> None:
    tokens, order = Tokens(), list[str]()

    async def get(name: str, priority: int) -> None:
        await tokens.queue.get(1, priority=priority)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, priority in (("late 1", 1), ("late 2", 1), ("early 1", 0), ("early 2", 0)):
            tasks.create_task(get(name, priority))
        await turn()
        for _ in range(4):
            tokens.add(1)
            await turn()
    assert order == ["early 1", "early 2", "late 1", "late 2"]


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_a_cancelled_task_has_taken_nothing_and_lets_others_go(cancelled: int) -> None:
    tokens = Tokens(2)
    tasks = [asyncio.ensure_future(tokens.queue.get(n)) for n in (3, 3, 3)]
    await turn()
    tasks[cancelled].cancel()
    await turn()
    assert len(tokens.queue) == 2
    tokens.add(4)
    assert await asyncio.gather(*tasks[:cancelled], *tasks[cancelled + 1 :]) == [3, 3]
    assert (tokens.free, len(tokens.queue)) == (0, 0)


async def test_a_task_cancelled_just_after_it_was_served_gives_back_to_the_next() -> None:
    tokens = Tokens()
    first, second = (asyncio.ensure_future(tokens.queue.get(1)) for _ in range(2))
    await turn()
    tokens.add(1)
    first.cancel()  # it has been served and has not run yet
    assert await second == 1
    assert first.cancelled()
    assert tokens.free == 0


async def test_what_an_attempt_raises_only_its_own_task_raises() -> None:
    tokens = Tokens()
    blocker = asyncio.ensure_future(tokens.queue.get(2))
    await turn()
    bad, good = asyncio.ensure_future(tokens.queue.get(-1)), asyncio.ensure_future(tokens.queue.get(1))
    await turn()
    tokens.add(3)
    await asyncio.gather(blocker, good)
    with pytest.raises(ValueError, match="-1"):
        await bad


async def test_close_ends_present_and_later_waiting() -> None:
    tokens = Tokens()
    waiting = [asyncio.ensure_future(tokens.queue.get(1)) for _ in range(3)]
    await turn()
    tokens.queue.close(RuntimeError("over"))
    tokens.queue.close(RuntimeError("again"))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(result) for result in results] == ["over"] * 3
    with pytest.raises(RuntimeError, match="over"):
        await tokens.queue.get(0)
