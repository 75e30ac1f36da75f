"""Background responses: the client polls, cancels and deletes; their number and time are bounded."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from google.protobuf.message import Message as Protobuf
from starlette.applications import Starlette

from moonpool.base.errors import Internal
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from moonpool.client.transport import GenerateCall
from moonpool.gateway.responses import background
from moonpool.gateway.responses.background import BackgroundResponses
from moonpool.gateway.responses.event_log import EventLog
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.fakes import answering, make_gateway, ready, scope, settings, tokenizer

from .test_stored_responses import client_of, numbered


class PacedCall:
    """Says where the request is placed once `placed` is set, and the answer once `answered` is set."""

    def __init__(self, placed: asyncio.Event, answered: asyncio.Event) -> None:
        self._messages = iter(answer([1]))
        self._steps = iter([placed, answered])
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        if (step := next(self._steps, None)) is not None:
            await step.wait()
        message = next(self._messages, None)
        if message is None:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self.cancelled = True


class Paced:
    """A transport whose answers wait for the test."""

    def __init__(self) -> None:
        self._fake = ready(FakeConductor())
        self.calls: list[PacedCall] = []
        self.placed, self.answered = asyncio.Event(), asyncio.Event()
        self.app = Starlette()

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        self.calls.append(PacedCall(self.placed, self.answered))
        return self.calls[-1]

    async def query(self, request: Protobuf, timeout_s: float) -> Any:
        return self._fake.answer(request)

    async def aclose(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def paced(**changes: Any) -> AsyncIterator[tuple[Paced, openai.AsyncOpenAI]]:
    transport = Paced()
    with ThreadPoolExecutor(1) as threads:
        transport.app = make_gateway(AsyncClient(transport=transport), settings(**changes), threads, tokenizer())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(transport.app), base_url="http://gateway") as http:
            yield (
                transport,
                openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=http, max_retries=0),
            )


async def until(client: openai.AsyncOpenAI, name: str, status: str) -> Any:
    """The response as soon as it has a status."""
    while True:
        response = await client.responses.retrieve(name)
        if response.status == status:
            return response


async def test_a_response_is_queued_in_progress_and_completed() -> None:
    async with paced() as (transport, client):
        begun = await client.responses.create(model="tiny", input="a", background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        assert (await client.responses.retrieve(begun.id)).status == "queued"
        with pytest.raises(openai.BadRequestError, match="has no answer yet"):
            await client.responses.create(model="tiny", input="b", previous_response_id=begun.id)
        transport.placed.set()
        await until(client, begun.id, "in_progress")
        transport.answered.set()
        done = await until(client, begun.id, "completed")
        assert (done.id, done.output_text) == (begun.id, "1 ")
        assert done.usage.output_tokens == 1
        assert (await client.responses.cancel(begun.id)).to_dict() == done.to_dict()
        following = await client.responses.create(model="tiny", input="b", previous_response_id=begun.id)
        assert following.status == "completed"
        with pytest.raises(openai.BadRequestError, match="no background response"):
            await client.responses.cancel(following.id)


@pytest.mark.parametrize("placed", [False, True])
async def test_a_response_is_cancelled(placed: bool) -> None:
    """Its request ends, too, and it can be cancelled again."""
    async with paced() as (transport, client):
        begun = await client.responses.create(model="tiny", input="a", background=True)
        if placed:
            transport.placed.set()
            await until(client, begun.id, "in_progress")
        for _ in range(2):
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        assert all(call.cancelled for call in transport.calls)
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(begun.id)


async def test_a_response_that_is_deleted_is_not_computed_further() -> None:
    async with paced() as (transport, client):
        begun = await client.responses.create(model="tiny", input="a", background=True)
        transport.placed.set()
        await until(client, begun.id, "in_progress")
        await client.responses.delete(begun.id)
        assert transport.calls[0].cancelled
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_an_answer_that_fails_is_told() -> None:
    def script(request: pb.GenerateRequest) -> list[Any]:
        return [Internal("engine lost")]

    async with answering(FakeConductor(script)) as gateway:
        client = client_of(gateway)
        begun = await client.responses.create(model="tiny", input="a", background=True)
        failed = await until(client, begun.id, "failed")
        assert "engine lost" in failed.error.message


async def test_the_number_under_way_is_bounded() -> None:
    async with paced(max_background_responses=2) as (transport, client):
        begun = [await client.responses.create(model="tiny", input="a", background=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="max_background_responses is 2"):
            await client.responses.create(model="tiny", input="a", background=True)
        await client.responses.cancel(begun[0].id)
        begun.append(await client.responses.create(model="tiny", input="a", background=True))
        transport.placed.set()
        transport.answered.set()
        for each in begun[1:]:
            await until(client, each.id, "completed")


async def test_its_body_counts_until_the_answer_is_there() -> None:
    async with paced(body_memory_bytes=1 << 20) as (transport, client):
        ask: Any = {"model": "tiny", "input": "a" * 100_000, "background": True}
        begun = await client.responses.create(**ask)
        with pytest.raises(openai.InternalServerError, match="body_memory_bytes"):
            await client.responses.create(**ask)
        transport.placed.set()
        transport.answered.set()
        await until(client, begun.id, "completed")
        await client.responses.create(**ask)


async def test_a_response_that_nobody_computes_has_failed_after_its_time(tmp_path: Path) -> None:
    """Another gateway with the same store does not know whether its gateway lives."""
    file = tmp_path / "responses.db"
    async with (
        paced(response_store_file=file) as (_, client),
        paced(response_store_file=file, request_timeout_s=0.001) as (_, other),
    ):
        begun = await client.responses.create(model="tiny", input="a", background=True)
        failed = await until(other, begun.id, "failed")
        assert failed.error is not None
        assert (await other.responses.cancel(begun.id)).status == "cancelled"


async def numbers(events: Any) -> list[tuple[int, str]]:
    """Numbers and types of the events of a stream, up to its end."""
    return [(event.sequence_number, event.type) async for event in events]


async def test_a_stream_goes_on_from_any_event() -> None:
    """The client may leave and come back, during the answer and after its end."""
    async with answering(numbered()) as gateway:
        client = client_of(gateway)
        events = [
            event async for event in await client.responses.create(model="t", input="a", background=True, stream=True)
        ]
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[3:5] == ["response.output_item.added", "response.content_part.added"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        first, last = events[0].response, events[-1].response  # type: ignore[union-attr]
        assert (first.status, last.status, last.output_text) == ("queued", "completed", "1 ")
        assert (await client.responses.retrieve(first.id)).to_dict() == last.to_dict()
        for after in range(len(events) + 1):
            rest = await client.responses.retrieve(first.id, stream=True, starting_after=after)
            assert [part.to_dict() async for part in rest] == [part.to_dict() for part in events[after + 1 :]]
        assert len(await numbers(await client.responses.retrieve(first.id, stream=True))) == len(events)


class RawStream:
    """A streamed background response over ASGI, whose events a test sees as they come."""

    def __init__(self, app: Starlette) -> None:
        self.text = ""
        self.gone = asyncio.Event()
        self._came = asyncio.Event()
        self._parts = iter([{"type": "http.request", "body": b'{"input": "a", "background": true, "stream": true}'}])
        self.task = asyncio.create_task(app(scope("/v1/responses"), self._receive, self._send))

    async def _receive(self) -> Any:
        if (part := next(self._parts, None)) is not None:
            return part
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.text += message.get("body", b"").decode()
        self._came.set()

    async def until(self, kind: str) -> str:
        """Wait for an event. Returns the id of the response."""
        while f"event: response.{kind}\n" not in self.text:
            self._came.clear()
            await self._came.wait()
        return str(json.loads(self.text.split("data: ")[1].split("\n")[0])["response"]["id"])


async def test_a_client_that_leaves_a_stream_ends_nothing() -> None:
    async with paced() as (transport, client):
        stream = RawStream(transport.app)
        name = await stream.until("queued")
        stream.gone.set()
        await stream.task
        transport.placed.set()
        await until(client, name, "in_progress")
        transport.answered.set()
        await until(client, name, "completed")
        rest = await numbers(await client.responses.retrieve(name, stream=True, starting_after=1))
        assert (rest[0], rest[-1][1]) == ((2, "response.in_progress"), "response.completed")


@pytest.mark.parametrize("placed", [False, True])
async def test_a_stream_that_is_cancelled_ends(placed: bool) -> None:
    async with paced() as (transport, client):
        stream = RawStream(transport.app)
        name, last = await stream.until("queued"), "queued"
        if placed:
            transport.placed.set()
            last = "in_progress"
            await stream.until(last)
        assert (await client.responses.cancel(name)).status == "cancelled"
        await stream.task
        assert (await numbers(await client.responses.retrieve(name, stream=True)))[-1][1] == f"response.{last}"


async def test_a_stream_that_fails_says_so() -> None:
    def script(request: pb.GenerateRequest) -> list[Any]:
        return [*answer([1])[:1], Internal("engine lost")]

    async with answering(FakeConductor(script)) as gateway:
        ask: Any = {"model": "tiny", "input": "a", "background": True, "stream": True}
        events = [event async for event in await client_of(gateway).responses.create(**ask)]
        assert [event.type for event in events][2:] == ["response.in_progress", "response.failed"]
        assert events[-1].sequence_number == 3
        assert "engine lost" in events[-1].response.error.message


async def test_old_events_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_LOG_BYTES", 10_000)
    async with answering(numbered()) as gateway:
        client, ask = client_of(gateway), {"input": "a", "background": True, "stream": True}
        names = [await completed(client, ask) for _ in range(8)]
        with pytest.raises(openai.BadRequestError, match="for some time after their end"):
            await client.responses.retrieve(names[0], stream=True)
        assert await numbers(await client.responses.retrieve(names[-1], stream=True))
        assert (await client.responses.retrieve(names[0])).status == "completed"


async def test_events_of_a_response_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_LOG_BYTES", 100)
    responses, work = BackgroundResponses(4, 60.0), asyncio.Event()
    logs = [EventLog(), EventLog(), EventLog()]
    for name, (tenant, events) in enumerate(zip("aab", logs, strict=True)):
        responses.start(tenant, str(name), until_set(work), ExitStack(), events)
    small, large, other = logs
    reader = large.from_number(0)
    for number in range(20):
        large.add(b"data: %d\n\n" % number)
        assert sum(events.num_bytes for events in logs[:2]) <= 100
        if number == 3:
            assert await anext(reader) == b"".join(b"data: %d\n\n" % number for number in range(4))
    small.add(b"data: a\n\n")
    other.add(b"data: b\n\n")
    assert (len(large), len(small), small.first, other.first) == (20, 1, 0, 0)
    assert large.first > 4
    assert b"events_forgotten" in await anext(reader), "a reader that is too slow is told"
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
    assert await anext(large.from_number(large.first)) == b"".join(
        b"data: %d\n\n" % number for number in range(large.first, 20)
    )
    work.set()
    await responses.close()


async def until_set(event: asyncio.Event) -> None:
    await event.wait()


async def completed(client: openai.AsyncOpenAI, ask: dict[str, Any]) -> str:
    """Id of a streamed response, after its end."""
    events = [event async for event in await client.responses.create(model="tiny", **ask)]
    return str(events[0].response.id)


async def test_the_events_of_a_deleted_response_are_gone() -> None:
    async with answering(numbered()) as gateway:
        client = client_of(gateway)
        events = [
            event async for event in await client.responses.create(model="t", input="a", background=True, stream=True)
        ]
        name = events[0].response.id  # type: ignore[union-attr]
        await client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name, stream=True)


async def test_a_background_response_must_be_stored() -> None:
    async with answering(numbered()) as gateway:
        refused = await gateway.http.post("/v1/responses", json={"input": "a", "background": True, "store": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    async with answering(numbered(), response_store_bytes=0) as gateway:
        refused = await gateway.http.post("/v1/responses", json={"input": "a", "background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
