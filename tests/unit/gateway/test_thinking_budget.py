"""How long an answer may think, as each interface says it, reaches the conductor as a number and the model's marks."""

import json
from typing import Any

import pytest

from moonpool.client.testing import FakeConductor, answer

from .fakes import CHAT, PLAIN, answering
from .test_reasoning import ASK, texts

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MARKS = ["<think>", "</think>"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    PLAIN: {"prompt": "2 + 2?"},
    RESPONSES: {"input": "2 + 2?"},
    MESSAGES: {"messages": ASK, "max_tokens": 9},
}


async def sampling(path: str, **fields: Any) -> tuple[int | None, list[str], dict[str, Any]]:
    """What the conductor is asked: the budget, the marks, the variables of the chat template."""
    async with answering(FakeConductor(lambda _: answer([5], request_id="r")), texts()) as gateway:
        answered = await gateway.http.post(path, json={**LEAST[path], **fields})
        assert answered.status_code == 200, answered.text
        asked = gateway.fake.requests[-1]
    found = asked.sampling
    budget = found.thinking_budget if found.HasField("thinking_budget") else None
    return budget, list(found.thinking_marks), json.loads(asked.chat.template_kwargs or "{}")


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        (CHAT, {"thinking_token_budget": 17}, 17),
        (CHAT, {"thinking_token_budget": 0}, 0),
        (CHAT, {"reasoning_budget": 5}, 5),
        (CHAT, {"thinking_token_budget": 9, "reasoning_effort": "low"}, 9),
        (CHAT, {"reasoning_effort": "none"}, 0),
        (CHAT, {"reasoning_effort": "minimal"}, 512),
        (CHAT, {"reasoning_effort": "low"}, 2048),
        (PLAIN, {"thinking_token_budget": 17}, 17),
        (RESPONSES, {"reasoning": {"effort": "low"}}, 2048),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (MESSAGES, {"output_config": {"effort": "low"}}, 2048),
        (CHAT, {"thinking_token_budget": 9, "tools": TOOLS, "tool_choice": "required"}, 9),
    ],
)
async def test_a_budget_reaches_the_conductor(path: str, fields: dict[str, Any], budget: int) -> None:
    assert (await sampling(path, **fields))[:2] == (budget, MARKS)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"thinking_token_budget": -1}),
        (CHAT, {"thinking_token_budget": 2**40}),
        (CHAT, {"reasoning_effort": "medium"}),
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"thinking_token_budget": 9, "response_format": {"type": "json_object"}}),
        (RESPONSES, {"reasoning": {"effort": "xhigh"}}),
        (RESPONSES, {"reasoning": {"summary": "auto"}}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
    ],
)
async def test_there_is_no_budget_where_none_is_asked_for_or_no_thinking_comes(
    path: str, fields: dict[str, Any]
) -> None:
    assert (await sampling(path, **fields))[:2] == (None, [])


async def test_effort_is_a_variable_of_the_chat_template() -> None:
    assert (await sampling(CHAT, reasoning_effort="high"))[2] == {"reasoning_effort": "high"}
    assert (await sampling(CHAT, reasoning_effort="none"))[2] == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert (await sampling(CHAT, **given))[2] == {"reasoning_effort": "high"}
    assert (await sampling(RESPONSES, reasoning={"effort": "low"}))[2] == {"reasoning_effort": "low"}
    kwargs = (await sampling(MESSAGES, thinking={"type": "enabled"}, output_config={"effort": "low"}))[2]
    assert kwargs == {"reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"reasoning_effort": "heroic"}, "reasoning_effort"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (RESPONSES, {"reasoning": {"effort": 3}}, "reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
)
async def test_what_is_no_budget_is_refused(path: str, fields: dict[str, Any], place: str) -> None:
    async with answering(FakeConductor(lambda _: answer([5], request_id="r")), texts()) as gateway:
        refused = await gateway.http.post(path, json={**LEAST[path], **fields})
        assert refused.status_code == 400, refused.text
        assert place in refused.text


async def test_a_model_that_does_not_think_has_no_budget() -> None:
    async with answering(FakeConductor(lambda _: answer([5], request_id="r"))) as gateway:
        assert (await gateway.chat(thinking_token_budget=3)).status_code == 200
        assert not gateway.asked.sampling.HasField("thinking_budget")
