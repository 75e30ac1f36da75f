"""The SDK over real gRPC: errors, cancelling, coming back; against a conductor service that a test scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from moonpool.client import AsyncClient, Client, Overloaded, Unavailable
from moonpool.client.testing import answer
from moonpool.errors import DeadlineExceeded
from moonpool.rpc.server import serving
from moonpool.v1 import conductor_pb2 as pb

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["ConductorService"]
WAIT_S = 10.0


class Scripted:
    """Serves "ok", "overloaded", "none" by prompt; "hold" never ends, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if request.text == "overloaded":
            raise Overloaded("no", reason="ttft_slo", predicted_ttft_s=9.0, slo_s=1.0, retry_after_s=8.0)
        if request.text == "none":
            raise Unavailable("no engines")
        messages = answer()
        try:
            for message in messages[:-1]:
                yield message
            if request.text == "hold":
                await asyncio.Event().wait()
            yield messages[-1]
        finally:
            if request.text == "hold":
                self.cancelled.set()

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


def test_blocking() -> None:
    scripted = Scripted()
    with served(scripted) as address, Client(address, timeout_s=WAIT_S) as client:
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
        with pytest.raises(DeadlineExceeded):
            client.generate(prompt="hold", timeout_s=0.2)


def test_an_unreachable_address_is_unavailable_within_bounds() -> None:
    with Client("127.0.0.1:1", connect_timeout_s=0.1) as client, pytest.raises(Unavailable):
        client.generate(prompt="hi")


async def test_asyncio() -> None:
    scripted = Scripted()
    async with (
        serving("127.0.0.1:0", [(DESCRIPTOR, scripted)], grace_s=0.0) as server,
        AsyncClient(server.address, timeout_s=WAIT_S) as client,
    ):
        assert (await client.generate(prompt="ok")).text == "1 2 3 "
        with pytest.raises(Overloaded):
            await client.generate(prompt="overloaded")
        async for _ in client.stream(prompt="hold"):
            break
        assert await asyncio.to_thread(scripted.cancelled.wait, WAIT_S)
        scripted.cancelled.clear()
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
        with pytest.raises(DeadlineExceeded):
            await client.generate(prompt="hold", timeout_s=0.2)
