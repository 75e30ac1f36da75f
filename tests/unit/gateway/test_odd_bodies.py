"""Bodies of each endpoint with a part that is not what it should be: no shape, size or text of a part is an error of
the gateway's own."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.client.testing import FakeConductor
from moonpool.gateway.routes import ROUTES
from tests.unit.gateway.fakes import MODEL, answering

Place = tuple[str | int, ...]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c", "content": "result"},
]
SAMPLING = {
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 2, "seed": 1, "stop": ["z"],
    "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3], "priority": 1,
    "bad_words": ["foo"], "min_tokens": 1, "ignore_eos": True, "metadata": {"k": "v"}, "cache_salt": "s",
    "stream_options": {"include_usage": True}, "prompt_cache_options": {"ttl": "5m"}, "session": {"id": "s"},
}  # fmt: skip
CHAT = {"messages": TURNS, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}
SCORED = {"messages": TURNS, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": False}}
SHAPED = {"messages": TURNS, "response_format": {"type": "json_schema", "json_schema": FORMAT}, "stream": True}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto", "text": {"format": FORMAT, "verbosity": "low"}, "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": False, "metadata": {"a": "b"},
}  # fmt: skip
MESSAGES = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "o"}]}],
        },
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"}, "stop_sequences": ["q"], "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
}  # fmt: skip
OLLAMA = {
    "model": MODEL,
    "messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}],
    "tools": [TOOL], "format": SCHEMA, "options": {"num_predict": 2, "seed": 3, "stop": ["a"]}, "keep_alive": "5m",
}  # fmt: skip
SCORES = {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}
CACHE = {"model": MODEL, "messages": TURNS, "tools": [TOOL], "name": "n", "metadata": {"a": "b"}, "ttl": 60}
ITEMS = {"items": [{"role": "user", "content": "x"}], "metadata": {"a": "b"}}
BATCH = {
    "input_file_id": "file-x", "endpoint": "/v1/embeddings", "completion_window": "24h",
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", SCORED),
    ("/v1/chat/completions", SHAPED),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2, 3]], "stream": True, "n": 2}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses/input_tokens", RESPONSE),
    ("/v1/conversations", ITEMS),
    ("/v1/conversations/{name}", {"metadata": {"a": "b"}}),
    ("/v1/conversations/{name}/items", ITEMS),
    ("/v1/embeddings", {"input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 8}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/api/chat", OLLAMA),
    ("/api/generate", {"model": MODEL, "prompt": "x", "system": "s", "format": "json", "options": {}, "context": [1]}),
    ("/api/embed", {"model": MODEL, "input": ["a"], "truncate": True, "dimensions": 4}),
    ("/api/show", {"model": MODEL, "verbose": True}),
    ("/rerank", SCORES),
    ("/v1/rerank", SCORES),
    ("/score", {"text_1": "a", "text_2": ["b"]}),
    ("/v1/score", {"text_1": ["a"], "text_2": ["b"]}),
    ("/classify", {"input": ["a"]}),
    ("/v2/rerank", SCORES),
    ("/v1/classify", {"input": ["a"]}),
    ("/pooling", {"input": ["a"]}),
    ("/v1/pooling", {"input": ["a"]}),
    ("/v1/prefetch", {"messages": TURNS, "tools": [TOOL]}),
    ("/v1/batches", BATCH),
    ("/tokenize", {"messages": TURNS, "tools": [TOOL], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/caching", CACHE),
    ("/v1/caching/refs/tags", {"tag": "t", "cache_id": "cache-x"}),
    ("/v1/caching/{name}", {"metadata": {"a": "b"}, "ttl": 5}),
    ("/moonpool/sessions/{name:path}", {"paused": True, "ttl_s": 5}),
    ("/moonpool/markdown", {"text": "# a $x$ **b**\n|a|b|\n|-|-|\n|1|2|"}),
]
NO_BODIES = {"/ping", "/v1/responses/{name}/cancel", "/v1/files", "/v1/batches/{name}/cancel"}
ODD: list[Any] = [
    None, True, False, 0, -1, 1 << 31, 1 << 63, 1 << 64, 10**400, 1e308, 5e-324, 0.5, float("nan"), float("inf"),
    "", "a", "\ud800", "\x00", "😀", "a" * 5000, "<|im_end|>", "../..", "{}", "null", "1" * 5000, "%s", "{{ 7 }}",
    "data:image/png;base64,", "file:///nowhere", "json_object", "required", "auto", "developer", "function",
    [], {}, [None], [[]], [{}], {"": ""}, ["a"] * 300, [[1, [2]]], [1 << 40], [0.1], {str(i): i for i in range(300)},
    {"type": "function"}, {"type": "image_url", "image_url": {"url": "data:,x"}}, {"$ref": "#"}, {"pattern": "("},
    {"type": ["object", None]}, {"enum": []}, {"minLength": 10**9}, {"anyOf": []}, {"type": {"type": "text"}},
]  # fmt: skip
NAMES = ["", "\ud800", "a" * 3000, "type", "name", "stream", "$ref", "content", "model", "n"]


def places(body: Any, place: Place = ()) -> Iterator[Place]:
    """Where the parts of a body lie."""
    yield place
    for step in body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ():
        yield from places(body[step], (*place, step))


def spoiled(body: Any, draws: random.Random) -> Any:
    """The body with one part that is odd, missing, more than once, or beside another name."""
    place, odd = draws.choice(list(places(body))), draws.choice(ODD)
    if not place:
        return odd
    body = copy.deepcopy(body)
    parent = body
    for step in place[:-1]:
        parent = parent[step]
    match draws.choice(["odd", "odd", "odd", "missing", "more"]):
        case "odd":
            parent[place[-1]] = odd
        case "missing":
            del parent[place[-1]]
        case "more" if isinstance(parent, dict):
            parent[draws.choice(NAMES)] = odd
        case "more":
            parent += parent[:1] * draws.choice([1, 3, 70])
    return body


async def send_spoiled(path: str, body: dict[str, Any], folder: Path, seed: int, count: int) -> None:
    print(f"seed {seed}")
    draws = random.Random(seed)
    (method,) = {row.method for row in ROUTES if row.path == path and row.method in ("POST", "PUT")}
    path = path.replace("{name}", "x").replace("{name:path}", "x")
    async with answering(FakeConductor(), tool_call_parser="hermes", batch_dir=str(folder)) as gateway:
        for _ in range(count):
            odd = body
            for _ in range(draws.choice([1, 1, 2, 3])):
                odd = spoiled(odd, draws)
            data = json.dumps(odd, ensure_ascii=draws.random() < 0.9).encode("utf-8", "surrogatepass")
            answered = await gateway.http.request(
                method, path, content=data, headers={"content-type": "application/json"}
            )
            assert answered.status_code != 500, (data[:2000], answered.text)


def test_each_endpoint_with_a_body_is_here() -> None:
    with_bodies = {row.path for row in ROUTES if row.method in ("POST", "PUT")}
    assert with_bodies == {path for path, _ in BODIES} | NO_BODIES


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path}-{at}" for at, (path, _) in enumerate(BODIES)])
async def test_odd_parts(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    await send_spoiled(path, body, tmp_path, 7, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path}-{at}" for at, (path, _) in enumerate(BODIES)])
async def test_many_odd_parts(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    await send_spoiled(path, body, tmp_path, random.randrange(1 << 32), 500)


@pytest.mark.parametrize("kind", [{"a": 1}, [], [[]]], ids=str)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": "x"}]}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ],
    ids=["responses", "messages"],
)
async def test_a_kind_that_is_no_text(path: str, body: Any, kind: Any) -> None:
    """Kinds are looked up, and an object or a list has no hash."""
    body = copy.deepcopy(body)
    where = body["input"] if path == "/v1/responses" else body["messages"][0]["content"]
    where[0]["type"] = kind
    async with answering(FakeConductor()) as gateway:
        answered = await gateway.http.post(path, json=body)
    assert answered.status_code == 400, answered.text


@pytest.mark.parametrize("field", ["ttl", "expired_at"])
async def test_a_time_that_no_float_can_have(field: str) -> None:
    async with answering(FakeConductor()) as gateway:
        answered = await gateway.http.put("/v1/caching/x", json={field: 10**400})
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, field)
