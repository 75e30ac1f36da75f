"""What comes back: OpenAI's objects, whole and streamed, and what was asked of the conductor for them."""

import json
from typing import Any

import openai
import pytest

from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import kv_pb2

from .fakes import CHAT, MODEL_TOKENS, PLAIN, TURNS, Answers, answering

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}

CHAT_USAGE = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 0}}


def two_tokens() -> FakeConductor:
    """Answers with "5 6 ", cut by length, after nine prompt tokens of which eight were cached."""
    reason = kv_pb2.FINISH_REASON_LENGTH
    return FakeConductor(lambda _: answer([5, 6], request_id="r1", reason=reason, prompt_tokens=9, cached_tokens=8))


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream, which ends with [DONE]."""
    pieces = text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


async def test_chat() -> None:
    async with answering(two_tokens()) as gateway:
        answered = await gateway.chat()
        assert answered.headers["x-request-id"] == "r1"
        body = answered.json()
        created = body.pop("created")
        assert created > 1_700_000_000
        assert body == {
            "id": "chatcmpl-r1",
            "object": "chat.completion",
            "model": "tiny",
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "5 6 "},
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
            "usage": CHAT_USAGE,
        }


async def test_plain_completion() -> None:
    async with answering(two_tokens()) as gateway:
        body = (await gateway.plain(prompt="x")).json()
        assert (body["id"], body["object"], body["usage"]) == ("cmpl-r1", "text_completion", USAGE)
        assert body["choices"] == [{"index": 0, "text": "5 6 ", "logprobs": None, "finish_reason": "length"}]
        assert gateway.asked.text == "x"
        assert gateway.asked.sampling.max_tokens == 16


@pytest.mark.parametrize("usage", [True, False])
async def test_chat_stream(usage: bool) -> None:
    async with answering(two_tokens()) as gateway:
        options = {"stream_options": {"include_usage": usage}}
        answered = await gateway.chat(stream=True, max_tokens=2, **options)
        assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answered.headers["x-request-id"] == "r1"
        found = events(answered.text)
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert {event["id"] for event in found} == {"chatcmpl-r1"}
    deltas = [(event["choices"][0]["delta"], event["choices"][0]["finish_reason"]) for event in found[:2]]
    assert deltas == [({"role": "assistant", "content": "5 "}, None), ({"content": "6 "}, "length")]
    if usage:
        assert [event["usage"] for event in found] == [None, None, CHAT_USAGE]
        assert found[2]["choices"] == []
    else:
        assert len(found) == 2
        assert not any("usage" in event for event in found)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_text_that_was_held_back_comes_with_the_last_token(path: str) -> None:
    """As the beginning of a stop text, which the last token could have continued."""
    messages = answer([5, 6], request_id="r1", reason=kv_pb2.FINISH_REASON_LENGTH)
    messages[2].delta.text = "6 EN"
    prompt = {"prompt": "x"} if path == PLAIN else {"messages": TURNS}
    async with answering(FakeConductor(lambda _: messages)) as gateway:
        body = {**prompt, "stream": True, "max_tokens": 2}
        found = [event["choices"][0] for event in events((await gateway.http.post(path, json=body)).text)]
    texts = [choice["text"] if path == PLAIN else choice["delta"]["content"] for choice in found]
    assert texts == ["5 ", "6 EN"]
    assert [choice["finish_reason"] for choice in found] == [None, "length"]


async def test_usage_in_every_event() -> None:
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with answering(two_tokens()) as gateway:
        found = events((await gateway.chat(stream=True, max_tokens=2, stream_options=options)).text)
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 2]
    assert [event["usage"]["total_tokens"] for event in found] == [10, 11, 11]
    assert found[-1]["usage"] == CHAT_USAGE


async def test_plain_stream() -> None:
    async with answering(two_tokens()) as gateway:
        found = events((await gateway.plain(prompt="x", max_tokens=2, stream=True)).text)
    assert [event["choices"][0]["text"] for event in found] == ["5 ", "6 "]
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, "length"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_an_end_that_no_token_foretells_comes_alone(path: str) -> None:
    """The token that ends an answer has no text; the events are as many as the tokens."""
    reason = kv_pb2.FINISH_REASON_STOP
    messages = answer([5, 6], request_id="r1", reason=reason)
    messages[2].delta.text = ""
    prompt = {"prompt": "x"} if path == PLAIN else {"messages": TURNS}
    async with answering(FakeConductor(lambda _: messages)) as gateway:
        found = events((await gateway.http.post(path, json={**prompt, "stream": True})).text)
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, "stop"]


async def test_an_answer_without_tokens_is_whole() -> None:
    async with answering(FakeConductor(lambda _: answer([], request_id="r1"))) as gateway:
        assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == ""
        found = events((await gateway.chat(stream=True)).text)
    assert [event["choices"][0]["delta"] for event in found] == [{"role": "assistant", "content": ""}]
    assert {event["id"] for event in found} == {"chatcmpl-r1"}


def two_answers() -> FakeConductor:
    """Answers with "5 " and, twice as long, "6 7 ", mixed."""
    placed, first, second, third, finished = answer([5, 6, 7], request_id="r1")
    second.delta.choice = third.delta.choice = 1
    second.delta.position, third.delta.position = 0, 1
    for last, reason in ((first, kv_pb2.FINISH_REASON_STOP), (third, kv_pb2.FINISH_REASON_LENGTH)):
        last.delta.reason = reason
        finished.finished.choices.add(reason=reason)
    return FakeConductor(lambda _: [placed, second, first, third, finished])


async def test_several_answers() -> None:
    async with answering(two_answers()) as gateway:
        choices = (await gateway.chat(n=2)).json()["choices"]
        assert gateway.asked.sampling.n == 2
        assert [(choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in choices] == [
            (0, "5 ", "stop"),
            (1, "6 7 ", "length"),
        ]
        found = [event["choices"][0] for event in events((await gateway.chat(n=2, stream=True)).text)]
        plain = [event["choices"][0] for event in events((await gateway.plain(prompt="x", n=2, stream=True)).text)]
    assert [(choice["index"], choice["delta"].get("content"), choice["finish_reason"]) for choice in found] == [
        (1, "6 ", None),
        (0, "5 ", "stop"),
        (1, "7 ", "length"),
    ]
    assert [(choice["index"], choice["text"]) for choice in plain] == [
        (1, "6 "),
        (0, "5 "),
        (1, "7 "),
    ]


async def test_emulated_answers_say_so() -> None:
    messages = answer()
    messages[0].placed.placement.emulated = messages[-1].finished.placement.emulated = True
    async with answering(FakeConductor(lambda _: messages)) as gateway:
        assert (await gateway.chat()).json()["system_fingerprint"] == "emulated"
        assert events((await gateway.chat(stream=True)).text)[0]["system_fingerprint"] == "emulated"


@pytest.mark.parametrize(
    ("field", "given", "name", "expected"),
    [
        ("max_tokens", 7, "max_tokens", 7),
        ("max_completion_tokens", 7, "max_tokens", 7),
        ("max_tokens", None, "max_tokens", MODEL_TOKENS),
        ("min_tokens", 3, "min_tokens", 3),
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 0.5, "temperature", 0.5),
        ("top_p", 0.25, "top_p", 0.25),
        ("top_k", 5, "top_k", 5),
        ("top_k", -1, "top_k", 2**31 - 1),
        ("min_p", 0.25, "min_p", 0.25),
        ("presence_penalty", -0.5, "presence_penalty", -0.5),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
        ("stop", "end", "stop", ["end"]),
        ("stop", ["a", "b"], "stop", ["a", "b"]),
        ("stop_token_ids", [4, 5], "stop_token_ids", [4, 5]),
        ("ignore_eos", True, "ignore_eos", True),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
        ("logit_bias", {"5": -1.5}, "logit_bias", {5: -1.5}),
    ],
)
async def test_sampling_is_passed_on(gateway: Answers, field: str, given: object, name: str, expected: object) -> None:
    assert (await gateway.chat(**{field: given})).status_code == 200
    value = getattr(gateway.asked.sampling, name)
    assert (dict(value) if isinstance(expected, dict) else list(value) if isinstance(expected, list) else value) == (
        expected
    )


async def test_conversation(gateway: Answers) -> None:
    """Parts become lines of one text, a developer's turn a system's, an assistant's turn may have none."""
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": "c", "name": "ann"},
    ]
    answered = await gateway.chat(messages=turns)
    assert answered.headers["warning"] == '299 moonpool "ignored fields: messages.3.name"'
    assert [(turn.role, turn.content) for turn in gateway.asked.chat.messages] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", ""),
        ("user", "c"),
    ]


async def test_past_refusals_and_reasoning(gateway: Answers) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never", "reasoning_content": "x"},
        {"role": "user", "content": "b"},
    ]
    answered = await gateway.chat(messages=turns, reasoning_effort="low", thinking={"type": "enabled"})
    assert answered.status_code == 200, answered.text
    assert [turn.content for turn in gateway.asked.chat.messages] == ["a", "no", "never", "b"]
    assert answered.headers["warning"].endswith('fields: thinking, messages.1.content.0"')


@pytest.mark.parametrize("given", [{"seed": -1}, {"max_tokens": 7.0}, {"seed": 2.0}, {"top_k": 5.0}])
async def test_whole_numbers_may_be_written_as_floats(gateway: Answers, given: dict[str, float]) -> None:
    """And llama.cpp's seed -1 stands for a seed that the server draws."""
    assert (await gateway.chat(**given)).status_code == 200
    for name, value in given.items():
        assert getattr(gateway.asked.sampling, name) == (0 if value < 0 else value)
        refused = await gateway.chat(**{name: 2.5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "body", [{"prompt": [4, 5]}, {"prompt": [[4, 5]]}, {"prompt_token_ids": [4, 5]}], ids=["flat", "nested", "named"]
)
async def test_tokens_as_prompt(gateway: Answers, body: dict[str, Any]) -> None:
    await gateway.plain(**body)
    assert gateway.asked.tokens.token_ids == [4, 5]


async def test_chat_of_tokens(gateway: Answers) -> None:
    await gateway.http.post(CHAT, json={"prompt_token_ids": [4, 5]})
    assert gateway.asked.tokens.token_ids == [4, 5]


async def test_limits_model_and_time(gateway: Answers) -> None:
    await gateway.plain(prompt=["x"], model="tiny", slo={"ttft_s": 1.5})
    assert (gateway.asked.text, gateway.asked.model, gateway.asked.slo.ttft_s) == ("x", "tiny", 1.5)
    assert not gateway.asked.slo.HasField("tbt_s")
    assert (gateway.asked.slo.HasField("queue_s"), gateway.asked.priority) == (False, 0)


async def test_priority_and_patience(gateway: Answers) -> None:
    await gateway.plain(prompt=["x"], slo={"queue_s": 2}, priority=-4)
    assert (gateway.asked.slo.queue_s, gateway.asked.priority) == (2.0, -4)
    assert gateway.fake.timeouts_s[0] == pytest.approx(600.0, abs=5)


async def test_models(gateway: Answers) -> None:
    card = {"id": "tiny", "object": "model", "created": 7, "owned_by": "moonpool", "max_model_len": MODEL_TOKENS}
    card |= {"architecture": {"input_modalities": ["text"]}}
    assert (await gateway.http.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await gateway.http.get("/v1/models/tiny")).json() == card
    assert (await gateway.http.get("/v1/models/org/other")).status_code == 404


async def test_tokenize_and_back(gateway: Answers) -> None:
    told = (await gateway.http.post("/tokenize", json={"prompt": "hello world", "return_token_strs": True})).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert "".join(told["token_strs"]) == "<s>hello world"
    assert told["max_model_len"] == MODEL_TOKENS
    bare = (await gateway.http.post("/tokenize", json={"prompt": "hello world", "add_special_tokens": False})).json()
    assert bare["tokens"] == told["tokens"][1:]
    back = (await gateway.http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back == {"prompt": "<s>hello world"}


async def test_tokenize_a_conversation(gateway: Answers) -> None:
    """Through the chat template, as the conductor renders it."""
    with_prompt = (await gateway.http.post("/tokenize", json={"messages": TURNS})).json()["tokens"]
    without = (await gateway.http.post("/tokenize", json={"messages": TURNS, "add_generation_prompt": False})).json()
    text = (await gateway.http.post("/detokenize", json={"tokens": with_prompt})).json()["prompt"]
    assert text == "<s># user: hi\n# assistant:\n"
    assert without["tokens"] == with_prompt[: without["count"]] != with_prompt


async def test_openai_client(gateway: Answers) -> None:
    """The real client reads what it asks for, without a network."""
    client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
    whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert whole.choices[0].message.content == "1 2 3 "
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "1 2 3 "
    with pytest.raises(openai.BadRequestError, match="suffix: is not supported yet"):
        await client.completions.create(model="tiny", prompt="x", suffix="y")


async def test_both_paths_are_for_posts(gateway: Answers) -> None:
    for path in (CHAT, PLAIN):
        refused = await gateway.http.get(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.json()["error"]["code"] == "unknown_url"
