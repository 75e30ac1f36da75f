"""OpenAI's and Anthropic's own clients over a running stack: all forms give the same answers, whole and streamed."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseFunctionToolCall

from moonpool.cli.check import wait_at_rest
from tests.integration.conftest import BLOCK
from tests.integration.shared.conftest import MODEL, TURNS
from tests.integration.stack import REST_TIMEOUT_S, CheckedStack

TEXT = str(TURNS[0]["content"])
MESSAGES: list[MessageParam] = [{"role": "user", "content": TEXT}]
GREEDY: Any = {"model": MODEL, "temperature": 0}
TIDE = {
    "type": "object",
    "properties": {"tide": {"enum": ["high", "low"]}},
    "required": ["tide"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "tide", "parameters": TIDE}}
FLAT: Any = {"type": "function", "name": "tide", "parameters": TIDE, "strict": True}
BLOCKS: Any = [{"name": "tide", "input_schema": TIDE}]


@pytest.fixture
def claude(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{address}", api_key="any", max_retries=0) as client:
        yield client


def said(client: openai.OpenAI, tokens: int) -> ChatCompletion:
    """The chat's whole greedy answer."""
    whole: ChatCompletion = client.chat.completions.create(**GREEDY, messages=TURNS, max_tokens=tokens)
    return whole


def text_of(message: Any) -> str:
    """Of a message in Anthropic's form."""
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    """The same answer in Anthropic's form, whole and streamed."""
    chat = said(client, 8)
    ask: Any = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert text_of(message) == chat.choices[0].message.content
        assert chat.usage is not None
        read = message.usage.cache_read_input_tokens or 0
        assert read >= BLOCK
        assert message.usage.input_tokens + read == chat.usage.prompt_tokens


def test_responses(client: openai.OpenAI) -> None:
    """The chat's answer in OpenAI's newer form, whole and streamed."""
    chat = said(client, 8)
    ask: dict[str, Any] = {**GREEDY, "input": TEXT, "max_output_tokens": 8}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"  # cut by its length
    assert whole.output_text == last.response.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens >= BLOCK


async def test_by_asyncio(address: str, aio: openai.AsyncOpenAI, client: openai.OpenAI) -> None:
    """All forms at once, streamed and whole, have the blocking client's answer."""
    expected = said(client, 8).choices[0].message.content
    ask: Any = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES, "extra_body": {"temperature": 0}}

    async def chat() -> str:
        stream = await aio.chat.completions.create(**GREEDY, messages=TURNS, max_tokens=8, stream=True)
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

    async def response() -> str:
        text: str = (await aio.responses.create(**GREEDY, input=TEXT, max_output_tokens=8)).output_text
        return text

    async def message(other: anthropic.AsyncAnthropic) -> str:
        return text_of(await other.messages.create(**ask))

    async def streamed(other: anthropic.AsyncAnthropic) -> str:
        async with other.messages.stream(**ask) as stream:
            return await stream.get_final_text()

    async with anthropic.AsyncAnthropic(base_url=f"http://{address}", api_key="any", max_retries=0) as other:
        assert set(await asyncio.gather(chat(), response(), message(other), streamed(other))) == {expected}


def test_several_answers(client: openai.OpenAI) -> None:
    """Each is that of its own request with the next seed, whole and streamed."""

    def ask(seed: int, n: int) -> list[str]:
        whole = client.completions.create(model=MODEL, prompt="the sea", max_tokens=6, seed=seed, n=n)
        return [choice.text for choice in whole.choices]

    expected = [text for index in range(4) for text in ask(5 + index, 1)]
    assert ask(5, 4) == expected
    texts = [""] * 4
    for chunk in client.completions.create(model=MODEL, prompt="the sea", max_tokens=6, seed=5, n=4, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_a_call_goes_round(client: openai.OpenAI) -> None:
    """A model that knows of no functions calls one, as its answer is held to the schema; it is told what came of it."""
    turns: Any = [*TURNS, *TURNS]
    ask: Any = {**GREEDY, "tools": [TOOL], "max_tokens": 200, "tool_choice": "required"}
    whole = client.chat.completions.create(**ask, messages=turns).choices[0].message
    with client.chat.completions.stream(**ask, messages=turns) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (call,), (again,) = whole.tool_calls or [], streamed.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["tide"] in ("high", "low")
    assert json.loads(again.function.arguments) == json.loads(call.function.arguments)
    turns += [whole.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "at noon"}]
    last = client.chat.completions.create(**{**ask, "max_tokens": 4, "tool_choice": "auto"}, messages=turns)
    assert last.choices[0].message.content
    assert last.usage is not None
    assert last.usage.completion_tokens <= 4


def test_a_call_goes_round_in_the_other_forms(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": MODEL, "tools": BLOCKS, "extra_body": {"temperature": 0}}
    first = claude.messages.create(**ask, max_tokens=200, messages=MESSAGES, tool_choice={"type": "any"})
    (used,) = first.content
    assert used.type == "tool_use"
    assert used.input in ({"tide": "high"}, {"tide": "low"})
    told: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "at noon"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, told]
    assert claude.messages.create(**ask, max_tokens=4, messages=turns).usage.output_tokens <= 4
    asked: Any = {**GREEDY, "tools": [FLAT]}
    (call,) = client.responses.create(**asked, input=TEXT, tool_choice="required", max_output_tokens=200).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == used.input
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "at noon"}
    items: Any = [{"role": "user", "content": TEXT}, call.to_dict(), output]
    last = client.responses.create(**asked, input=items, max_output_tokens=4)
    assert last.usage is not None
    assert last.usage.output_tokens <= 4


def test_overload_in_anthropics_form(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.RateLimitError) as caught:
        claude.messages.create(model=MODEL, max_tokens=4, messages=MESSAGES, extra_body={"slo": {"ttft_s": 1e-9}})
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_leaving_in_the_middle_of_a_stream(
    stack: CheckedStack, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """Nothing is held anywhere afterwards."""
    endless: Any = {**GREEDY, "max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**endless, messages=TURNS) as stream:
        next(iter(stream))
    wait_at_rest(stack.address, REST_TIMEOUT_S)
    with claude.messages.stream(model=MODEL, max_tokens=1000, messages=MESSAGES) as messages:
        next(iter(messages))
    wait_at_rest(stack.address, REST_TIMEOUT_S)
