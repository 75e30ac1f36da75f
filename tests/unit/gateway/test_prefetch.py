"""Prompts that are announced: what reaches the conductor is what the requests themselves would bring."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, PLAIN, TURNS, Answers, answering

PATH = "/v1/prefetch"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}
PROMPT_FIELDS = "tenant", "model", "cache_salt", "text", "tokens", "chat"


def conductor(prompts: int = 0) -> FakeConductor:
    """A conductor that finds so many prompts with blocks."""
    fake = FakeConductor()
    fake.answers["AnnouncePromptsRequest"] = pb.AnnouncePromptsResponse(prompts=prompts)
    return fake


def announced(gateway: Answers) -> pb.AnnouncePromptsRequest:
    """The one announcement that has come to the conductor."""
    (request,) = [asked for asked in gateway.fake.asked if isinstance(asked, pb.AnnouncePromptsRequest)]
    return request


def of_prompt(request: pb.GenerateRequest) -> list[tuple[str, object]]:
    """The fields of a request on which the prompt's KV depends."""
    return [(field.name, value) for field, value in request.ListFields() if field.name in PROMPT_FIELDS]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS, "temperature": 0, "max_tokens": 5}),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "tool_choice": "none", "cache_salt": "s"}),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "chat_template_kwargs": {"a": 1}}),
        (CHAT, {"messages": TURNS, "add_special_tokens": True}),
        (CHAT, {"messages": [*TURNS, {"role": "assistant", "content": "so"}], "continue_final_message": True}),
        (PLAIN, {"prompt": "a b c", "response_format": {"type": "json_object"}, "slo": {"ttft_s": 1.0}}),
        (PLAIN, {"prompt": "a b c", "add_special_tokens": False}),
        (PLAIN, {"prompt": ["a", "b"], "model": "tiny"}),
        (PLAIN, {"prompt": [[1, 2], [3]], "n": 2}),
        (PLAIN, {"prompt_token_ids": [1, 2, 3]}),
    ],
)
async def test_a_body_is_announced_as_it_will_be_sent(path: str, body: dict[str, Any]) -> None:
    async with answering(conductor()) as gateway:
        answered = await gateway.http.post(PATH, json={"requests": [body], "within_s": 30})
        assert answered.status_code == 200, answered.text
        assert "warning" not in answered.headers
        request = announced(gateway)
        assert request.within_s == 30
        assert not any(prompt.HasField("slo") or prompt.sampling.response_format for prompt in request.requests)
        await gateway.http.post(path, json=body)
        assert [of_prompt(prompt) for prompt in request.requests] == [
            of_prompt(prompt) for prompt in gateway.fake.requests
        ]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": TURNS, "tools": [TOOL]}),
        (PLAIN, {"prompt": ["a", "b"], "cache_salt": "s"}),
        ("/v1/messages", {**HELLO, "system": "Be brief.", "tools": [MESSAGES_TOOL], "model": "tiny"}),
        ("/v1/messages", {**HELLO, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}}),
        ("/v1/messages", {**HELLO, "thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}}),
        ("/v1/responses", {"input": "hello", "instructions": "Be brief.", "cache_salt": "s"}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hello"}], "store": False,
                           "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}),
    ],
)  # fmt: skip
async def test_a_line_of_a_batch_is_announced_as_its_endpoint_will_send_it(url: str, body: dict[str, Any]) -> None:
    async with answering(conductor()) as gateway:
        line = {"custom_id": "1", "method": "POST", "url": url, "body": body}
        answered = await gateway.http.post(PATH, json={"requests": [line], "within_s": 30})
        assert answered.status_code == 200, answered.text
        assert "warning" not in answered.headers
        await gateway.http.post(url, json=body)
        assert [of_prompt(request) for request in announced(gateway).requests] == [
            of_prompt(request) for request in gateway.fake.requests
        ]
        assert gateway.fake.requests


async def test_a_response_is_announced_with_what_came_before() -> None:
    async with answering(conductor()) as gateway:
        first = await gateway.http.post("/v1/responses", json={"input": "hello"})
        body = {"input": "and now?", "previous_response_id": first.json()["id"]}
        line = {"url": "/v1/responses", "body": body}
        assert (await gateway.http.post(PATH, json={"requests": [line], "within_s": 30})).status_code == 200
        await gateway.http.post("/v1/responses", json=body)
        (coming,) = announced(gateway).requests
        assert of_prompt(coming) == of_prompt(gateway.fake.requests[-1])
        assert len(coming.chat.messages) == 3


async def test_the_answer_tells_how_many_prompts_have_blocks() -> None:
    async with answering(conductor(2)) as gateway:
        bodies = [{"messages": TURNS}, {"prompt": ["a", "b"]}]
        answered = await gateway.http.post(PATH, json={"requests": bodies, "within_s": 0})
        assert answered.json() == {"object": "prefetch", "prompts": 3, "accepted": 2}
        assert announced(gateway).within_s == 0


async def test_what_will_not_come_is_told_without_a_time() -> None:
    async with answering(conductor()) as gateway:
        answered = await gateway.http.post(PATH, json={"requests": [{"prompt": "a"}], "cancel": True})
        assert answered.status_code == 200
        assert not announced(gateway).HasField("within_s")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"requests": [{"prompt": "a"}]}, "within_s"),
        ({"requests": [{"prompt": "a"}], "within_s": 1, "cancel": True}, "within_s"),
        ({"requests": [{"prompt": "a"}], "within_s": "soon"}, "within_s"),
        ({"within_s": 1}, "requests"),
        ({"requests": [], "within_s": 1}, "requests"),
        ({"requests": [{"prompt": ["a"] * 1025}] * 2, "within_s": 1}, "requests"),
        ({"requests": ["a"], "within_s": 1}, "requests.0"),
        ({"requests": [{"prompt": "a"}, {}], "within_s": 1}, "requests.1.prompt"),
        ({"requests": [{"prompt": "a"}, {"messages": [{"role": "x"}]}], "within_s": 1}, "requests.1.messages.0.role"),
        ({"requests": [{"messages": TURNS, "functions": [1]}], "within_s": 1}, "requests.0.functions"),
        ({"requests": [{"prompt": "a", "model": "other"}], "within_s": 1}, "requests.0.model"),
        ({"requests": [{"messages": [{"role": "cache", "content": "cache_id=c"}, *TURNS]}], "within_s": 1},
         "requests.0.messages.0"),
        ({"requests": [{"url": "/v1/embeddings", "body": {"input": "a"}}], "within_s": 1}, "requests.0"),
        ({"requests": [{"url": ["/v1/messages"], "body": HELLO}], "within_s": 1}, "requests.0"),
        ({"requests": [{"url": "/v1/messages"}], "within_s": 1}, "requests.0.body"),
        ({"requests": [{"url": "/v1/messages", "body": {**HELLO, "messages": []}}], "within_s": 1},
         "requests.0.body.messages"),
        ({"requests": [{"url": "/v1/responses", "body": {"input": "a", "previous_response_id": "resp_x"}}],
          "within_s": 1}, "requests.0.body.previous_response_id"),
    ],
)  # fmt: skip
async def test_wrong_announcements_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    async with answering(conductor(), served_model_name="tiny") as gateway:
        refused = await gateway.http.post(PATH, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert not gateway.fake.asked


async def test_each_prompt_is_the_tenants_and_counts_as_a_request(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"sha256:{hash_key('secret')} rpm=4 ann\n")
    async with answering(conductor(), api_keys=str(tmp_path / "keys")) as gateway:
        body = {"requests": [{"prompt": ["a", "b", "c", "d", "e"]}], "within_s": 1}
        head = {"authorization": "Bearer secret"}
        statuses = [(await gateway.http.post(PATH, json=body, headers=head)).status_code for _ in range(2)]
        unknown = await gateway.http.post(PATH, json=body)
        assert (statuses, unknown.status_code) == ([200, 429], 401)
        assert announced(gateway).tenant == "ann"
