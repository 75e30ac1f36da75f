"""Log probabilities over HTTP: OpenAI's forms for chats and plain completions, vLLM's for prompts."""

import json
from typing import Any

import openai
import pytest

from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import MODEL_TOKENS, TURNS, answering, tokenizer

TOKENS = [5, 6]
TOP = 2


def scored(first: int, count: int) -> kv_pb2.Logprobs:
    """Of `count` tokens: -1 and its place, rank 2, and two likelier ones."""
    return kv_pb2.Logprobs(
        logprobs=[-1.0 - place for place in range(first, first + count)],
        ranks=[3] * count,
        top_token_ids=[7, 8] * count,
        top_logprobs=[-0.25, -0.5] * count,
    )


def conductor(*, top: bool = True, prompt: bool = False) -> FakeConductor:
    def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = answer(TOKENS, request_id="r")
        for message in messages:
            if message.HasField("delta"):
                found = scored(message.delta.position, 1)
                if not top:
                    del found.top_token_ids[:]
                    del found.top_logprobs[:]
                message.delta.logprobs.CopyFrom(found)
        told = pb.PromptLogprobs(token_ids=[3, 4, 7], logprobs=scored(0, 2))
        return [messages[0], *([pb.GenerateResponse(prompt_logprobs=told)] if prompt else []), *messages[1:]]

    return FakeConductor(script)


def events(text: str) -> list[dict[str, Any]]:
    pieces = text.split("\n\n")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


async def test_chat() -> None:
    async with answering(conductor()) as gateway:
        [choice] = (await gateway.chat(logprobs=True, top_logprobs=TOP)).json()["choices"]
        assert gateway.asked.sampling.logprobs == TOP
        first, second = choice["logprobs"]["content"]
        assert (first["logprob"], second["logprob"]) == (-1.0, -2.0)
        assert first["bytes"] == list(first["token"].encode())
        assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -0.5]
        assert first["token"] == tokenizer().decode([5], skip_special=False)


async def test_a_stream_tells_them_with_the_text_of_their_tokens() -> None:
    async with answering(conductor()) as gateway:
        found = events((await gateway.chat(logprobs=True, stream=True)).text)
        told = [event["choices"][0] for event in found if event["choices"][0]["logprobs"]]
        assert [part["delta"]["content"] for part in told] == ["5 ", "6 "]
        assert [[token["logprob"] for token in part["logprobs"]["content"]] for part in told] == [[-1.0], [-2.0]]


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_completion(stream: bool) -> None:
    async with answering(conductor()) as gateway:
        answered = await gateway.plain(prompt="x", logprobs=TOP, stream=stream)
        bodies = events(answered.text) if stream else [answered.json()]
        found = [part for body in bodies if (part := body["choices"][0]["logprobs"])]
        tokens = [token for part in found for token in part["tokens"]]
        assert [value for part in found for value in part["token_logprobs"]] == [-1.0, -2.0]
        assert [offset for part in found for offset in part["text_offset"]] == [0, len(tokens[0])]
        assert found[0]["top_logprobs"][0][tokens[0]] == -1.0
        assert len(found[0]["top_logprobs"][0]) == TOP + 1


async def test_without_likely_tokens() -> None:
    async with answering(conductor(top=False)) as gateway:
        [choice] = (await gateway.plain(prompt="x", logprobs=0)).json()["choices"]
        assert gateway.asked.sampling.HasField("logprobs")
        assert choice["logprobs"]["top_logprobs"] == [{}, {}]


@pytest.mark.parametrize("path", ["chat", "plain"])
async def test_of_a_prompt(path: str) -> None:
    async with answering(conductor(prompt=True)) as gateway:
        ask = gateway.chat(prompt_logprobs=TOP) if path == "chat" else gateway.plain(prompt="x", prompt_logprobs=TOP)
        body = (await ask).json()
        assert gateway.asked.sampling.prompt_logprobs == TOP
        found = body["prompt_logprobs"] if path == "chat" else body["choices"][0]["prompt_logprobs"]
        assert found[0] is None
        assert list(found[1]) == ["7", "8", "4"]
        assert (found[1]["4"]["logprob"], found[1]["4"]["rank"]) == (-1.0, 3)
        assert (found[2]["7"]["logprob"], found[2]["7"]["rank"]) == (-0.25, 1)


async def test_of_several_prompts() -> None:
    """Each choice has those of its own prompt."""
    async with answering(conductor(prompt=True)) as gateway:
        body = (await gateway.plain(prompt=["x", "y"], prompt_logprobs=TOP)).json()
        assert [list(part["prompt_logprobs"][1]) for part in body["choices"]] == [["7", "8", "4"]] * 2


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_prompt_that_is_repeated_has_its_own(max_tokens: int, prompts: int) -> None:
    """As evaluation harnesses ask for log likelihoods; with `max_tokens` 0 the prompt is all there is."""
    ids = [3, 4, 7]
    async with answering(conductor(prompt=True)) as gateway:
        body = (await gateway.plain(prompt=[ids] * prompts, echo=True, logprobs=TOP, max_tokens=max_tokens)).json()
        assert {request.sampling.prompt_logprobs for request in gateway.fake.requests} == {TOP}
        assert {request.sampling.max_tokens for request in gateway.fake.requests} == {max_tokens or 1}
    assert [choice["index"] for choice in body["choices"]] == list(range(prompts))
    shown = ids + (TOKENS if max_tokens else [])
    texts = [tokenizer().decode([token], skip_special=False) for token in shown]
    for choice in body["choices"]:
        told = choice["logprobs"]
        assert choice["text"] == tokenizer().decode(ids, skip_special=False) + ("5 6 " if max_tokens else "")
        assert told["tokens"] == texts
        assert told["token_logprobs"] == [None, -1.0, -2.0, *([-1.0, -2.0] if max_tokens else [])]
        assert told["text_offset"] == [sum(map(len, texts[:place])) for place in range(len(texts))]
        assert told["top_logprobs"][0] is None
        assert len(told["top_logprobs"][1]) == TOP + 1
        assert "prompt_logprobs" not in choice
    assert body["usage"]["completion_tokens"] == (2 * prompts if max_tokens else 0)
    assert max_tokens or {choice["finish_reason"] for choice in body["choices"]} == {"length"}


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}])
async def test_a_prompt_that_is_repeated_in_a_stream(max_tokens: int, extra: dict[str, Any]) -> None:
    """The pieces of each choice make what the whole answer has."""
    body = {"prompt": [[3, 4, 7]] * 2, "echo": True, "logprobs": TOP, "max_tokens": max_tokens, **extra}
    async with answering(conductor(prompt=True)) as gateway:
        whole = (await gateway.plain(**body)).json()["choices"]
        found = [event["choices"][0] for event in events((await gateway.plain(**body, stream=True)).text)]
    for choice in whole:
        own = [event for event in found if event["index"] == choice["index"]]
        assert "".join(event["text"] for event in own) == choice["text"]
        told = [event["logprobs"] for event in own if event["logprobs"] is not None]
        assert {name: [value for part in told for value in part[name]] for name in told[0]} == choice["logprobs"]
        assert [event["finish_reason"] for event in own][-1] == choice["finish_reason"]
        assert [value for event in own for value in event.get("token_ids", ())] == choice.get("token_ids", [])


async def test_a_repeated_text() -> None:
    async with answering(FakeConductor(lambda _: answer(TOKENS))) as gateway:
        [choice] = (await gateway.plain(prompt="hi", echo=True)).json()["choices"]
        assert (choice["text"], choice["logprobs"]) == ("hi5 6 ", None)
        assert list(gateway.asked.tokens.token_ids) == tokenizer().encode("hi")
        found = events((await gateway.plain(prompt="hi", echo=True, stream=True)).text)
        assert "".join(event["choices"][0]["text"] for event in found) == "hi5 6 "
        found = events((await gateway.plain(prompt="hi", max_tokens=0, stream=True)).text)
        assert [(event["choices"][0]["text"], event["choices"][0]["finish_reason"]) for event in found] == [
            ("", "length")
        ]


async def test_many_prompts() -> None:
    """More than run at the same time; the choices are in the prompts' order."""
    async with answering(FakeConductor(lambda request: answer([request.tokens.token_ids[0]]))) as gateway:
        body = (await gateway.plain(prompt=[[number % 90 + 3] for number in range(200)])).json()
        assert [choice["text"] for choice in body["choices"]] == [f"{number % 90 + 3} " for number in range(200)]
        assert len(gateway.fake.requests) == 200


async def test_what_a_harness_reads_of_the_tokenizer() -> None:
    async with answering(FakeConductor()) as gateway:
        told = (await gateway.http.get("/tokenizer_info")).json()
    assert told["bos_token"] == "<s>"
    assert told["eos_token"] == tokenizer().special_tokens["eos_token"]
    assert told["chat_template"] == tokenizer().chat_template
    assert told["model_max_length"] == MODEL_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat", {"logprobs": 1}, "logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("plain", {"logprobs": True}, "logprobs"),
    ],
)
async def test_what_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with answering(conductor()) as gateway:
        asked = {"prompt": "x", **body} if path == "plain" else {"messages": TURNS, **body}
        answered = await (gateway.plain(**asked) if path == "plain" else gateway.chat(**asked))
        assert answered.status_code == 400
        assert answered.json()["error"]["param"].startswith(param)
        assert gateway.fake.requests == []


async def test_responses() -> None:
    """OpenAI's newer form: in the text's part, and in a stream beside its pieces."""
    ask: dict[str, Any] = {
        "model": "tiny",
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    async with answering(conductor()) as gateway:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=gateway.http)
        whole = await client.responses.create(**ask)
        assert gateway.asked.sampling.logprobs == TOP
        async with client.responses.stream(**ask) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole.to_dict(), streamed.to_dict()):
        output: Any = response["output"]
        (part,) = output[0]["content"]
        assert part["type"] == "output_text"
        assert [token["logprob"] for token in part["logprobs"]] == [-1.0, -2.0]
        assert [token["logprob"] for token in part["logprobs"][0]["top_logprobs"]] == [-0.25, -0.5]
    told = [
        logprob.logprob for event in events if event.type == "response.output_text.delta" for logprob in event.logprobs
    ]
    assert told == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"include": ["novel"]}, "include.0"),
        ({"top_logprobs": 2, "tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"top_logprobs": True}, "top_logprobs"),
    ],
)
async def test_responses_refuse_by_name(body: dict[str, Any], names: str) -> None:
    async with answering(conductor()) as gateway:
        refused = await gateway.http.post("/v1/responses", json={"input": "hi", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, names)
