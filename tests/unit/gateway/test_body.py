"""What a body may cost: its parts are counted before it is read, and of many faults one is told."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.json_parts import UNCHECKED_BYTES, JsonPartCounts, check_json_parts, count_json_parts
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import AsyncClient
from moonpool.client.testing import answer
from moonpool.gateway.endpoints.anthropic_messages import MessagesBody
from moonpool.gateway.endpoints.context_caching import CacheCreateBody
from moonpool.gateway.endpoints.openai_chat import ChatBody
from moonpool.gateway.endpoints.openai_completions import CompletionBody
from moonpool.gateway.endpoints.tokenization import DetokenizeBody
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.service import body_memory
from moonpool.gateway.serving.body import Body, validate_body
from moonpool.gateway.serving.body_limits import BODY_COPIES, MAX_PACED, BodyMemory, BodyPace
from moonpool.gateway.serving.body_reader import CLEANUP, BodyReader, ParsedBody
from tests.examples import examples
from tests.unit.gateway.test_client_disconnect import Holding

from .fakes import make_gateway, tokenizer
from .fakes import settings as gateway_settings

MANY = 1000
CHARACTERS = 'ab"\\{}[],:\n\x00é'
RESULT, PLACE = {"type": "tool_result", "content": [{"type": "text"}] + [{}] * MANY}, "messages.0.content.0.content"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(CHARACTERS), inner, max_size=4),
    max_leaves=30,
)


def parts_of(value: Any) -> JsonPartCounts:
    if isinstance(value, str):
        return JsonPartCounts(0, 0, 0, 1, 0)
    if not isinstance(value, dict | list):
        return JsonPartCounts(0, 0, 0, 0, 0)
    members = len(value) if isinstance(value, dict) else 0
    own = JsonPartCounts(
        int(isinstance(value, dict)), int(isinstance(value, list)), members, members, max(0, len(value) - 1)
    )
    inner = [parts_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    return JsonPartCounts(*map(sum, zip(own, *inner, strict=True)))


@settings(max_examples=examples(100))
@given(VALUES, st.booleans())
def test_parts_are_counted_as_they_are_read(value: Any, ascii_only: bool) -> None:
    assert count_json_parts(json.dumps(value, ensure_ascii=ascii_only).encode()) == parts_of(value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 1_000_000, "8192 arrays"),
        (b"[" + b"[]," * 1_100_000 + b"[]]", "8192 arrays"),
        (b'{"a":' * 60_000, "8192 objects"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(40_000)) + b"}", "32768 members"),
        (b"[" + b'"",' * 70_000 + b'""]', "65536 strings"),
        (b'"' * (8 << 20), "65536 strings"),
        (b"[" + b"1," * 1_100_000 + b"1]", "131072 items"),
    ],
    ids=range(7),
)
def test_too_many_parts_are_refused_before_anything_is_read(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {says}"):
        check_json_parts(raw)


def test_bodies_leave_a_small_container_half_of_its_memory() -> None:
    mib = 1 << 20
    found = [body_memory(512 * mib, free) for free in (None, 2048 * mib, 1024 * mib, 256 * mib, 0)]
    assert found == [512 * mib, 512 * mib, 512 * mib, 128 * mib, mib]


def test_tenants_share_the_memory_of_bodies() -> None:
    """A tenant gets as much as is still free; the rest is for who comes later; all of it comes back."""
    memory = BodyMemory(800)
    with memory.hold("ann") as ann, memory.hold("ann") as again, memory.hold("bob") as bob:
        ann(100)
        with pytest.raises(Unavailable, match="body_memory_bytes"):
            again(1)
        bob(50)
        assert memory.held_bytes == 600
        with pytest.raises(Unavailable):
            bob(1)
    assert memory.held_bytes == 0


def test_each_tenants_bodies_are_read_at_a_pace() -> None:
    """Some bytes may come at once; what comes for long waits; nobody waits for another tenant."""
    pace = BodyPace(100.0, ahead_bytes=200)
    assert pace.wait_s("ann", 200, now=5.0) == 0.0
    assert pace.wait_s("ann", 50, now=5.0) == pytest.approx(0.5)
    assert pace.wait_s("ann", 50, now=5.5) == pytest.approx(0.5)
    assert pace.wait_s("bob", 200, now=5.5) == 0.0
    assert pace.wait_s("ann", 200, now=8.0) == 0.0


def test_tenants_whose_bytes_are_due_are_forgotten() -> None:
    pace = BodyPace(100.0, ahead_bytes=0)
    for number in range(3 * MAX_PACED):
        assert pace.wait_s(f"tenant {number}", 100, now=number / MAX_PACED) == pytest.approx(1.0)
    assert pace.num_tenants <= 2 * MAX_PACED
    assert pace.wait_s(f"tenant {3 * MAX_PACED - 1}", 100, now=3.0) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("large", [True, False])
async def test_no_more_of_a_large_body_is_read_before_its_time(*, large: bool) -> None:
    """A small body of the same tenant does not wait."""
    loop, read_at = asyncio.get_running_loop(), list[float]()
    pieces = iter([b'{"tokens": ' + b" " * (UNCHECKED_BYTES if large else 0), b"[1, 2]", b"}"])

    async def receive() -> dict[str, Any]:
        read_at.append(loop.time())
        if (piece := next(pieces, None)) is None:
            piece = await asyncio.get_running_loop().create_future()  # the client stays
        return {"type": "http.request", "body": piece, "more_body": piece != b"}"}

    with ThreadPoolExecutor(1) as threads, ExitStack() as cleanup:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], CLEANUP: cleanup}
        pace = BodyPace(1e6, ahead_bytes=0)
        pace.wait_s("ann", 1 << 16, loop.time())
        reader = BodyReader(1 << 17, 30.0, BodyMemory(1 << 20), TenantTurns(threads), pace)
        parsed = await reader.read(Request(scope, receive), DetokenizeBody, "ann")
    assert parsed.body.tokens == [1, 2]
    assert (read_at[1] - read_at[0] >= 0.06) == large


@pytest.mark.parametrize("large", [True, False])
async def test_all_that_costs_as_much_as_a_large_body_is_done_on_the_thread(*, large: bool) -> None:
    where = list[threading.Thread]()

    class Noting(DetokenizeBody):
        def ignored_fields(self, place: str = "") -> Iterator[str]:
            where.append(threading.current_thread())
            return super().ignored_fields(place)

    sent = asyncio.Queue[dict[str, Any]]()  # nothing more comes: the client stays
    padding = b" " * (UNCHECKED_BYTES if large else 0)
    sent.put_nowait({"type": "http.request", "body": b'{"tokens": [1], "odd": 1}' + padding, "more_body": False})

    with ThreadPoolExecutor(1) as threads, ExitStack() as cleanup:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], CLEANUP: cleanup}
        reader = BodyReader(1 << 17, 30.0, BodyMemory(1 << 20), TenantTurns(threads), BodyPace())
        parsed = await reader.read(Request(scope, sent.get), Noting, "ann")
        where.append(threads.submit(threading.current_thread).result())
        where.append(await parsed.work(threading.current_thread))
    assert parsed.warning == {"warning": '299 moonpool "ignored fields: odd"'}
    ignored, thread, work = where
    assert (ignored is thread, work is thread) == (large, large)


async def test_a_body_for_which_there_is_no_memory_is_refused_before_it_is_read() -> None:
    """By the length that the client has told; the bytes of a body without a length count as they come."""
    come = list[str]()

    async def ask(reader: BodyReader, told: dict[str, str], cleanup: ExitStack) -> ParsedBody[DetokenizeBody]:
        async def receive() -> dict[str, Any]:
            come.append("piece")
            return {"type": "http.request", "body": b'{"tokens": [1]}', "more_body": False}

        headers = {"content-type": "application/json", **told}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request({"type": "http", "headers": raw, CLEANUP: cleanup}, receive)
        return await reader.read(request, DetokenizeBody, "ann")

    with ThreadPoolExecutor(1) as threads:
        memory = BodyMemory(8000 * BODY_COPIES)
        reader = BodyReader(1 << 17, 30.0, memory, TenantTurns(threads), BodyPace())
        with ExitStack() as cleanup:
            assert (await ask(reader, {"content-length": "4000"}, cleanup)).body.tokens == [1]
            with pytest.raises(Unavailable, match="body_memory_bytes"):
                await ask(reader, {"content-length": "15"}, cleanup)
            assert come == ["piece"]
            with pytest.raises(Unavailable, match="body_memory_bytes"):
                await ask(reader, {}, cleanup)
            assert memory.held_bytes == 4000 * BODY_COPIES
        assert memory.held_bytes == 0
        with ExitStack() as cleanup:
            await ask(reader, {}, cleanup)
            assert memory.held_bytes == 15 * BODY_COPIES


async def test_the_memory_of_a_body_is_held_until_its_answer_has_ended() -> None:
    held = json.dumps({"messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    holding = Holding(answer()[:2])
    with ThreadPoolExecutor(1) as threads:
        config = gateway_settings(body_memory_bytes=4 << 20)
        app = make_gateway(AsyncClient(transport=holding), config, threads, tokenizer())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as http:
            ask = partial(http.post, "/v1/chat/completions", content=held, headers={"content-type": "application/json"})
            first = asyncio.create_task(ask())
            await holding.call.held.wait()
            refused = await ask()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


def test_small_bodies_are_parsed_uncounted() -> None:
    check_json_parts(b"[" * UNCHECKED_BYTES)
    with pytest.raises(InvalidRequest, match="at most 8192 arrays"):
        check_json_parts(b"[" * (UNCHECKED_BYTES + 1))


def test_what_texts_contain_does_not_count() -> None:
    check_json_parts(json.dumps({"prompt": 'x = {"a": [1, 2], "b": "\\"}, ' * 100_000}).encode())


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
        (CompletionBody, {"prompt_token_ids": [0.5] * MANY}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [None] * MANY}),
        (CompletionBody, {"prompt": "a", "bad_words": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(number): None for number in range(2 * MANY)}}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [], "tools": [{}] * MANY}),
        (CacheCreateBody, {"metadata": {str(number): None for number in range(2 * MANY)}}),
    ],
    ids=range(8),
)
def test_of_many_faults_few_are_found(cls: type[Body], body: dict[str, Any]) -> None:
    """Each costs memory, and a million of them seconds."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() <= 5


@pytest.mark.parametrize(
    ("cls", "body", "field"),
    [
        (CompletionBody, {"prompt": ["x"] * MANY + [1]}, "prompt"),
        (CompletionBody, {"prompt": [1] * MANY + ["x"]}, "prompt"),
        (CompletionBody, {"prompt": [[1] * MANY] * MANY + [["x"]]}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content.0.type"),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [RESULT]}]}, f"{PLACE}.1.type"),
        (ResponsesBody, {"input": [{"role": "user", "content": [{}] * MANY}]}, "input.0.content.0.type"),
    ],
    ids=range(6),
)
def test_where_a_field_has_several_forms_each_tells_its_first_fault(
    cls: type[Body], body: dict[str, Any], field: str
) -> None:
    """And the clearest of them is told, however deep it is."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() <= 5
    with pytest.raises(InvalidRequest) as told:
        validate_body(cls, body)
    assert told.value.field == field
