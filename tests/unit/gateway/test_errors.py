"""What is refused, by name, and what is only warned of."""

from typing import Any

import httpx2
import pytest

from moonpool.base.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    StreamBroken,
    Unavailable,
    Unsupported,
)
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import kv_pb2

from .fakes import CHAT, MODEL_TOKENS, PLAIN, TURNS, Answers, answering

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def error(answered: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of an answer with that status, which has OpenAI's fields."""
    assert answered.status_code == status, answered.text
    found: dict[str, Any] = answered.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", True),
        ("functions", [{"name": "f"}]),
        ("echo", True),
        ("best_of", 4),
        ("modalities", ["audio"]),
    ],
)
async def test_not_built(gateway: Answers, field: str, value: object) -> None:
    """Refused by its name, not ignored; nothing is asked of the conductor."""
    refused = error(await gateway.chat(**{field: value}), 400)
    assert refused["param"] == field
    assert refused["message"] == f"{field}: is not supported yet"
    assert gateway.fake.requests == []


async def test_asking_for_nothing_is_fine(gateway: Answers) -> None:
    """Fields that are not built may be there with the value that changes nothing."""
    harmless = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": [], "echo": None}
    answered = await gateway.chat(**harmless)
    assert answered.status_code == 200
    assert "warning" not in answered.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [*TURNS, {"role": "assistant", "tool_calls": [TOOL]}]}, "messages.1.tool_calls.0.id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call"),
        ({"messages": TURNS, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"messages": TURNS, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"messages": TURNS, "tools": [TOOL, TOOL]}, "tools"),
        ({"prompt_token_ids": [1], "tools": [TOOL]}, "tools"),
        ({"messages": TURNS, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"messages": TURNS, "tool_choice": "required"}, "tool_choice"),
        ({"messages": TURNS, "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        (
            {"messages": TURNS, "tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"messages": TURNS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": TURNS, "prompt_token_ids": [1]}, "messages"),
        ({"messages": TURNS, "temperature": "1"}, "temperature"),
        ({"messages": TURNS, "temperature": True}, "temperature"),
        ({"messages": TURNS, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": TURNS, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": TURNS, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": TURNS, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": TURNS, "n": True}, "n"),
        ({"messages": TURNS, "seed": -2}, "seed"),
        ({"messages": TURNS, "seed": 2**64}, "seed"),
        ({"messages": TURNS, "max_tokens": 2**40}, "max_tokens"),
        ({"messages": TURNS, "stop": [1]}, "stop.0"),
        ({"messages": TURNS, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": TURNS, "slo": {"ttft_s": "fast"}}, "slo.ttft_s"),
        ({"messages": TURNS, "priority": "high"}, "priority"),
    ],
)
async def test_wrong_fields_of_a_chat(gateway: Answers, body: dict[str, Any], param: str) -> None:
    assert error(await gateway.http.post(CHAT, json=body), 400)["param"] == param
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [5]}, "messages.0: must be an object"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0: must be an object"),
        ({"messages": TURNS, "slo": 5}, "slo: must be an object"),
        ({"messages": TURNS, "tools": [{"type": "function", "function": []}]}, "tools.0.function: must be an object"),
    ],
)
async def test_errors_name_no_class(gateway: Answers, body: dict[str, Any], message: str) -> None:
    assert error(await gateway.http.post(CHAT, json=body), 400)["message"] == message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 2049}, "prompt"),
        ({"prompt": ["x"] * 64, "n": 33}, "n"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt_token_ids": ["x"]}, "prompt_token_ids.0"),
        ({"prompt_token_ids": [2**40]}, "prompt_token_ids"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
    ],
)
async def test_wrong_fields_of_a_completion(gateway: Answers, body: dict[str, Any], param: str) -> None:
    assert error(await gateway.http.post(PLAIN, json=body), 400)["param"] == param
    assert gateway.fake.requests == []


async def test_unknown_fields_are_told(gateway: Answers) -> None:
    """They come from the client: what is no plain name is not repeated in a header."""
    answered = await gateway.chat(user="ann", **{"a\r\nset-cookie: x": 1})
    assert answered.status_code == 200
    assert answered.headers["warning"] == '299 moonpool "ignored fields: user, ?"'
    assert "set-cookie" not in answered.headers
    many = await gateway.chat(**{f"field_{number}": 1 for number in range(1000)})
    assert many.headers["warning"].endswith('field_15, ..."')


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b'{"messages": "\xff\xfe"}', "invalid JSON"),
        (b'{"x": "\\ud800"}', "invalid JSON"),
        (b"[" * 1_000, "recursion limit"),
        (b'{"a":' * 1_000, "recursion limit"),
        (b'{"temperature": NaN, "messages": []}', "finite"),
        (b'{"seed": 1' + b"0" * 100_000 + b"}", "out of range"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"messages":[' + b'{"role":"user","content":""},' * 9_000 + b"{}]}", "at most 8192 objects"),
        (b'{"prompt_token_ids":[' + b"1," * 300_000 + b"1]}", "at most 131072 items"),
    ],
    ids=range(12),
)
async def test_what_is_no_request(gateway: Answers, raw: bytes, says: str) -> None:
    answered = await gateway.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert says in error(answered, 400)["message"]


async def test_other_types_are_refused(gateway: Answers) -> None:
    """Among them what a web page of another site may send without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused = await gateway.http.post(CHAT, content=b"{}", headers={"content-type": kind} if kind else {})
        assert error(refused, 415)["param"] == "content-type"


async def test_large_bodies() -> None:
    """Whether the head says the size or not; and the rest is not read: the connection is closed."""

    async def drops() -> Any:
        for _ in range(100):
            yield b" " * 100

    async with answering(FakeConductor(), max_body_bytes=1024) as gateway:
        kind = {"content-type": "application/json"}
        for content in (b" " * 1025, drops()):
            refused = await gateway.http.post(CHAT, content=content, headers=kind)
            assert error(refused, 413)["code"] == "request_too_large"
            assert refused.headers["connection"] == "close"
        assert gateway.fake.requests == []


OVERLOADED = Overloaded(
    "too slow", reason="ttft_slo", predicted_ttft_s=9.5, predicted_tbt_s=float("inf"), slo_s=1.0, retry_after_s=2.25
)


async def test_overload_tells_why_and_when() -> None:
    async with answering(FakeConductor(lambda _: [OVERLOADED])) as gateway:
        for stream in (False, True):
            answered = await gateway.chat(stream=stream)
            assert (answered.headers["retry-after"], answered.headers["retry-after-ms"]) == ("3", "2250")
            assert error(answered, 429) == {
                "message": "too slow",
                "type": "rate_limit_error",
                "param": None,
                "code": "ttft_slo",
                "reason": "ttft_slo",
                "predicted_ttft_s": 9.5,
                "predicted_tbt_s": None,
                "slo_s": 1.0,
                "retry_after_s": 2.25,
                "help": "docs/errors.md#ttft_slo",
            }
        assert await gateway.metric('moonpool_gateway_refused_total{code="ttft_slo",status="429"}') == "2.0"


@pytest.mark.parametrize(
    ("raised", "status", "param"),
    [
        (InvalidRequest("sampling.top_p", "no"), 400, "top_p"),
        (InvalidRequest("token_ids", "no"), 400, "prompt_token_ids"),
        (InvalidRequest("messages", "no"), 400, "messages"),
        (InvalidRequest("model", "only 'tiny' is served"), 404, "model"),
        (NotFound("no"), 404, None),
        (Unsupported("no"), 400, None),
        (Unavailable("no engines"), 503, None),
        (DeadlineExceeded("no"), 504, None),
        (StreamBroken("no"), 500, None),
        (Internal("no"), 500, None),
    ],
)
async def test_errors_of_the_conductor(raised: Exception, status: int, param: str | None) -> None:
    async with answering(FakeConductor(lambda _: [raised])) as gateway:
        assert error(await gateway.chat(), status)["param"] == param
        refused = await gateway.plain(prompt="x", stream=True)
        assert error(refused, status)["param"] == param
        assert ("retry-after" in refused.headers) == (status == 503)


@pytest.mark.parametrize(
    ("raised", "anchor"),
    [
        (Overloaded("full", reason="no_decode_room", retry_after_s=1.0), "no_decode_room"),
        (DeadlineExceeded("the request's 600 s are over; the request waited for decode-0"), "waited"),
        (DeadlineExceeded("no"), "timeout"),
        (InvalidRequest("prompt", "prompt and answer together may have 512 tokens"), "too-long"),
        (InvalidRequest("prompt", "what a body says, " * 1000 + "no API key was given"), "invalid_value"),
    ],
)
async def test_an_error_names_the_place_of_the_page_that_says_what_to_do(raised: Exception, anchor: str) -> None:
    async with answering(FakeConductor(lambda _: [raised])) as gateway:
        for answered in (
            await gateway.chat(),
            await gateway.http.post("/v1/messages", json={"messages": TURNS, "max_tokens": 2}),
        ):
            assert answered.json()["error"]["help"] == f"docs/errors.md#{anchor}"


async def test_a_stream_that_breaks_says_so() -> None:
    """The status has been sent: the last event is the error, and no [DONE] pretends an end."""
    async with answering(FakeConductor(lambda _: [*answer()[:2], Internal("lost")])) as gateway:
        answered = await gateway.chat(stream=True)
        assert answered.status_code == 200
        last = answered.text.split("\n\n")[-2]
        assert last.startswith('data: {"error":{"message":"lost"')
        assert "[DONE]" not in answered.text
        assert (
            await gateway.metric('vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"}')
            == "1.0"
        )


async def test_what_the_cluster_ended_is_no_answer() -> None:
    """A request that ended because the cluster stops has an answer that is not whole."""
    reason = kv_pb2.FINISH_REASON_CANCELLED
    async with answering(FakeConductor(lambda _: answer(reason=reason))) as gateway:
        assert "stopping" in error(await gateway.chat(), 503)["message"]
        assert '{"error":' in (await gateway.chat(stream=True)).text


async def test_without_instances() -> None:
    async with answering(FakeConductor()) as gateway:
        gateway.fake.state.ready = False
        assert error(await gateway.http.get("/health"), 503)["code"] == "unavailable"
    async with answering(FakeConductor()) as gateway:
        gateway.fake.state.ClearField("model")
        for answered in (await gateway.chat(), await gateway.http.get("/v1/models"), await gateway.http.get("/health")):
            assert error(answered, 503)["message"] == "no prefill and no decode instance has joined"


async def test_health(gateway: Answers) -> None:
    assert (await gateway.http.get("/health")).json() == {"status": "ok", "model": "tiny"}


async def test_tokenizing_bounds(gateway: Answers) -> None:
    """Too long, unknown tokens, two forms at once, and a model that this gateway's tokenizer is not of."""
    long = "word " * (MODEL_TOKENS + 50)
    for body, param in (
        ({"prompt": long}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"messages": [{"role": "user", "content": long}]}, "messages"),
        ({"prompt": "x", "messages": TURNS}, "prompt"),
        ({}, "prompt"),
    ):
        assert error(await gateway.http.post("/tokenize", json=body), 400)["param"] == param
    for tokens in ([-1], [4096], [2**70]):
        assert error(await gateway.http.post("/detokenize", json={"tokens": tokens}), 400)["param"] == "tokens"


async def test_another_models_tokenizer_is_not_used() -> None:
    async with answering(FakeConductor()) as gateway:
        gateway.fake.state.model.name = "other"
        assert "'other'" in error(await gateway.http.post("/tokenize", json={"prompt": "x"}), 500)["message"]


async def test_errors_do_not_repeat_a_long_request(gateway: Answers) -> None:
    part = {"type": "x" * 100_000}
    answered = await gateway.chat(messages=[{"role": "user", "content": [part]}])
    assert "xxx" in error(answered, 400)["message"]
    assert len(answered.content) < 5000
