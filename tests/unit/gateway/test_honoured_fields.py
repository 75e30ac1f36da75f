"""Every field that is said to be honoured is: with it, the conductor's request or the response is another one."""

import re
from typing import Any

import pytest

from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.endpoints.anthropic_messages import MessagesBody
from moonpool.gateway.endpoints.openai_chat import ChatBody
from moonpool.gateway.endpoints.openai_completions import CompletionBody
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.serving.body import Body
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, PLAIN, TURNS, answering

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {**FUNCTION, "name": "g"}}]
FLAT = [{"type": "function", **FUNCTION}, {"type": "function", **FUNCTION, "name": "g"}]
BLOCKS = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
GBNF = 'root ::= "a"'
ANSWERED = [*TURNS, {"role": "assistant", "content": "b"}]
Given = tuple[Any, dict[str, Any]]
"""The value of a field, and what else the body has with and without the field."""
SAMPLING: dict[str, Given] = {
    "model": ("tiny", {}),
    "slo": ({"ttft_s": 9.0}, {}),
    "priority": (3, {}),
    "expected_output_tokens": (100, {}),
    "nvext": ({"agent_hints": {"osl": 100}}, {}),
    "cache_salt": ("s", {}),
    "session": ({"id": "s"}, {}),
    "temperature": (0.3, {}),
    "top_p": (0.4, {}),
    "top_k": (5, {}),
}
VLLM: dict[str, Given] = {
    "repetition_penalty": (1.2, {}),
    "seed": (5, {}),
    "stop": (["x"], {}),
    "ignore_eos": (True, {}),
    "skip_special_tokens": (False, {}),
    "logit_bias": ({"5": 1}, {}),
    "structured_outputs": ({"regex": "a+"}, {}),
}
PROMPT_CACHE: dict[str, Given] = {
    "prompt_cache_key": ("k", {}),
    "prompt_cache_options": ({"ttl": "30m"}, {}),
    "prompt_cache_retention": ("24h", {}),
}
OPENAI: dict[str, Given] = {
    **SAMPLING,
    **PROMPT_CACHE,
    **VLLM,
    "session_id": ("s", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "max_tokens": (7, {}),
    "min_p": (0.1, {}),
    "frequency_penalty": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "n": (2, {}),
    "min_tokens": (2, {}),
    "stop_token_ids": ([7], {}),
    "bad_words": (["hi"], {}),
    "prompt_logprobs": (1, {}),
    "return_token_ids": (True, {}),
    "response_format": ({"type": "json_object"}, {}),
    "guided_json": (SCHEMA, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": ('start: "a"', {}),
    "guided_whitespace_pattern": (" ?", {"guided_json": SCHEMA}),
    "regex": ("a", {}),
    "ebnf": (GBNF, {}),
    "structural_tag": ({"format": {"type": "const_string", "value": "a"}}, {}),
    "grammar": (GBNF, {}),
    "json_schema": (SCHEMA, {}),
}
FIELDS: dict[str, tuple[type[Body], dict[str, Any], dict[str, Given]]] = {
    CHAT: (
        ChatBody,
        {"messages": TURNS},
        {
            **OPENAI,
            "messages": (ANSWERED + TURNS, {}),
            "max_completion_tokens": (7, {}),
            "logprobs": (True, {}),
            "top_logprobs": (2, {"logprobs": True}),
            "reasoning_effort": ("low", {}),
            "tools": (TOOLS, {}),
            "tool_choice": ("required", {"tools": TOOLS}),
            "parallel_tool_calls": (False, {"tools": TOOLS, "tool_choice": "required"}),
            "add_special_tokens": (True, {}),
            "continue_final_message": (True, {"messages": ANSWERED, "add_generation_prompt": False}),
            "add_generation_prompt": (True, {"messages": ANSWERED, "continue_final_message": True}),
            "chat_template_kwargs": ({"enable_thinking": False}, {}),
            "prompt_token_ids": ([5, 6], {}),
        },
    ),
    PLAIN: (
        CompletionBody,
        {"prompt": "a"},
        {
            **OPENAI,
            "prompt": ("b", {}),
            "logprobs": (2, {}),
            "echo": (True, {}),
            "add_special_tokens": (False, {}),
            "prompt_token_ids": ([5, 6], {}),
        },
    ),
    RESPONSES: (
        ResponsesBody,
        {"input": "a"},
        {
            **SAMPLING,
            **PROMPT_CACHE,
            **VLLM,
            "stream": (True, {}),
            "input": ("b", {}),
            "instructions": ("i", {}),
            "max_output_tokens": (7, {}),
            "metadata": ({"a": "b"}, {}),
            "store": (False, {}),
            "background": (True, {}),
            "previous_response_id": ("resp_none", {}),
            "conversation": ("conv_none", {}),
            "text": ({"format": {"type": "json_object"}}, {}),
            "include": (["message.output_text.logprobs"], {}),
            "top_logprobs": (2, {}),
            "reasoning": ({"effort": "low"}, {}),
            "tools": (FLAT, {}),
            "tool_choice": ("required", {"tools": FLAT}),
            "parallel_tool_calls": (False, {"tools": FLAT, "tool_choice": "required"}),
        },
    ),
    MESSAGES: (
        MessagesBody,
        {"messages": TURNS, "max_tokens": 5},
        {
            **SAMPLING,
            "stream": (True, {}),
            "messages": (ANSWERED + TURNS, {}),
            "max_tokens": (7, {}),
            "system": ("s", {}),
            "stop_sequences": (["x"], {}),
            "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}}, {}),
            "tools": (BLOCKS, {}),
            "tool_choice": ({"type": "any"}, {"tools": BLOCKS}),
            "thinking": ({"type": "disabled"}, {}),
            "cache_control": ({"type": "ephemeral"}, {}),
        },
    ),
}
THINKING = {"thinking_token_budget", "reasoning_budget"}
WITHOUT_EFFECT = {
    CHAT: THINKING,
    PLAIN: {*THINKING, "reasoning_effort"},
    RESPONSES: {"stream_options"},  # a stream has the usage anyway
}
"""Fields that are known for their members, none of which changes anything, or count for models that think."""


async def outcome(path: str, body: dict[str, Any]) -> tuple[list[bytes], str]:
    """What comes to the conductor and back, without what differs from request to request."""
    fake = FakeConductor(lambda request: answer([9, 8, 7], request_id="r"))
    async with answering(fake) as gateway:
        response = await gateway.http.post(path, json=body)
    for request in fake.requests:
        request.request_id = ""
        if "seed" not in body:
            request.sampling.ClearField("seed")
    text = re.sub(r'"(id|created|created_at)":("[^"]*"|\d+)', "", response.text)
    return [pb.GenerateRequest.SerializeToString(sent, deterministic=True) for sent in fake.requests], text


@pytest.mark.parametrize("path", FIELDS)
async def test_every_honoured_field_has_an_effect(path: str) -> None:
    _, least, given = FIELDS[path]
    for name, (value, beside) in given.items():
        body = {**least, **beside}
        assert await outcome(path, body) != await outcome(path, {**body, name: value}), name


@pytest.mark.parametrize("path", FIELDS)
def test_every_honoured_field_is_tried(path: str) -> None:
    body, _, given = FIELDS[path]
    assert body.contract().honoured == given.keys() | WITHOUT_EFFECT.get(path, set())
