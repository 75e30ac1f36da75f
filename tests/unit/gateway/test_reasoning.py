"""Thinking in all three interfaces, read by the real clients; continued answers; variables of the chat template."""

import json
from typing import Any

import anthropic
import openai
import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, answering

THINKING = "I add.\n2 and 2."
TEMPLATE = """{% for turn in messages %}{{ turn.role }} {{ turn.reasoning_content }}{{ turn.content }}
{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% if enable_thinking is defined and not enable_thinking -%}
{{ '<think></think>' }}{% elif open is defined %}{{ '<think>' }}{% endif %}{% endif %}"""
ASK: Any = [{"role": "user", "content": "2 + 2?"}]


def texts() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": TEMPLATE})


def says(text: str) -> FakeConductor:
    """Answers with a text."""
    tokens = texts().encode(text, add_special=False)

    def script(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages, stream = answer(tokens, request_id="r1"), texts().stream()
        for message, token in zip(messages[1:-1], tokens, strict=True):
            message.delta.text = stream.push([token])
        assert not stream.flush()
        return messages

    return FakeConductor(script)


THOUGHT = says(f"<think>\n{THINKING}\n</think>\n\n4.")


async def test_chat() -> None:
    async with answering(THOUGHT, texts()) as gateway:
        message = (await gateway.chat(messages=ASK)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "4.", "reasoning_content": THINKING}
        lines = (await gateway.http.post(CHAT, json={"messages": ASK, "stream": True})).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THINKING
        assert "".join(delta.get("content", "") for delta in deltas) == "4."
        again = [*ASK, message, {"role": "user", "content": "And 3?"}]
        assert (await gateway.chat(messages=again)).status_code == 200
        assert gateway.fake.requests[-1].chat.messages[1].reasoning_content == THINKING


async def test_messages() -> None:
    async with answering(THOUGHT, texts()) as gateway:
        client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http)
        ask: Any = {"model": "tiny", "max_tokens": 50, "messages": ASK}
        whole = await client.messages.create(**ask)
        assert [block.to_dict() for block in whole.content] == [
            {"type": "thinking", "thinking": THINKING, "signature": ""},
            {"type": "text", "text": "4."},
        ]
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
        assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in whole.content], streamed
        ask["messages"] = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "3?"}]
        await client.messages.create(**ask, thinking={"type": "disabled"})
        sent = gateway.fake.requests[-1].chat
        assert (sent.messages[1].reasoning_content, sent.messages[1].content) == (THINKING, "4.")
        assert json.loads(sent.template_kwargs) == {"enable_thinking": False}


async def test_responses() -> None:
    async with answering(THOUGHT, texts()) as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        items: list[Any] = [*ASK]
        whole = await client.responses.create(model="tiny", input=items)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        async with client.responses.stream(model="tiny", input=items) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == ["reasoning", "message"]
        assert streamed.output[0].to_dict() == whole.output[0].to_dict()
        assert (streamed.output_text, whole.output_text) == ("4.", "4.")
        assert kinds.count("response.reasoning_text.done") == 1
        items += [*(item.to_dict() for item in whole.output), {"role": "user", "content": "And 3?"}]
        await client.responses.create(model="tiny", input=items)
        turns = gateway.fake.requests[-1].chat.messages
        assert [(turn.role, turn.content, turn.reasoning_content) for turn in turns][1] == ("assistant", "4.", THINKING)
        assert len(turns) == 3


async def test_tokens_of_the_thinking_are_counted() -> None:
    """With the marks, whole and streamed; all tokens of an answer that is cut while the model thinks."""
    marked, cut = f"<think>\n{THINKING}\n</think>", f"<think>\n{THINKING}"
    turns = {"model": "tiny", "max_tokens": 50, "messages": ASK}
    for said, thought in ((f"{marked}\n\n4.", marked), (cut, cut), ("4.", "")):
        count = len(texts().encode(thought, add_special=False))
        async with answering(says(said), texts()) as gateway:
            client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
            for usage in ((await gateway.chat(messages=ASK)).json()["usage"], await streamed_usage(client)):
                assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
            response = await client.responses.create(model="tiny", input=ASK)
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == count
            message = (await gateway.http.post("/v1/messages", json=turns)).json()
            assert message["usage"]["output_tokens_details"] == {"thinking_tokens": count}


async def streamed_usage(client: openai.AsyncOpenAI) -> dict[str, Any]:
    stream = await client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    return usages[-1].to_dict()


async def test_a_template_may_begin_or_forbid_the_thinking() -> None:
    async with answering(says(f"{THINKING}</think>4."), texts()) as gateway:
        body = (await gateway.chat(messages=ASK, chat_template_kwargs={"open": True})).json()
        assert body["choices"][0]["message"]["reasoning_content"] == THINKING
        body = (await gateway.chat(messages=ASK, chat_template_kwargs={"enable_thinking": False})).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": f"{THINKING}</think>4."}
        assert json.loads(gateway.fake.requests[-1].chat.template_kwargs) == {"enable_thinking": False}
    async with answering(THOUGHT, texts(), reasoning_parser="none") as gateway:
        message = (await gateway.chat(messages=ASK)).json()["choices"][0]["message"]
        assert message["content"].startswith("<think>")


async def test_an_answer_is_continued() -> None:
    begun = [*ASK, {"role": "assistant", "content": "It is "}]
    async with answering(says("4."), texts()) as gateway:
        answered = await gateway.chat(messages=begun, continue_final_message=True, add_generation_prompt=False)
        assert answered.json()["choices"][0]["message"]["content"] == "4."
        body = {"messages": begun, "max_tokens": 5}
        assert (await gateway.http.post("/v1/messages", json=body)).json()["content"] == [
            {"type": "text", "text": "4."}
        ]
        assert [request.chat.continue_final_message for request in gateway.fake.requests] == [True, True]
        tokens = (await gateway.http.post("/tokenize", json={"messages": begun, "continue_final_message": True})).json()
        text = (await gateway.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"]
        assert text == "user 2 + 2?\nassistant It is "
        for wrong in (
            {"add_generation_prompt": True, "continue_final_message": True},
            {"add_generation_prompt": False},
        ):
            assert (await gateway.chat(messages=begun, **wrong)).status_code == 400


BAD_ARGUMENTS = ["", " ", '{"city": "Par', "{'a': True}", "[1]", "null", None, {"city": "Paris"}, [1], 7]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
async def test_a_past_call_with_bad_arguments_is_accepted(arguments: Any) -> None:
    """In every interface: the conductor reads what can be read."""
    function = {"name": "f", "arguments": arguments}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    items = [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}]
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]
    async with answering(says("4."), texts()) as gateway:
        chat = [*ASK, call, {"role": "tool", "tool_call_id": "c1", "content": "r"}]
        turns = [*ASK, {"role": "assistant", "content": [block]}, {"role": "user", "content": result}]
        items = [*ASK, *items, {"type": "function_call_output", "call_id": "c1", "output": "r"}]
        answers = [
            await gateway.chat(messages=chat),
            await gateway.http.post("/v1/messages", json={"messages": turns, "max_tokens": 5}),
            await gateway.http.post("/v1/responses", json={"input": items}),
        ]
        assert [reply.status_code for reply in answers] == [200, 200, 200], [reply.text for reply in answers]
        sent = [request.chat.messages[1].tool_calls[0].arguments for request in gateway.fake.requests]
        assert sent == [arguments if isinstance(arguments, str) else json.dumps(arguments)] * 3
