"""Responses and conversations that are stored, as OpenAI's client uses them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moonpool.base.errors import Internal
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.fakes import Answers, answering


def numbered() -> FakeConductor:
    """The n-th answer is "n "."""
    fake = FakeConductor(lambda _: answer([len(fake.requests)], request_id=f"r{len(fake.requests)}"))
    return fake


def client_of(gateway: Answers, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, http_client=gateway.http, max_retries=0)


@pytest.fixture
async def gateway() -> AsyncIterator[Answers]:
    async with answering(numbered()) as running:
        yield running


def last_turns(gateway: Answers) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in gateway.fake.requests[-1].chat.messages]


async def test_a_response_continues_another(gateway: Answers) -> None:
    """Whole and streamed; instructions hold for their own turn only."""
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a", instructions="be brief")
    async with client.responses.stream(model="tiny", input="b", previous_response_id=first.id) as stream:
        second = await stream.get_final_response()
    assert (second.previous_response_id, second.to_dict()["store"]) == (first.id, True)
    await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "c"}], previous_response_id=second.id
    )
    turns = [("user", "a"), ("assistant", "1 "), ("user", "b"), ("assistant", "2 "), ("user", "c")]
    assert last_turns(gateway) == turns
    branch = await client.responses.create(model="tiny", input="d", previous_response_id=first.id)
    assert last_turns(gateway) == [*turns[:2], ("user", "d")]
    assert branch.output_text == "4 "


async def asked(gateway: Answers, kind: type[Any], count: int) -> list[Any]:
    """The requests of a kind other than Generate, as soon as there are `count`."""
    while True:
        await asyncio.sleep(0)
        found = [request for request in gateway.fake.asked if isinstance(request, kind)]
        if len(found) >= count:
            return found


async def test_a_conversation_that_goes_on_is_pinned(gateway: Answers) -> None:
    """From the second turn on, with its answer; the pin of the turn before ends."""
    made = pb.CreateContextResponse(context=pb.Context(id="pin-1"))
    gateway.fake.answers |= {"CreateContextRequest": made, "UpdateContextRequest": pb.UpdateContextResponse()}
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a")
    second = await client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    (pin,) = await asked(gateway, pb.CreateContextRequest, 1)
    assert (pin.pin_only, pin.ttl_s) == (True, 600.0)
    turns = [("user", "a"), ("assistant", "1 "), ("user", "b"), ("assistant", "2 ")]
    assert [(turn.role, turn.content) for turn in pin.chat.messages] == turns
    await client.responses.create(model="tiny", input="c", previous_response_id=second.id)
    (released,) = await asked(gateway, pb.UpdateContextRequest, 1)
    assert (released.id, released.ttl_s) == ("pin-1", 1.0)
    await client.responses.create(model="tiny", input="d", previous_response_id=second.id, store=False)
    conversation = await client.conversations.create()
    await client.responses.create(model="tiny", input="e", conversation=conversation.id, store=False)
    *others, last = await asked(gateway, pb.CreateContextRequest, 3)
    assert len(others) == 2
    assert last.chat.messages[0].content == "e"


async def test_a_pin_has_the_salt_of_its_requests(gateway: Answers) -> None:
    client, salted = client_of(gateway), {"cache_salt": "x"}
    first = await client.responses.create(model="tiny", input="a", extra_body=salted)
    await client.responses.create(model="tiny", input="b", previous_response_id=first.id, extra_body=salted)
    (pin,) = await asked(gateway, pb.CreateContextRequest, 1)
    assert pin.cache_salt == "x"


async def test_what_is_deleted_is_pinned_no_longer(gateway: Answers) -> None:
    """Also if the pin is being made while the response is deleted; a turn before has no pin of its own."""
    made = pb.CreateContextResponse(context=pb.Context(id="pin-1"))
    gateway.fake.answers |= {"CreateContextRequest": made, "UpdateContextRequest": pb.UpdateContextResponse()}
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a")
    second = await client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    await client.responses.delete(first.id)
    await client.responses.delete(second.id)
    (released,) = await asked(gateway, pb.UpdateContextRequest, 1)
    assert (released.id, released.ttl_s) == ("pin-1", 1.0)
    for number, end in enumerate(("item", "conversation"), 2):
        conversation = await client.conversations.create(items=[{"role": "user", "content": "a"}])
        await client.responses.create(model="tiny", input="b", conversation=conversation.id)
        await asked(gateway, pb.CreateContextRequest, number)
        (item, *_) = (await client.conversations.items.list(conversation.id, order="asc")).data
        if end == "item":
            await client.conversations.items.delete(str(item.to_dict()["id"]), conversation_id=conversation.id)
        else:
            await client.conversations.delete(conversation.id)
        assert len(await asked(gateway, pb.UpdateContextRequest, number)) == number


async def test_what_cannot_be_pinned_is_answered_all_the_same(gateway: Answers) -> None:
    """The conductor refuses contexts, for example because there is no kvstore."""
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a")
    second = await client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    await asked(gateway, pb.CreateContextRequest, 1)
    assert second.output_text == "2 "


async def test_a_response_is_read_and_deleted(gateway: Answers) -> None:
    client = client_of(gateway)
    items: Any = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    first = await client.responses.create(model="tiny", input=items, metadata={"k": "v"})
    again = await client.responses.retrieve(first.id)
    assert again.to_dict() == first.to_dict()
    listed = [item.to_dict() async for item in client.responses.input_items.list(first.id, limit=2, order="asc")]
    texts = [content["text"] for item in listed for content in item["content"]]  # type: ignore[attr-defined]
    assert texts == ["a", "b", "c"]
    page = await client.responses.input_items.list(first.id, limit=1)
    assert (page.data[0].to_dict(), page.has_more) == (listed[-1], True)
    await client.responses.delete(first.id)
    for request in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await request
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert "response_ttl_s" in caught.value.message


async def test_what_is_not_to_be_stored_is_not(gateway: Answers) -> None:
    client = client_of(gateway)
    response = await client.responses.create(model="tiny", input="a", store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    async with answering(numbered(), response_store_bytes=0) as other:
        client = client_of(other)
        response = await client.responses.create(model="tiny", input="a", store=True)
        assert response.to_dict()["store"] is False
        for refused in (client.responses.retrieve(response.id), client.conversations.create()):
            with pytest.raises(openai.NotFoundError, match="response_store_bytes is 0"):
                await refused


async def test_a_conversation(gateway: Answers) -> None:
    client = client_of(gateway)
    begun: Any = [{"type": "message", "role": "user", "content": "a"}]
    conversation = await client.conversations.create(items=begun, metadata={"k": "v"})
    for name in ("b", "c"):
        response = await client.responses.create(model="tiny", input=name, conversation=conversation.id, store=False)
        assert response.conversation is not None
        assert response.conversation.id == conversation.id
    turns = [("user", "a"), ("user", "b"), ("assistant", "1 "), ("user", "c")]
    assert last_turns(gateway) == turns
    added = await client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "d"}])
    listed = [item.to_dict() async for item in client.conversations.items.list(conversation.id, order="asc", limit=4)]
    assert len(listed) == 6
    last = added.data[0].to_dict()
    assert listed[-1] == last
    found = await client.conversations.items.retrieve(str(last["id"]), conversation_id=conversation.id)
    assert found.to_dict() == last
    await client.conversations.items.delete(str(last["id"]), conversation_id=conversation.id)
    changed = await client.conversations.update(conversation.id, metadata={"k": "w"})
    assert changed.to_dict() == (await client.conversations.retrieve(conversation.id)).to_dict()
    assert (changed.metadata, changed.created_at) == ({"k": "w"}, conversation.created_at)
    ask: dict[str, Any] = {"model": "tiny", "input": "e", "conversation": {"id": conversation.id}}
    await client.responses.create(**ask)
    assert last_turns(gateway) == [*turns, ("assistant", "2 "), ("user", "e")]
    assert (await client.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(**ask)
    assert caught.value.param == "conversation"


async def test_an_item_is_referred_to(gateway: Answers) -> None:
    """As the AI SDK does: earlier answers are named, not sent again."""
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a")
    items: Any = [
        {"role": "user", "content": "a"},
        {"type": "item_reference", "id": first.output[0].to_dict()["id"]},
        {"role": "user", "content": "b"},
    ]
    second = await client.responses.create(model="tiny", input=items)
    assert last_turns(gateway) == [("user", "a"), ("assistant", "1 "), ("user", "b")]
    stored = await client.responses.input_items.list(second.id, order="asc")
    assert [item.to_dict()["type"] for item in stored.data] == ["message"] * 3


async def test_calls_and_thinking_go_on(gateway: Answers) -> None:
    """A past call without its result waits for the result in the next request."""
    client = client_of(gateway)
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items: Any = [{"role": "user", "content": "a"}, thought, call]
    first = await client.responses.create(model="tiny", input=items)
    result: Any = [{"type": "function_call_output", "call_id": "c1", "output": "r"}]
    await client.responses.create(model="tiny", input=result, previous_response_id=first.id)
    turns = gateway.fake.requests[-1].chat.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "assistant", "tool"]
    assert (turns[1].reasoning_content, turns[1].tool_calls[0].name) == ("hm", "f")


async def test_tokens_of_the_input_are_counted(gateway: Answers) -> None:
    client = client_of(gateway)
    first = await client.responses.create(model="tiny", input="a")
    alone = await client.responses.input_tokens.count(model="tiny", input="b")
    after = await client.responses.input_tokens.count(model="tiny", input="b", previous_response_id=first.id)
    assert 0 < alone.input_tokens < after.input_tokens
    assert len(gateway.fake.requests) == 1


async def test_a_restart_forgets_unless_there_is_a_file(tmp_path: Path) -> None:
    for file in (None, tmp_path / "responses.db"):
        fake = numbered()
        async with answering(fake, response_store_file=file) as gateway:
            first = await client_of(gateway).responses.create(model="tiny", input="a")
        async with answering(fake, response_store_file=file) as gateway:
            client = client_of(gateway)
            if file is None:
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(first.id)
                continue
            await client.responses.create(model="tiny", input="b", previous_response_id=first.id)
            assert last_turns(gateway) == [("user", "a"), ("assistant", "1 "), ("user", "b")]


async def test_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    hashes = [(hashlib.sha256(key.encode()).hexdigest(), name) for key, name in (("ka", "ann"), ("kb", "bob"))]
    file.write_text("".join(f"sha256:{digest} {name}\n" for digest, name in hashes))
    async with answering(numbered(), api_keys=file) as gateway:
        ann, bob = client_of(gateway, "ka"), client_of(gateway, "kb")
        first = await ann.responses.create(model="tiny", input="a")
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            await bob.responses.create(model="tiny", input="b", previous_response_id=first.id)
        assert (await ann.responses.retrieve(first.id)).id == first.id
        with pytest.raises(openai.AuthenticationError):
            await client_of(gateway, "none").responses.retrieve(first.id)


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/v1/responses/conv_1", 404, None),
        ("GET", "/v1/conversations/resp_1", 404, None),
        ("GET", "/v1/responses/resp_r1?stream=true", 400, "stream"),
        ("GET", "/v1/responses/resp_r1?stream=x", 400, "stream"),
        ("GET", "/v1/responses/resp_r1?starting_after=1", 400, "starting_after"),
        ("GET", "/v1/responses/resp_r1?stream=true&starting_after=x", 400, "starting_after"),
        ("GET", "/v1/responses/resp_r1/input_items?limit=0", 400, "limit"),
        ("GET", "/v1/responses/resp_r1/input_items?order=up", 400, "order"),
        ("GET", "/v1/responses/resp_r1/input_items?after=x", 400, "after"),
        ("GET", "/v1/conversations/conv_none/items", 404, None),
    ],
)
async def test_refusals(gateway: Answers, method: str, path: str, status: int, param: str | None) -> None:
    await gateway.http.post("/v1/responses", json={"input": "a"})
    refused = await gateway.http.request(method, path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"role": "user"}]}, "items.0.content"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items.0.type"),
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"novel": 1}, "novel"),
    ],
)
async def test_conversations_that_are_refused(gateway: Answers, body: dict[str, Any], param: str) -> None:
    refused = await gateway.http.post("/v1/conversations", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_an_answer_that_breaks_is_not_stored() -> None:
    def broken(_: pb.GenerateRequest) -> list[pb.GenerateResponse | Exception]:
        return [*answer([1], request_id="r1")[:2], Internal("lost")]

    async with answering(FakeConductor(broken)) as gateway:
        await gateway.http.post("/v1/responses", json={"input": "a", "stream": True})
        assert (await gateway.http.get("/v1/responses/resp_r1")).status_code == 404


async def test_stored_items_make_no_larger_request_than_a_body() -> None:
    """By references to one item many times, by a chain, and by a conversation that grew item by item."""
    async with answering(numbered(), max_body_bytes=4096) as gateway:
        client, text = client_of(gateway), "x" * 1500
        conversation = await client.conversations.create(items=[{"role": "user", "content": text}])
        (item,) = (await client.conversations.items.list(conversation.id)).data
        reference: Any = {"type": "item_reference", "id": item.to_dict()["id"]}
        await client.responses.create(model="tiny", input=[reference] * 2)
        for _ in range(2):
            await client.conversations.items.create(conversation.id, items=[{"role": "user", "content": text}])
        previous: str | None = None
        for _ in range(3):
            found = await client.responses.create(model="tiny", input=text, previous_response_id=previous)
            previous = found.id
        asked: list[tuple[dict[str, Any], str]] = [
            ({"input": [reference] * 3}, "input"),
            ({"input": "a", "previous_response_id": previous}, "previous_response_id"),
            ({"input": "a", "conversation": conversation.id}, "conversation"),
        ]
        before = len(gateway.fake.requests)
        for body, param in asked:
            refused = await gateway.http.post("/v1/responses", json={"model": "tiny", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert "4096" in refused.json()["error"]["message"]
        assert len(gateway.fake.requests) == before
        page = await client.conversations.items.list(conversation.id, limit=2)
        assert len(page.data) == 2
        assert page.has_more
