"""A gateway in front of a running stack, used by OpenAI's own client and over plain sockets."""

import array
import asyncio
import base64
import http.client
import json
import math
import shutil
import socket
import subprocess
import urllib.request
from typing import Any

import jsonschema
import openai
import pytest
import torch

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.bench_serve import run_serve
from moonpool.cli.check import wait_at_rest
from moonpool.cli.predict_options import BenchServeOptions
from moonpool.cli.serve import curl_line
from moonpool.client import Client, Message
from tests.integration.conftest import BLOCK, tokens, wait_busy
from tests.integration.reference import LOGPROB_TOLERANCE, Reference
from tests.integration.shared.conftest import MODEL, TURNS
from tests.integration.shared.schemas import SCHEMAS, Schema
from tests.integration.stack import REST_TIMEOUT_S, CheckedStack

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_two_salts_share_no_kv(client: openai.OpenAI) -> None:
    """Each salt finds its own blocks again; a request without a salt finds none of either's."""
    prompt = tokens(5 * BLOCK, "salted")

    def cached(**salt: str) -> int:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0, extra_body=salt)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(cache_salt="alice"), cached(cache_salt="bob"), cached()] == [0, 0, 0]
    assert min(cached(cache_salt="alice"), cached(cache_salt="bob"), cached()) >= BLOCK


def test_log_likelihoods_of_a_harness(address: str, reference: Reference) -> None:
    """The request of lm-eval: batches of contexts with continuations, repeated with log probabilities."""
    cases = [(tokens(size, f"context {size}"), tokens(size % 5 + 1, f"ending {size}")) for size in range(2, 72)]
    body = {
        "model": MODEL, "prompt": [context + ending for context, ending in cases], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "echo": True, "seed": 1234,
    }  # fmt: skip
    choices = sorted(post(address, "/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(cases)
    for (context, ending), choice in zip(cases, choices, strict=True):
        found = choice["logprobs"]["token_logprobs"][len(context) : -1]
        rows = torch.log_softmax(reference.logits([*context, *ending]), dim=-1)[len(context) - 1 : -1]
        wanted = [float(row[token]) for row, token in zip(rows, ending, strict=True)]
        assert abs(sum(found) - sum(wanted)) < 1e-3


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_last_hidden_states(client: openai.OpenAI, reference: Reference, encoding: Any) -> None:
    """Of several prompts, shorter and longer than a block; the second time from cached KV."""
    prompts = [tokens(size, f"embedded {size} {encoding}") for size in (1, BLOCK, 2 * BLOCK + 3)]
    for _ in range(2):
        found = client.embeddings.create(model=MODEL, input=prompts, encoding_format=encoding)
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, prompts))
        for prompt, each in zip(prompts, found.data, strict=True):
            values = each.embedding
            if isinstance(values, str):
                values = list(array.array("f", base64.b64decode(values)))
            assert values == pytest.approx(reference.embedding(prompt), abs=1e-3)
            assert math.hypot(*values) == pytest.approx(1, abs=1e-5)


def test_chat_equals_the_sdk(stack: CheckedStack, client: openai.OpenAI) -> None:
    """Whole and streamed: the SDK's greedy text, and the second time from cached KV."""
    with Client(stack.address) as sdk:
        messages: list[Message] = [{"role": "user", "content": str(TURNS[0]["content"])}]
        expected = sdk.generate(messages=messages, sampling=SamplingParams(max_tokens=12, temperature=0.0))
    whole = client.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens_details.cached_tokens or 0) >= BLOCK
    with client.chat.completions.create(
        model=MODEL, messages=TURNS, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


async def test_asyncio_client(aio: openai.AsyncOpenAI) -> None:
    """Whole and streamed; a seed makes an answer that comes again."""
    texts = []
    for _ in range(2):
        whole = await aio.completions.create(model=MODEL, prompt="the sea", max_tokens=8, seed=5, temperature=1.0)
        texts.append(whole.choices[0].text)
    stream = await aio.completions.create(
        model=MODEL, prompt="the sea", max_tokens=8, seed=5, temperature=1.0, stream=True
    )
    texts.append("".join([chunk.choices[0].text async for chunk in stream]))
    assert len(set(texts)) == 1
    assert [model.id async for model in aio.models.list()] == [MODEL]


def test_tokens_and_text(address: str, client: openai.OpenAI) -> None:
    """What `/tokenize` says is what the engines see; tokens are as good a prompt as their text."""
    told = post(address, "/tokenize", {"messages": TURNS})
    usage = client.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == told["count"] == len(told["tokens"])
    whole = client.completions.create(model=MODEL, prompt=told["tokens"], max_tokens=4, temperature=0)
    chat = client.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=4, temperature=0)
    assert whole.choices[0].text == chat.choices[0].message.content
    assert post(address, "/detokenize", {"tokens": told["tokens"]})["prompt"].startswith("<s>[user] the tide")


def test_several_prompts(client: openai.OpenAI) -> None:
    """Each is answered as alone, whatever their forms."""
    prompts = ["the sea", "a moon", "the sea"]
    several = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0)
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0) for prompt in prompts[:2]
    ]
    texts = [each.choices[0].text for each in alone]
    assert [choice.text for choice in several.choices] == [*texts, texts[0]]


def test_tools_reach_the_chat_template(address: str, client: openai.OpenAI) -> None:
    """Calls and their results too: the prompt has the tokens that the template makes of them."""
    tool: Any = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 7}'}}
    turns: Any = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "high"},
    ]
    told = post(address, "/tokenize", {"messages": turns, "tools": [tool]})
    text = post(address, "/detokenize", {"tokens": told["tokens"]})["prompt"]
    assert text.startswith('<s>[tools] [{"type": "function", "function": {"name": "tide"')
    assert '<tool_call>{"name": "tide", "arguments": {"at": 7}}</tool_call>\n[tool] high' in text
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[tool], max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["count"]


def test_special_tokens_in_the_text(address: str, client: openai.OpenAI) -> None:
    """Left out, unless they are asked for."""
    (pad,) = post(address, "/tokenize", {"prompt": "<pad>", "add_special_tokens": False})["tokens"]
    for skip, text in ((True, ""), (False, "<pad><pad>")):
        body = {"skip_special_tokens": skip, "logit_bias": {str(pad): 100}}
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=2, temperature=0, extra_body=body)
        assert answer.choices[0].text == text


def test_load_through_both_doors(stack: CheckedStack, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`moonpool bench serve` at the conductor and at the gateway: every request is answered and timed."""
    for target in (stack.address, f"http://{address}"):
        options = BenchServeOptions(
            address=target, model=stack.plan.model, requests=6, rate=100.0, warmup=1, seed=3, as_json=True,
            prompt_tokens=40, shared_tokens=16, conversations=2, output_tokens=5,
        )  # fmt: skip
        assert run_serve(options) == 0
        summary = json.loads(capsys.readouterr().out)["summary"]
        assert (summary["requests"], summary["errors"]) == (5, {})
        assert summary["goodput_per_s"] == summary["requests_per_s"] > 0
        assert summary["ttft_s"]["p50"] <= summary["e2e_s"]["p50"]


def test_where_the_time_went(stack: CheckedStack, address: str, client: openai.OpenAI) -> None:
    """What the page shows of a request: measured steps of the prompt, and times of tokens; and of the cluster."""
    prompt = tokens(100, "page")
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
    name = raw.headers["x-request-id"]
    found = get(address, f"/moonpool/requests/{name}")
    line, usage = found["timeline"], raw.parse().usage
    assert usage is not None
    assert line["usage"]["completion_tokens"] == usage.completion_tokens
    assert [chunk["tokens"] for chunk in line["chunks"]] == [64, 36]  # --max-num-batched-tokens
    assert line["timing"]["ttft_s"] <= line["timing"]["e2e_s"]
    names = [each["name"] for each in found["phases"] if each["name"] != "stream"]  # which may be told later
    assert names == ["place", "queue", "chunk", "chunk", "steps"]
    begins = [each["begin_s"] for each in found["phases"] if each["name"] in names]
    assert begins == sorted(begins)
    with Client(stack.address) as sdk:  # a gateway may know what was a second ago
        assert sdk.cluster_state().recent.last[0].request_id == name
    (store,) = [each for each in get(address, "/moonpool/state")["instances"] if each["kind"] == "kvstore"]
    assert [tier["name"] for tier in store["tiers"]] == ["dram", "ssd"]


def test_pasted_command(address: str) -> None:
    """What `moonpool serve` prints, in a shell."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    done = subprocess.run(
        ["sh", "-c", curl_line(f"http://{address}/", needs_key=False)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 64


def test_refusals(client: openai.OpenAI) -> None:
    """Typed errors of OpenAI's client, with the conductor's words."""
    with pytest.raises(openai.NotFoundError, match="only 'tiny-llama' is served"):
        client.chat.completions.create(model="gpt", messages=TURNS)
    with pytest.raises(openai.BadRequestError, match="top_p: must be in"):
        client.chat.completions.create(model=MODEL, messages=TURNS, top_p=2)
    with pytest.raises(openai.BadRequestError, match="the prompt has"):
        client.completions.create(model=MODEL, prompt=[7] * 4096)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=TURNS, extra_body={"slo": {"ttft_s": 1e-9}})
    assert caught.value.code == "ttft_slo"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_client_that_leaves(stack: CheckedStack, address: str) -> None:
    """While it waits for the whole: nothing is held anywhere afterwards."""
    body = json.dumps({"messages": TURNS, "max_tokens": 1000, "ignore_eos": True})
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        wait_busy(stack.address, "decode-0", REST_TIMEOUT_S)
    wait_at_rest(stack.address, REST_TIMEOUT_S)


def test_trace_reaches_the_conductor(stack: CheckedStack, client: openai.OpenAI) -> None:
    """Its span of the request has the client's trace."""
    assert stack.plan.spans_dir is not None
    spans = stack.plan.spans_dir / "conductor.jsonl"
    client.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=1, extra_headers={"traceparent": TRACE})
    while TRACE not in spans.read_text():  # written with a later event; the test's timeout bounds it
        client.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=1)
    assert spans.read_text().count(TRACE) == 1


def post(address: str, path: str, body: object) -> dict[str, Any]:
    """The answer of a POST that succeeds."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answered = connection.getresponse()
        assert answered.status == 200, answered.read()
        found: dict[str, Any] = json.loads(answered.read())
        return found
    finally:
        connection.close()


def get(address: str, path: str) -> dict[str, Any]:
    """The answer of a GET that succeeds."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answered:
        found: dict[str, Any] = json.load(answered)
    return found


def test_log_probabilities_of_plain_completions(client: openai.OpenAI, reference: Reference) -> None:
    prompt, how = tokens(30, "scores over http"), {"max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(model=MODEL, prompt=prompt, extra_body={**how, "prompt_logprobs": 1})
    [choice] = whole.choices
    assert choice.logprobs is not None
    expected = reference.logits(prompt).log_softmax(-1)
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] == pytest.approx(float(expected[-1].max()), abs=LOGPROB_TOLERANCE)
    found = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert found[0] is None
    for position, token in enumerate(prompt[1:]):
        value = float(expected[position, token])
        assert found[position + 1][str(token)]["logprob"] == pytest.approx(value, abs=LOGPROB_TOLERANCE)
    told: list[float] = []
    for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True, extra_body=how):
        scores = chunk.choices[0].logprobs
        told += (scores.token_logprobs or []) if scores is not None else []
    assert told == pytest.approx(choice.logprobs.token_logprobs, abs=LOGPROB_TOLERANCE)


def test_a_chat_that_follows_a_schema(client: openai.OpenAI, stack: CheckedStack) -> None:
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "an object, please"}],
        max_tokens=200,
        seed=7,
        n=2,
        logprobs=True,
        top_logprobs=1,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    )
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(each.token for each in choice.logprobs.content).startswith(choice.message.content or "-")
    with Client(stack.address) as sdk:
        how = SamplingParams(max_tokens=200, seed=7, n=2, response_format="json_schema", grammar=json.dumps(SCHEMA))
        same = sdk.generate(messages=[{"role": "user", "content": "an object, please"}], sampling=how)
    assert [choice.text for choice in same.choices] == [choice.message.content for choice in whole.choices]


async def test_answers_follow_schemas_of_every_kind(aio: openai.AsyncOpenAI) -> None:
    """What another hand's validator says of fifty answers, all asked for at once."""

    async def answered(name: str, schema: Schema) -> str:
        """What is wrong with the answer; "" = nothing."""
        whole = await aio.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": name}],
            max_tokens=400,
            seed=7,
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": dict(schema)}},
        )
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        text = whole.choices[0].message.content or ""
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        return f"{name}: {text}: {errors}" if errors else ""

    assert len(SCHEMAS) == 50
    wrong = await asyncio.gather(*(answered(name, schema) for name, schema in SCHEMAS))
    assert [text for text in wrong if text] == []


def test_a_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "objec"}}},
        )
    assert caught.value.param == "response_format"
