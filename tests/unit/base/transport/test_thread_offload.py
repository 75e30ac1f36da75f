"""Payloads that land in a thread: what comes behind them waits, and memory is held until the thread is done."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.errors import StreamBroken
from moonpool.base.kv.keys import slice_hash
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.connection import ReceiveCallbacks
from moonpool.base.transport.payloads import FilledBuffer, ReceiveBuffer, ReceivedPayload
from tests.unit.base.transport.pairs import LAYOUT, REQUEST, Pair, pair, pool_of
from tests.unit.fakes.beside import Held

SIZE = LAYOUT.slice_bytes(0)


class Serving:
    """Takes what comes at the server's end; payloads of a slice land in `memory`."""

    def __init__(self, connection: Pair, *, least_bytes: int = SIZE) -> None:
        self.threads, self.memory = Held(), bytearray(SIZE)
        self.writing: list[bool] = []
        self.seen: list[str] = []
        self.value = slice_hash(b"\x02" * SIZE)
        self._beside, self._changed = ThreadOffload(self.threads, least_bytes), asyncio.Event()
        self.task = asyncio.ensure_future(connection.server.run(ReceiveCallbacks(self._take, self._place)))

    async def until(self, *seen: str) -> None:
        while self.seen != list(seen):
            await self._changed.wait()
            self._changed.clear()

    def _place(self, message: object, nbytes: int) -> ReceiveBuffer | None:
        target = [memoryview(self.memory)]
        return (
            ReceiveBuffer(target, [self.value], lambda: True, self._landed, self._beside, self._write)
            if nbytes
            else None
        )

    def _write(self, writing: bool) -> None:
        self.writing.append(writing)

    def _landed(self, intact: int, error: Exception | None) -> None:
        self.seen.append(f"{intact} {error}")
        self._changed.set()

    def _take(self, message: object, payload: ReceivedPayload) -> None:
        if isinstance(payload, FilledBuffer):
            payload.report()
        else:
            self.seen.append("a message")
            self._changed.set()


@pytest.mark.parametrize("mapped", [True, False])
async def test_what_comes_behind_a_payload_waits_until_it_has_landed(mapped: bool) -> None:
    pool = pool_of()
    async with pair(pool if mapped else None) as connection:
        serving = Serving(connection)
        held = connection.held([pool.slice(0, 1)])
        await connection.tasks[-1]
        await connection.client.write(REQUEST)
        await serving.threads.came.wait()
        await asyncio.sleep(0)
        assert (serving.seen, serving.writing) == ([], [True])
        if mapped:
            assert not held.done.done()  # its sender's memory is read still
            assert not any(serving.memory)
        serving.threads.release()
        await serving.until("1 None", "a message")
        assert (serving.writing, bytes(serving.memory)) == ([True, False], b"\x02" * SIZE)
        connection.server.close(StreamBroken("over"))
        await serving.task
    pool.close()


@pytest.mark.parametrize("mapped", [True, False])
async def test_a_thread_is_waited_for_when_the_connection_has_ended_and_nothing_is_told_then(mapped: bool) -> None:
    pool = pool_of()
    async with pair(pool if mapped else None) as connection:
        serving = Serving(connection)
        connection.held([pool.slice(0, 1)])
        await serving.threads.came.wait()
        connection.server.close(StreamBroken("cut"))
        assert str(await serving.task) == "cut"
        assert serving.writing == [True]
        serving.threads.release()
        await asyncio.sleep(0)
        assert (serving.writing, serving.seen) == ([True, False], [])
        assert bytes(serving.memory) == b"\x02" * SIZE  # mapped memory is there as long as it is read
    pool.close()


async def test_damage_and_defects_are_told_and_the_connection_goes_on() -> None:
    pool = pool_of()
    async with pair(pool) as connection:
        serving = Serving(connection)
        serving.threads.on = False
        serving.value ^= 1
        connection.held([pool.slice(0, 1)])
        await serving.until("0 None")
        serving.threads.defect = RuntimeError("no more memory")
        connection.held([pool.slice(0, 1)])
        await serving.until("0 None", "0 no more memory")
        serving.value ^= 1
        connection.held([pool.slice(0, 1)])
        await serving.until("0 None", "0 no more memory", "1 None")
        assert serving.writing == [True, False] * 3
        connection.server.close(StreamBroken("over"))
        await serving.task
    pool.close()


async def test_small_payloads_land_on_the_loop() -> None:
    pool = pool_of()
    async with pair(pool) as connection:
        serving = Serving(connection, least_bytes=SIZE + 1)
        connection.held([pool.slice(0, 1)])
        await serving.until("1 None")
        assert (serving.writing, list(serving.threads.waiting)) == ([], [])
        connection.server.close(StreamBroken("over"))
        await serving.task
    pool.close()


async def test_a_connection_that_was_paused_meanwhile_goes_on_when_both_are_over() -> None:
    pool = pool_of()
    async with pair(pool) as connection:
        serving = Serving(connection)
        connection.held([pool.slice(0, 1)])
        await serving.threads.came.wait()
        await connection.client.write(REQUEST)
        connection.server.pause()
        connection.server.resume()
        connection.server.pause()
        serving.threads.release()
        await serving.until("1 None")
        connection.server.resume()
        await serving.until("1 None", "a message")
        connection.server.close(StreamBroken("over"))
        await serving.task
    pool.close()
