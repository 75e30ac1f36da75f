"""A conversation of the contract through the chat template: what the SDK was given comes to the template."""

import json
from typing import Any

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import InvalidRequest
from moonpool.client import GenerateArguments, Message
from moonpool.client.translate import generate_request
from moonpool.conductor.chat_prompt import chat_chars, render_chat
from moonpool.v1 import conductor_pb2

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": 1}}}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"é": 1}'}}],
}
TURNS: list[Message] = [
    {"role": "user", "content": "x"},
    CALLED,
    {"role": "tool", "content": "r", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Its template shows all that it is given."""
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    return Tokenizer(backend, {"default": "{{ [tools, messages, add_generation_prompt] | tojson }}"})


def request(**given: Any) -> conductor_pb2.GenerateRequest:
    arguments: GenerateArguments = {"messages": TURNS, **given}  # type: ignore[typeddict-item]
    return generate_request(arguments)


def test_template_sees_all(tokenizer: Tokenizer) -> None:
    """Arguments of calls as objects; what a turn does not have is not there."""
    sent = request(tools=[TOOL]).chat
    tools, turns, answer = json.loads(render_chat(sent, tokenizer).text)
    assert tools == [TOOL]
    assert turns[0] == {"role": "user", "content": "x"}
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"é": 1}}
    assert turns[2] == {**TURNS[2], "name": "f"}
    assert answer is True
    assert json.loads(render_chat(request().chat, tokenizer).text)[0] is None
    assert chat_chars(sent) == len(sent.tools) + len('useruserxassistantf{"é": 1}toolr') - len("user")


@pytest.mark.parametrize("tools", ["{", "{}", "[1]", '"x"', "[NaN]", "[" * 10_000])
def test_tools_that_are_none(tools: str, tokenizer: Tokenizer) -> None:
    sent = request().chat
    sent.tools = tools
    with pytest.raises(InvalidRequest) as caught:
        render_chat(sent, tokenizer)
    assert caught.value.field == "tools"


def test_fields_that_are_not_known_here(tokenizer: Tokenizer) -> None:
    """A newer client's turn is not answered without what it asks for."""
    sent = conductor_pb2.ChatPrompt()
    sent.messages.append(conductor_pb2.ChatMessage.FromString(b"\x0a\x01u\x9a\x06\x01x"))
    with pytest.raises(InvalidRequest, match="field number 99"):
        render_chat(sent, tokenizer)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"messages": None, "prompt": "x", "tools": [TOOL]}, "tools"),
        ({"tools": [{"x": float("nan")}]}, "tools"),
        ({"tools": [{"x": object()}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "name": "f"}]}, "messages"),
        ({"messages": [{**CALLED, "tool_calls": [{"id": "1"}]}]}, "messages"),
    ],
)
def test_what_the_sdk_refuses(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**given)
    assert caught.value.field == field
