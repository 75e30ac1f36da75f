"""What is the blocking client's own: its thread, its use from threads and under loops, and clear errors for misuse."""

import asyncio
import gc
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from moonpool.client import Client, background
from moonpool.client.background import BackgroundLoop
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.v1 import conductor_pb2 as pb

if TYPE_CHECKING:
    from _typeshed import TraceFunction

WAIT_S = 60.0


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moonpool-client"]


def test_the_thread_starts_with_the_first_call_and_ends_with_the_client() -> None:
    with FakeConductor().client() as client:
        assert client_threads() == []
        client.stats()
        client.generate(prompt="hi")
        assert len(client_threads()) == 1
    assert client_threads() == []
    client.close()


def test_a_client_that_is_dropped_without_close_ends_its_thread() -> None:
    client = FakeConductor().client()
    client.stats()
    (thread,) = client_threads()
    del client
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_dropping_the_iterator_cancels_the_request() -> None:
    fake = FakeConductor()
    with fake.client() as client:
        events = iter(client.stream(prompt="dropped"))
        next(events)
        del events
        gc.collect()
        client.stats()  # the loop takes calls in order: the cancel came before this one
        assert [request.text for request in fake.cancelled] == ["dropped"]


def test_many_threads_share_a_client() -> None:
    fake = FakeConductor(lambda request: answer((len(request.text),)))
    with fake.client() as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: client.generate(prompt="x" * n).token_ids, range(1, 65)))
    assert results == [[n] for n in range(1, 65)]


async def test_it_works_beside_and_under_a_running_loop() -> None:
    with FakeConductor().client() as client:
        assert (await asyncio.to_thread(client.generate, prompt="hi")).token_ids == [1, 2, 3]
        assert client.generate(prompt="hi").token_ids == [1, 2, 3]  # as in a notebook: this loop waits meanwhile


def test_a_closed_client_says_so() -> None:
    client = FakeConductor().client()
    stream = client.stream(prompt="hi")
    client.close()
    for call in (client.stats, lambda: client.generate(prompt="hi"), lambda: next(iter(stream))):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_call_on_its_own_loop_is_refused_and_does_not_hang() -> None:
    clients: list[Client] = []

    def asks_again(request: pb.GenerateRequest) -> Script:
        clients[0].stats()
        return answer()

    with FakeConductor(asks_again).client() as client:
        clients.append(client)
        with pytest.raises(RuntimeError, match="AsyncClient"):
            client.generate(prompt="hi")


async def nothing() -> None:
    pass


async def three() -> int:
    return 3


def test_a_loop_that_was_forked_in_use_says_so() -> None:
    process_ids = [1]
    loop = BackgroundLoop(lambda: process_ids[-1])
    assert loop.run(three()) == 3
    process_ids.append(2)
    with pytest.raises(RuntimeError, match="forked"):
        loop.run(three())
    process_ids.append(1)
    loop.close(nothing)
    assert client_threads() == []


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # interrupted before the start
@pytest.mark.parametrize("last", range(14))
def test_an_interrupt_at_any_line_of_a_call_leaves_nothing_running(last: int) -> None:
    loop = BackgroundLoop()
    begun, ended = [], []

    async def never_ends() -> None:
        begun.append(last)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(last)

    async def others() -> int:
        for _ in range(3):  # a cancelled task ends within two rounds of the loop
            await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 2  # this task, and the task that waits for the loop's end

    assert loop.run(others()) == 0
    lines = itertools.count()

    def traced(frame: FrameType, event: str, _: object) -> "TraceFunction":
        """Interrupt at a line of `run` or of what it calls here; not in `_start`, which holds a lock."""
        ours = frame.f_code.co_filename == background.__file__ and frame.f_code.co_name != "_start"
        if event == "line" and ours and next(lines) == last:
            raise KeyboardInterrupt
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        loop.run(never_ends())
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert loop.run(others()) == 0
    assert begun == ended
    loop.close(nothing)
