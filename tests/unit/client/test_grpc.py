"""The SDK over real gRPC: errors, cancelling, coming back; against a conductor service that a test scripts."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.rpc.server import serving
from moonpool.client import AsyncClient, Client, Overloaded, Unavailable
from moonpool.client.testing import answer
from moonpool.client.tracing import TRACEPARENT, traceparent
from moonpool.v1 import conductor_pb2 as pb

from .conftest import Dial

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["ConductorService"]
WAIT_S = 60.0
HOLDS = ("hold", "interrupt")


class Scripted:
    """Serves "ok", "overloaded", "none" by prompt; "hold" never ends; "interrupt" does neither, and sends SIGINT.

    SIGINT goes to the thread that serves, and so does not end what the main thread waits for: as if SIGINT came before.
    """

    def __init__(self) -> None:
        self.traces: list[str] = []
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.traces += [value for key, value in context.invocation_metadata() if key == TRACEPARENT]
        if request.text == "overloaded":
            raise Overloaded("no", reason="ttft_slo", predicted_ttft_s=9.0, slo_s=1.0, retry_after_s=8.0)
        if request.text == "none":
            raise Unavailable("no engines")
        messages = answer()
        self.begun.set()
        if request.text in HOLDS:  # such a call ends only if the client cancels the call
            context.add_done_callback(lambda _: self.cancelled.set())
        if request.text == "interrupt":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        for message in messages[:-1]:
            yield message
        if request.text in HOLDS:
            await asyncio.Event().wait()
        yield messages[-1]

    async def ClusterState(self, request: pb.ClusterStateRequest, context: Any) -> pb.ClusterStateResponse:
        return pb.ClusterStateResponse(ready=True)


@contextmanager
def served(scripted: Scripted) -> Iterator[str]:
    """Serve on a thread with a loop of its own, so that the blocking client really blocks."""
    address: Future[str] = Future()
    loops: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loops.set_result((asyncio.get_running_loop(), stop))
        async with serving("127.0.0.1:0", [(DESCRIPTOR, scripted)], grace_s=0.0) as server:
            address.set_result(server.address)
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, stop = loops.result(WAIT_S)
    try:
        yield address.result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)


def test_trace_goes_with_requests() -> None:
    """As metadata, of requests that begin in the trace's context, whichever client sends them."""
    scripted = Scripted()

    async def ask(address: str) -> None:
        traceparent.set("00-a-b-02")
        async with AsyncClient(address) as client:
            await client.generate(prompt="ok")

    with served(scripted) as address, Client(address) as client:
        client.generate(prompt="ok")
        token = traceparent.set("00-a-b-01")
        try:
            client.generate(prompt="ok")
        finally:
            traceparent.reset(token)
        client.generate(prompt="ok")
        asyncio.run(ask(address))
    assert scripted.traces == ["00-a-b-01", "00-a-b-02"]


def test_calls_errors_cancelling_and_deadlines(dial: Dial) -> None:
    scripted = Scripted()
    with served(scripted) as address, dial(address, timeout_s=WAIT_S) as client:
        assert client.generate(prompt="ok").text == "1 2 3 "
        assert client.cluster_state().ready
        with pytest.raises(Overloaded) as caught:
            client.generate(prompt="overloaded")
        assert (caught.value.reason, caught.value.retry_after_s) == ("ttft_slo", 8.0)
        with pytest.raises(Unavailable, match="no engines"):
            client.generate(prompt="none")
        for _ in client.stream(prompt="hold"):
            break
        assert scripted.cancelled.wait(WAIT_S)
        with pytest.raises(DeadlineExceeded, match="s are over; the client waited for the conductor's"):
            client.generate(prompt="hold", timeout_s=0.2)


def test_an_unreachable_address_is_unavailable_within_bounds(dial: Dial) -> None:
    with dial("127.0.0.1:1", connect_timeout_s=0.1) as client, pytest.raises(Unavailable):
        client.generate(prompt="hi")


async def test_cancelling_the_task_that_reads_cancels_the_request() -> None:
    scripted = Scripted()
    with served(scripted) as address:
        async with AsyncClient(address, timeout_s=WAIT_S) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream(prompt="hold"):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(scripted.cancelled.wait, WAIT_S)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to SIGINT, which a process that runs tests beside others ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_cancels_the_request() -> None:
    scripted = Scripted()
    with served(scripted) as address, Client(address, timeout_s=10.0 * WAIT_S) as client:  # no end before SIGINT's
        with pytest.raises(KeyboardInterrupt):
            client.generate(prompt="interrupt")
        assert scripted.cancelled.wait(WAIT_S)
        assert client.generate(prompt="ok").text == "1 2 3 "


def test_closing_from_another_thread_ends_a_stream_and_a_call() -> None:
    scripted = Scripted()
    with served(scripted) as address, Client(address, timeout_s=WAIT_S) as client, ThreadPoolExecutor() as pool:
        stream = client.stream(prompt="hold")
        events = iter(stream)
        for _ in range(3):
            next(events)
        rest = pool.submit(list, events)
        stream.close()
        assert rest.result(WAIT_S) == []
        assert scripted.cancelled.wait(WAIT_S)
        scripted.begun.clear()
        call = pool.submit(client.generate, prompt="hold")
        assert scripted.begun.wait(WAIT_S)
        client.close()
        with pytest.raises(Unavailable):
            call.result(WAIT_S)
