"""A client that leaves: its request ends everywhere, whatever it waits for."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.protobuf.message import Message as Protobuf
from starlette.applications import Starlette

from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from moonpool.client.transport import GenerateCall
from moonpool.gateway.serving.client_watch import ClientGoneError, while_connected
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, TURNS, make_gateway, ready, scope, settings, tokenizer

Message = MutableMapping[str, Any]


class HeldCall:
    """Answers with some messages, then never again."""

    def __init__(self, messages: Iterable[pb.GenerateResponse]) -> None:
        self._messages = iter(messages)
        self.held = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def cancelled(self) -> bool:
        return self.ended.is_set()

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        await asyncio.sleep(0)  # as a read from the network lets others run
        message = next(self._messages, None)
        if message is None:
            self.held.set()
            await asyncio.Event().wait()
        assert message is not None
        return message

    def cancel(self) -> None:
        self.ended.set()


class Holding:
    """A transport whose one request never ends; the rest is the fake conductor's."""

    def __init__(self, messages: Iterable[pb.GenerateResponse]) -> None:
        self._fake = ready(FakeConductor())
        self.call = HeldCall(messages)

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        return self.call

    async def query(self, request: Protobuf, timeout_s: float) -> Any:
        return self._fake.answer(request)

    async def aclose(self) -> None:
        """Nothing is open."""


class Connection:
    """A client as ASGI has it: it sends one body, and leaves when it is told to."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._incoming: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.left = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def make(holding: Holding, threads: ThreadPoolExecutor) -> Starlette:
    return make_gateway(AsyncClient(transport=holding, timeout_s=60), settings(), threads, tokenizer())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_request_ends_with_its_client(stream: bool, tokens: int) -> None:
    """Before its first token and after, streamed or whole: cancelled at the conductor, and counted as over."""
    holding = Holding(answer()[: 1 + tokens])
    with ThreadPoolExecutor(1) as threads:
        app, client = make(holding, threads), Connection({"messages": TURNS, "stream": stream})
        serving = asyncio.create_task(app(scope(CHAT), client.receive, client.send))
        await holding.call.held.wait()
        assert not holding.call.cancelled
        assert bool(client.sent) == (stream and tokens > 0)
        client.left.set()
        await serving
        assert holding.call.cancelled
        text = await metrics(app)
    for line in ("num_requests_running", "num_requests_waiting"):
        assert f'vllm:{line}{{engine="0",model_name="tiny"}} 0.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in text


async def test_client_that_leaves_within_its_body() -> None:
    """Nothing is asked of the conductor."""
    holding = Holding([])
    with ThreadPoolExecutor(1) as threads:
        client = Connection({})
        client.left.set()
        await client.receive()
        await make(holding, threads)(scope(CHAT), client.receive, client.send)
    assert not holding.call.held.is_set()


async def test_work_of_a_client_that_has_left_has_ended_before_this_is_told() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            ended = True

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await while_connected(receive, work())
    assert ended


async def test_slow_body_is_answered() -> None:
    """A body that does not come in time is answered, and the connection closed."""
    holding = Holding([])
    with ThreadPoolExecutor(1) as threads:
        app = make_gateway(AsyncClient(transport=holding), settings(read_timeout_s=0.001), threads, tokenizer())
        client = Connection({})
        await client.receive()
        await app(scope(CHAT), client.receive, client.send)
    assert client.sent[0]["status"] == 408
    assert (b"connection", b"close") in client.sent[0]["headers"]


async def test_stopping_the_server_ends_requests() -> None:
    """What runs beyond the server's patience is cancelled, and so is its request."""
    holding = Holding(answer()[:2])
    with ThreadPoolExecutor(1) as threads:
        client = Connection({"messages": TURNS, "stream": True})
        serving = asyncio.create_task(make(holding, threads)(scope(CHAT), client.receive, client.send))
        await holding.call.held.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert holding.call.cancelled


async def metrics(app: Starlette) -> str:
    client = Connection({})
    await app({**scope("/metrics"), "method": "GET"}, client.receive, client.send)
    return str(client.sent[1]["body"].decode())
