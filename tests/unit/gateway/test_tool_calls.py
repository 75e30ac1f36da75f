"""Tools: shown to the model, called in its answer, and their results sent back, by the real clients."""

import itertools
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import tokenizers
from anthropic.types import MessageParam, ToolParam
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall, ResponseInputItemParam

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.grammar import Grammar, check_grammar
from moonpool.base.sampling_params import SamplingParams
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.tool_set import MAX_FORCED_CALLS
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, TURNS, Answers, answering
from .test_tool_call_parser import MALFORMED, NAMES, answers

SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
BLOCKS: list[ToolParam] = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
FLAT: FunctionToolParam = {
    "type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": None,
}  # fmt: skip
ASK = "How is it in Paris?"
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for turn in messages %}{{ turn.role }} {{ turn.content }}
{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""
PARIS = '{"city": "Paris"}'
CALLING = f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
SUNNY = "It is sunny."


def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Calls the function when it is offered, until its result is there; three characters a token."""
    calls = request.chat.tools and request.chat.messages[-1].role == "user"
    text = CALLING if calls else SUNNY
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    messages = answer(range(len(pieces)), request_id="r1")
    for message, piece in zip(messages[1:-1], pieces, strict=True):
        message.delta.text = piece
    return messages


@pytest.fixture
async def gateway() -> AsyncIterator[Answers]:
    """A gateway whose model calls functions as Qwen's do."""
    async with answering(FakeConductor(script), tool_call_parser="hermes") as running:
        yield running


@pytest.fixture
async def client(gateway: Answers) -> openai.AsyncOpenAI:
    """The real client, without a network."""
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http, max_retries=0)


def check_asked(gateway: Answers) -> None:
    """What both requests of a round trip have asked of the conductor."""
    first, second = gateway.fake.requests
    assert json.loads(first.chat.tools) == [TOOL]
    assert not first.sampling.skip_special_tokens
    assert first.sampling.HasField("skip_special_tokens")
    turns = second.chat.messages
    assert [(turn.role, turn.content) for turn in turns] == [("user", ASK), ("assistant", "I look."), ("tool", "sun")]
    (call,) = turns[1].tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert call.id == turns[2].tool_call_id != ""


async def test_chat(gateway: Answers, client: openai.AsyncOpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK}]
    whole = await client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look."
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", PARIS)
    turns.append(message.to_dict())  # type: ignore[arg-type]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})
    again = await client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == (SUNNY, "stop")
    check_asked(gateway)


async def test_chat_stream(gateway: Answers, client: openai.AsyncOpenAI) -> None:
    """The name comes first, then the arguments as they are written; the client puts them together."""
    body = {"messages": [{"role": "user", "content": ASK}], "tools": [TOOL], "stream": True}
    lines = (await gateway.http.post(CHAT, json=body)).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    first, *parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (first["index"], first["function"]) == (0, {"name": "weather", "arguments": ""})
    assert {tuple(part) for part in parts} == {("index", "function")}
    assert len(parts) > 3
    assert "".join(part["function"]["arguments"] for part in parts) == PARIS
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": ASK}], tools=[TOOL]
    ) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert (call.function.name, call.function.arguments, call.id[:5]) == ("weather", PARIS, "call_")


async def test_no_tools_no_calls(gateway: Answers, client: openai.AsyncOpenAI) -> None:
    """With the choice "none" the model is not told of them; what looks like a call is text."""
    for choice in ("none", "auto"):
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": ASK}], tools=[TOOL], tool_choice=choice
        )
    assert [bool(request.chat.tools) for request in gateway.fake.requests] == [False, True]


async def test_one_call_is_enough() -> None:
    """Without parallel calls the first one counts."""
    twice = f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>' * 2

    def say(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer([1], request_id="r1")
        messages[1].delta.text = twice
        return messages

    async with answering(FakeConductor(say), tool_call_parser="hermes") as gateway:
        for parallel, count in ((None, 2), (True, 2), (False, 1)):
            message = (await gateway.chat(tools=[TOOL], parallel_tool_calls=parallel)).json()["choices"][0]["message"]
            assert len({call["id"] for call in message["tool_calls"]}) == count
            assert message["content"] is None


async def test_messages(gateway: Answers) -> None:
    client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http, max_retries=0)
    turns: list[MessageParam] = [{"role": "user", "content": ASK}]
    message = await client.messages.create(model="tiny", max_tokens=50, messages=turns, tools=BLOCKS)
    assert message.stop_reason == "tool_use"
    text, call = message.content
    assert text.type == "text"
    assert text.text == "I look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Paris"})
    turns.append({"role": "assistant", "content": message.content})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    turns.append({"role": "user", "content": [result]})
    async with client.messages.stream(model="tiny", max_tokens=50, messages=turns, tools=BLOCKS) as stream:
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": SUNNY}]
    assert final.stop_reason == "end_turn"
    check_asked(gateway)


async def test_messages_stream(gateway: Answers) -> None:
    client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http, max_retries=0)
    async with client.messages.stream(
        model="tiny", max_tokens=50, messages=[{"role": "user", "content": ASK}], tools=BLOCKS
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].to_dict()["input"] == {"city": "Paris"}
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


async def test_responses(gateway: Answers, client: openai.AsyncOpenAI) -> None:
    items: list[ResponseInputItemParam] = [{"role": "user", "content": ASK}]
    first = await client.responses.create(model="tiny", input=items, tools=[FLAT])
    assert (first.status, first.output_text) == ("completed", "I look.")
    call = first.output[1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == ("weather", PARIS)
    items += [item.to_dict() for item in first.output]  # type: ignore[misc]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    second = await client.responses.create(model="tiny", input=items, tools=[FLAT])
    assert second.output_text == SUNNY
    check_asked(gateway)


async def test_responses_stream(gateway: Answers, client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input=ASK, tools=[FLAT]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    call = final.output[1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", PARIS)
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.delta") > 3
    assert [kind for kind, _ in itertools.groupby(kinds)][-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_counts_have_the_tools() -> None:
    """Of `/tokenize` and of `/v1/messages/count_tokens`: tokens of what the chat template makes of all."""
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": TEMPLATE})
    async with answering(FakeConductor(), made, tool_call_parser="hermes") as gateway:
        turns = [{"role": "user", "content": ASK}]
        told = (await gateway.http.post("/tokenize", json={"messages": turns, "tools": [TOOL]})).json()
        text = (await gateway.http.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
        assert text == f"{json.dumps([TOOL])}\nuser {ASK}\nassistant "
        client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http)
        counted = await client.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": ASK}], tools=BLOCKS
        )
        assert counted.input_tokens == told["count"]
        refused = await gateway.http.post("/v1/messages/count_tokens", json={"messages": []})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")


ADD: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "add"}}


def made_to_call(text: str) -> FakeConductor:
    """Answers with a text in two pieces, as an answer that is held to a schema: the form of calls is not known."""

    def say(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer([1, 2], request_id="r1")
        for message, piece in zip(messages[1:-1], (text[:5], text[5:]), strict=True):
            message.delta.text = piece
        return messages

    return FakeConductor(say)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_one_function_has_to_be_called(choice: Any, stream: bool) -> None:
    """The answer is held to the schema of its parameters, and is its arguments."""
    async with answering(made_to_call(PARIS), tool_call_parser="none") as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "tool_choice": choice}
        if stream:
            async with client.chat.completions.stream(**ask, tools=[TOOL]) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**ask, tools=[TOOL])).choices[0].message
        assert message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("weather", PARIS)]
        assert not message.content
        assert gateway.asked.sampling.response_format == "json_schema"
        assert json.loads(gateway.asked.sampling.grammar) == {**SCHEMA, "additionalProperties": False}
        assert json.loads(gateway.asked.chat.tools) == [TOOL]


async def test_any_function_has_to_be_called() -> None:
    """The answer is held to a list of calls; whole and streamed answers that are cut have the calls that began."""
    calls = f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}}}]'
    async with answering(made_to_call(calls), tool_call_parser="none") as gateway:
        body = (await gateway.chat(tools=[TOOL, ADD], tool_choice="required")).json()
        found = body["choices"][0]["message"]["tool_calls"]
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == [
            ("weather", {"city": "Paris"}),
            ("add", {}),
        ]
        schema = json.loads(gateway.asked.sampling.grammar)
        assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, MAX_FORCED_CALLS)
        assert [form["properties"]["name"]["const"] for form in schema["items"]["anyOf"]] == ["weather", "add"]
        check_grammar(SamplingParams(response_format="json_schema", grammar=json.dumps(schema)))
    async with answering(made_to_call(calls[:-3]), tool_call_parser="none") as gateway:
        body = (await gateway.chat(tools=[TOOL, ADD], tool_choice="required", parallel_tool_calls=False)).json()
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": PARIS}
        assert json.loads(gateway.asked.sampling.grammar)["maxItems"] == 1


async def test_functions_with_definitions_may_be_forced_together() -> None:
    """References hold in the list of calls, also to the schema itself."""
    node = {
        "type": "object",
        "properties": {"colour": {"$ref": "#/$defs/colour"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["colour", "next"],
        "$defs": {"colour": {"enum": ["red", "blue"]}},
    }
    other: Any = {"type": "function", "function": {"name": "a.b-c", "parameters": node}}
    async with answering(made_to_call("[]"), tool_call_parser="none") as gateway:
        assert (await gateway.chat(tools=[other, ADD], tool_choice="required")).status_code == 200
        grammar = Grammar("json_schema", gateway.asked.sampling.grammar)
    for text, accepted in (
        ('{"colour": "red", "next": {"colour": "blue", "next": null}}', True),
        ('{"colour": "green", "next": null}', False),
        ('{"colour": "red", "next": {}}', False),
    ):
        matcher = LLMatcher(LLTokenizer("byte"), grammar.compiled())
        whole = f'[{{"name": "a.b-c", "arguments": {text}}}, {{"name": "add", "arguments": {{}}}}]'.encode()
        assert (matcher.try_consume_tokens(list(whole)) == len(whole)) == accepted, text


@pytest.mark.parametrize("cut", [12, 40, -3])
async def test_a_forced_call_that_is_cut_reads_the_same_whole_and_streamed(cut: int) -> None:
    calls = f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}}}]'
    async with answering(made_to_call(calls[:cut]), tool_call_parser="none") as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "tools": [TOOL, ADD]}
        whole = (await client.chat.completions.create(**ask, tool_choice="required")).choices[0]
        stream = client.chat.completions.create(**ask, tool_choice="required", stream=True)
        text, arguments, reason = "", [], None
        async for chunk in await stream:
            (choice,) = chunk.choices
            text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                if delta.function.name:
                    arguments.append("")
                arguments[-1] += delta.function.arguments or ""
        found = [call.function.arguments for call in whole.message.tool_calls or () if call.type == "function"]
        assert (whole.message.content or "", found, whole.finish_reason) == (text, arguments, reason)


async def test_calls_of_strict_functions_are_held_to_their_schema() -> None:
    """Also where the model is free to answer with text; other functions take any object."""
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    async with answering(FakeConductor(script), tool_call_parser="hermes") as gateway:
        await gateway.chat(tools=[strict, ADD])
        sampling = gateway.asked.sampling
        assert sampling.response_format == "lark"
        check_grammar(SamplingParams(response_format="lark", grammar=sampling.grammar))
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sampling.grammar))
        for text, accepted in (
            (CALLING, True),
            (SUNNY, True),
            (CALLING.replace("city", "town"), False),
            ('<tool_call>\n{"name": "add", "arguments": {"town": 1}}\n</tool_call>', True),
        ):
            matcher.reset()
            tokens = LLTokenizer("byte").tokenize_str(text)
            assert (matcher.try_consume_tokens(tokens) == len(tokens)) == accepted, text


async def test_other_interfaces_have_to_call() -> None:
    async with answering(made_to_call(PARIS), tool_call_parser="none") as gateway:
        client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http)
        message = await client.messages.create(
            model="tiny",
            max_tokens=50,
            messages=[{"role": "user", "content": ASK}],
            tools=BLOCKS,
            tool_choice={"type": "tool", "name": "weather"},
        )
        assert [block.type for block in message.content] == ["tool_use"]
        other = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        response = await other.responses.create(
            model="tiny", input=ASK, tools=[FLAT], tool_choice={"type": "function", "name": "weather"}
        )
        assert [item.type for item in response.output] == ["function_call"]
        assert all(request.sampling.response_format == "json_schema" for request in gateway.fake.requests)


def joined_message(text: str) -> dict[str, Any]:
    """The message that a stream's chunks make."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


async def test_what_the_gateway_says_is_accepted_back() -> None:
    """Malformed and cut answers in hermes' form: whole and streamed chats are the same, and the next turn has them."""
    seed, said = 43, [""]
    print("seed", seed)
    draw = random.Random(seed)

    def repeated(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer(range(len(said)), request_id="r1")
        for message, piece in zip(messages[1:-1], said, strict=True):
            message.delta.text = piece
        return messages

    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    async with answering(FakeConductor(repeated), tool_call_parser="hermes") as gateway:
        for malform in MALFORMED * 3:
            text = malform(answers(draw))
            text = text[: draw.randrange(1, len(text) + 1)]
            said[:] = [text[at : at + 7] for at in range(0, len(text), 7)]
            whole = (await gateway.chat(tools=tools)).json()["choices"][0]["message"]
            streamed = joined_message((await gateway.chat(tools=tools, stream=True)).text)
            assert streamed["content"] == (whole["content"] or "")
            assert streamed["tool_calls"] == whole.get("tool_calls", [])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in streamed["tool_calls"]]
            for message in (whole, streamed):
                again = await gateway.chat(messages=[*TURNS, message, *results], tools=tools)
                assert again.status_code == 200, (message, again.text)
