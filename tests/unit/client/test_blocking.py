"""What is the blocking client's own: its thread, its use from threads and under loops, and clear errors for misuse."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moonpool.client import Client
from moonpool.client.background import BackgroundLoop
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.v1 import conductor_pb2 as pb

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
