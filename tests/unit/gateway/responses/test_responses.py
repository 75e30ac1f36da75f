"""`/v1/responses`: OpenAI's newer form, read by its own client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from moonpool.base.errors import Internal, Overloaded
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2
from tests.unit.gateway.fakes import Answers, answering

PATH = "/v1/responses"
USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 11,
}
TEXT = {"type": "output_text", "text": "5 6 ", "annotations": [], "logprobs": []}


def two_tokens(reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_STOP) -> FakeConductor:
    """Answers with "5 6 " after nine prompt tokens of which eight were cached."""
    return FakeConductor(lambda _: answer([5, 6], request_id="r1", reason=reason, prompt_tokens=9, cached_tokens=8))


@pytest.fixture
async def gateway() -> AsyncIterator[Answers]:
    async with answering(two_tokens()) as running:
        yield running


@pytest.fixture
async def client(gateway: Answers) -> openai.AsyncOpenAI:
    """The real client, without a network."""
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http, max_retries=0)


async def test_response(gateway: Answers) -> None:
    body = (await gateway.http.post(PATH, json={"input": "hi", "instructions": "be brief", "temperature": 0})).json()
    message = {"type": "message", "id": "msg_r1_0", "status": "completed", "role": "assistant", "content": [TEXT]}
    assert body["created_at"] > 1_700_000_000
    expected = {"id": "resp_r1", "object": "response", "status": "completed", "model": "tiny", "error": None}
    assert {name: body[name] for name in expected} == expected
    assert body["output"] == [message]
    assert body["usage"] == USAGE
    assert (body["store"], body["temperature"], body["instructions"]) == (True, 0, "be brief")
    assert [(turn.role, turn.content) for turn in gateway.asked.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert gateway.asked.sampling.max_tokens == 100


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with answering(two_tokens(kv_pb2.FINISH_REASON_LENGTH)) as gateway:
        body = (await gateway.http.post(PATH, json={"input": "hi", "max_output_tokens": 2})).json()
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert gateway.asked.sampling.max_tokens == 2
        text = (await gateway.http.post(PATH, json={"input": "hi", "stream": True})).text
        assert "event: response.incomplete\n" in text


async def test_client(client: openai.AsyncOpenAI) -> None:
    """Whole, and by both ways to stream."""
    whole = await client.responses.create(model="tiny", input="hi", store=False, truncation="disabled")
    assert whole.output_text == "5 6 "
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 8
    deltas = []
    async for event in await client.responses.create(model="tiny", input="hi", stream=True):
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
    assert deltas == ["5 ", "6 "]
    async with client.responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "5 6 "
    assert final.usage == whole.usage
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [getattr(event, "sequence_number", None) for event in events] == list(range(10))


async def test_conversation(gateway: Answers) -> None:
    """Items of all kinds; answers that are sent back as they came."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [TEXT]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
    ]
    answered = await gateway.http.post(PATH, json={"input": items, "user": "ann"})
    assert answered.headers["warning"] == '299 moonpool "ignored fields: user"'
    turns = gateway.asked.chat.messages
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in turns] == [
        ("system", "be brief", ""),
        ("user", "a", ""),
        ("assistant", "5 6 ", ""),
        ("tool", "r", "c1"),
    ]
    assert [(call.id, call.name, call.arguments) for call in turns[2].tool_calls] == [("c1", "f", "{}")]


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ({"truncation": "auto", "service_tier": "flex"}, "truncation, service_tier"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.summary"),
        ({"include": ["reasoning.encrypted_content"], "user": "x"}, "user, include.0"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        (
            {
                "input": [
                    {"role": "user", "content": "hi"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                    {"role": "user", "content": "why?"},
                ]
            },
            "input.1",
        ),
    ],
)
async def test_what_a_thinking_models_client_sends_passes_with_a_warning(
    gateway: Answers, body: dict[str, Any], warned: str
) -> None:
    answered = await gateway.http.post(PATH, json={"input": "hi", **body})
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"] == f'299 moonpool "ignored fields: {warned}"'
    contents = [turn.content for turn in gateway.asked.chat.messages]
    assert contents == (["hi"] if "input" not in body else ["hi", "no", "why?"])


async def test_tools_that_codex_offers() -> None:
    """A custom tool is a function of a text, functions have namespaces, and a search of the web is left out."""
    call = '<tool_call>{"name": "%s", "arguments": {"input": "a \\"b\\""}}</tool_call>'
    text = call % "patch" + call % "spawn"

    def script(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer(range(len(text)), request_id="r1")
        for message, char in zip(messages[1:-1], text, strict=True):
            message.delta.text = char
        return messages

    tools: Any = [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "namespace", "name": "agents", "description": "x", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "web_search", "external_web_access": True},
    ]
    async with answering(FakeConductor(script)) as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        raw = await client.responses.with_raw_response.create(model="tiny", input="hi", tools=tools)
        assert raw.headers["warning"] == '299 moonpool "ignored fields: tools.0.format, tools.2"'
        offered = [tool["function"] for tool in json.loads(gateway.asked.chat.tools)]
        assert [(tool["name"], list(tool["parameters"]["properties"])) for tool in offered] == [
            ("patch", ["input"]),
            ("spawn", []),
        ]
        async with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
            kinds = [event.type async for event in stream if "custom" in event.type]
            streamed = await stream.get_final_response()
        whole: Any = raw.parse().to_dict()["output"]
        found: Any = streamed.to_dict()["output"]
        assert [{**item, "parsed_arguments": None} for item in whole] == [
            {**item, "parsed_arguments": None} for item in found
        ]
        custom, function = whole
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", 'a "b"')
        assert (function["type"], function["name"], function["namespace"]) == ("function_call", "spawn", "agents")
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        result: Any = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "r"}
        await client.responses.create(model="tiny", input=[*whole, result])
        turns = gateway.fake.requests[-1].chat.messages
        assert [json.loads(past.arguments) for past in turns[0].tool_calls] == [{"input": 'a "b"'}] * 2
        assert (turns[1].role, turns[1].tool_call_id) == ("tool", custom["call_id"])


async def test_sampling_fields_of_vllm(gateway: Answers) -> None:
    fields = {"top_k": -1, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1}, "repetition_penalty": 1.5}
    structured = {"structured_outputs": {"regex": "a+"}}
    assert (await gateway.http.post(PATH, json={"input": "hi", **fields, **structured})).status_code == 200
    asked = gateway.asked.sampling
    assert (asked.seed, list(asked.stop), dict(asked.logit_bias)) == (7, ["x"], {5: 1.0})
    assert (asked.repetition_penalty, asked.response_format, asked.grammar) == (1.5, "regex", "a+")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output"}]}, "input.0.call_id"),
        ({"input": "x", "include": ["nothing"]}, "include.0"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools.0"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 1.5}, "max_output_tokens"),
    ],
)
async def test_refusals(gateway: Answers, body: dict[str, Any], param: str) -> None:
    refused = await gateway.http.post(PATH, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)
    assert gateway.fake.requests == []


async def test_errors() -> None:
    overloaded = Overloaded("busy", reason="queue_full", retry_after_s=2.0)
    async with answering(FakeConductor(lambda _: [overloaded])) as gateway:
        refused = await gateway.http.post(PATH, json={"input": "hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    async with answering(FakeConductor(lambda _: [*answer()[:2], Internal("lost")])) as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "lost"
