"""`/v1/messages`: Anthropic's form of a chat, read by Anthropic's own client."""

import json
from typing import Any

import anthropic
import httpx2
import pytest

from moonpool.base.errors import Internal, Overloaded, Unavailable
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import TURNS, Answers, answering, tokenizer

PATH = "/v1/messages"
USAGE = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "cache_read_input_tokens": 8,
    "output_tokens": 2,
    "output_tokens_details": {"thinking_tokens": 0},
}


def two_tokens(reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_LENGTH) -> FakeConductor:
    """Answers with "5 6 " after nine prompt tokens of which eight were cached."""
    return FakeConductor(lambda _: answer([5, 6], request_id="r1", reason=reason, prompt_tokens=9, cached_tokens=8))


@pytest.fixture
async def client(gateway: Answers) -> anthropic.AsyncAnthropic:
    """The real client, without a network."""
    return anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http, max_retries=0)


async def post(gateway: Answers, **body: Any) -> httpx2.Response:
    """A message with one turn, unless `messages` says otherwise."""
    return await gateway.http.post(PATH, json={"messages": TURNS, "max_tokens": 5, **body})


async def test_message() -> None:
    async with answering(two_tokens()) as gateway:
        assert (await post(gateway)).json() == {
            "id": "msg_r1",
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "5 6 "}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": USAGE,
        }


async def test_stream() -> None:
    async with answering(two_tokens(kv_pb2.FINISH_REASON_STOP)) as gateway:
        text = (await post(gateway, stream=True)).text
    events = [event.split("\n") for event in text.strip().split("\n\n")]
    contents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [content["type"] for content in contents]
    assert [content["type"] for content in contents] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert contents[0]["message"]["id"] == "msg_r1"
    assert [content["delta"]["text"] for content in contents[2:4]] == ["5 ", "6 "]
    assert contents[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert contents[5]["usage"] == USAGE


async def test_anthropics_client(gateway: Answers, client: anthropic.AsyncAnthropic) -> None:
    """Whole and streamed, with all that is passed on."""
    whole = await client.messages.create(
        model="tiny",
        max_tokens=7,
        system="be brief",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        stop_sequences=["end"],
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3},
    )
    assert whole.content[0].type == "text"
    assert whole.content[0].text == "1 2 3 "
    asked = gateway.asked
    assert [(turn.role, turn.content) for turn in asked.chat.messages] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 3)
    assert list(sampling.stop) == ["end"]
    async with client.messages.stream(
        model="tiny", max_tokens=7, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        assert [text async for text in stream.text_stream] == ["1 ", "2 ", "3 "]
        final = await stream.get_final_message()
    assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("end_turn", 1, 3)


async def test_which_text_has_stopped_it() -> None:
    """The one where the answer's text ends and its tokens go on."""
    tokens = tokenizer().encode("def add(a, b):\n    return a", add_special=False)
    shown = "def add(a, b)"

    def script(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer(tokens, reason=kv_pb2.FINISH_REASON_STOP)
        for message in messages[1:-1]:
            message.delta.text = ""
        messages[1].delta.text = shown
        return messages

    async with answering(FakeConductor(script)) as gateway:
        for stops, found in ((["END", ":\n"], ":\n"), (["return", ":"], ":"), (["nothing"], None)):
            body = (await post(gateway, stop_sequences=stops)).json()
            assert body["stop_sequence"] == found
            assert body["stop_reason"] == ("end_turn" if found is None else "stop_sequence")


async def test_the_last_turn_may_be_the_systems(gateway: Answers) -> None:
    """As Claude Code sends it."""
    turns = [*TURNS, {"role": "system", "content": "be brief"}]
    assert (await post(gateway, messages=turns)).status_code == 200
    assert [turn.role for turn in gateway.asked.chat.messages] == ["user", "system"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{"role": "developer", "content": "x"}, *TURNS]}, "messages.0.role: Input should be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0: has no picture"),
        ({"system": [{"type": "image"}]}, "system.0: must be a text"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: "),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools.0.name: must have"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "must"}}, "tool_choice.type: "),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice: must name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0: must be a text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *TURNS]}, "messages.0.content.0.id"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: is not supported yet"),
        ({"tools": [{"name": "f", "input_schema": {}, "novel": 1}]}, "tools.0.novel: is not known here"),
        ({"temperature": "hot"}, "temperature: "),
    ],
)
async def test_refusals(gateway: Answers, body: dict[str, Any], says: str) -> None:
    refused = await post(gateway, **body)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["error"]["message"].startswith(says)
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"context_management": {"edits": []}, "service_tier": "auto"}, "context_management, service_tier"),
    ],
)
async def test_what_a_thinking_models_client_sends_passes_with_a_warning(
    gateway: Answers, body: dict[str, Any], warned: str
) -> None:
    answered = await post(gateway, **body)
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"] == f'299 moonpool "ignored fields: {warned}"'


async def test_past_thinking_is_for_the_chat_template(gateway: Answers) -> None:
    thought = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"},
    ]
    turns = [*TURNS, {"role": "assistant", "content": thought}, *TURNS]
    answered = await post(gateway, messages=turns)
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"].endswith('fields: messages.1.content.1"')
    assert [turn.reasoning_content for turn in gateway.asked.chat.messages] == ["", "hm", ""]
    assert [turn.content for turn in gateway.asked.chat.messages] == ["hi", "a", "hi"]
    counted = await gateway.http.post(f"{PATH}/count_tokens", json={"messages": turns})
    bare = [*TURNS, {"role": "assistant", "content": "a"}, *TURNS]
    plain = await gateway.http.post(f"{PATH}/count_tokens", json={"messages": bare})
    assert counted.json() == plain.json()
    refused = await post(gateway, messages=[{"role": "user", "content": thought}])
    assert refused.status_code == 400


async def test_unknown_fields_are_told(gateway: Answers) -> None:
    part = {"type": "text", "text": "x", "citations": {"enabled": False}}
    answered = await post(gateway, messages=[{"role": "user", "content": [part]}], metadata={"user_id": "x"})
    assert answered.headers["warning"] == ('299 moonpool "ignored fields: metadata, messages.0.content.0.citations"')


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (Overloaded("busy", reason="queue_full", retry_after_s=2.0), 429, "rate_limit_error"),
        (Unavailable("no engines"), 503, "overloaded_error"),
        (Internal("lost"), 500, "api_error"),
    ],
)
async def test_errors(raised: Exception, status: int, kind: str) -> None:
    async with answering(FakeConductor(lambda _: [raised])) as gateway:
        refused = await post(gateway)
        assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
    async with answering(FakeConductor(lambda _: [*answer()[:2], raised])) as gateway:
        broken = (await post(gateway, stream=True)).text
        assert broken.split("\n\n")[-2].startswith(f'event: error\ndata: {{"type":"error","error":{{"type":"{kind}"')


async def test_emulated_answers_say_so() -> None:
    messages = answer()
    messages[0].placed.placement.emulated = messages[-1].finished.placement.emulated = True
    async with answering(FakeConductor(lambda _: messages)) as gateway:
        assert (await post(gateway)).json()["emulated"] is True


async def test_answers_that_follow_a_schema(gateway: Answers) -> None:
    """`output_config.format`, Anthropic's structured outputs."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"model": "tiny", "max_tokens": 5, "messages": TURNS}
    formatted = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert (await gateway.http.post("/v1/messages", json={**body, **formatted})).status_code == 200
    assert gateway.asked.sampling.response_format == "json_schema"
    assert json.loads(gateway.asked.sampling.grammar) == schema
    for wrong, says in (
        ({"format": {"type": "json_object"}}, "output_config.format.type"),
        ({"format": {"type": "json_schema"}}, "output_config.format.schema"),
        ({"novel": "low"}, "output_config.novel"),
    ):
        refused = await gateway.http.post("/v1/messages", json={**body, "output_config": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(says)
