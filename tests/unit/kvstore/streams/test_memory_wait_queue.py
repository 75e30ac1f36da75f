"""Waiting for room in DRAM."""

import asyncio

import pytest

from moonpool.base.errors import DeadlineExceeded, InvalidRequest
from moonpool.kvstore.memory_wait_queue import MemoryWaitQueue
from tests.unit.kvstore.helpers import keys_of

KEYS = keys_of(6)
A, B, C = KEYS[:3]


class Rooms:
    """Room for some things."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.undone: list[int] = []

    def attempt(self, size: int) -> int | None:
        if size > self.free:
            return None
        self.free -= size
        return size

    def undo(self, size: int) -> None:
        self.free += size
        self.undone.append(size)


async def test_room_is_given_first_come_first_served() -> None:
    rooms, queue = Rooms(1), MemoryWaitQueue(2)
    assert await queue.get(lambda: rooms.attempt(1), rooms.undo, 1) == 1
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 10))
    small = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await queue.get(lambda: rooms.attempt(1), rooms.undo, 10)
    rooms.free = 2
    queue.notify()
    await asyncio.sleep(0)
    assert not small.done()
    rooms.free = 4
    queue.notify()
    assert list(await asyncio.gather(large, small)) == [3, 1]
    assert len(queue) == 0


async def test_waiting_in_one_group_does_not_delay_another() -> None:
    rooms, queue = Rooms(1), MemoryWaitQueue(9)
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 10, group="t"))
    await asyncio.sleep(0)
    assert (queue.waits("t"), queue.waits()) == (True, False)
    assert await queue.get(lambda: rooms.attempt(1), rooms.undo, 10) == 1
    other = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    assert len(queue) == 2
    rooms.free = 1
    queue.notify()
    assert await other == 1
    rooms.free = 3
    queue.notify()
    assert await large == 3
    assert not queue.waits("t")


async def test_waiting_for_room_ends_and_lets_others_pass() -> None:
    rooms, queue = Rooms(1), MemoryWaitQueue(9)
    large = asyncio.ensure_future(queue.get(lambda: rooms.attempt(3), rooms.undo, 0.01))
    small = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    with pytest.raises(DeadlineExceeded, match="no room within"):
        await large
    assert await small == 1


async def test_room_that_comes_too_late_is_given_back() -> None:
    rooms, queue = Rooms(0), MemoryWaitQueue(9)
    waiting = asyncio.ensure_future(queue.get(lambda: rooms.attempt(1), rooms.undo, 10))
    await asyncio.sleep(0)
    rooms.free = 1
    queue.notify()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (rooms.free, rooms.undone) == (1, [1])


async def test_an_attempt_that_fails_fails_its_owner_only() -> None:
    queue = MemoryWaitQueue(9)
    answers: list[object] = [None]

    def attempt() -> int | None:
        if not answers:
            raise InvalidRequest("keys", "no")
        return answers.pop()  # type: ignore[return-value]

    waiting = asyncio.ensure_future(queue.get(attempt, lambda _: None, 10))
    await asyncio.sleep(0)
    queue.notify()
    with pytest.raises(InvalidRequest):
        await waiting
    assert len(queue) == 0
