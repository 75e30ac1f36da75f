"""Histories of agents, in our own words and in the forms that the agents send: a conversation that began goes on."""

from typing import Any

import pytest

from .fakes import CHAT, Answers

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string"}},
}
READ = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
STREAM_OPTIONS = {"stream_options": {"include_usage": True}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": arguments}, **more}


def item(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **members}


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
CLAUDE_CODE = {
    "max_tokens": 32,
    "system": [{"type": "text", "text": "You mend files.", **CACHED}, {"type": "text", "text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "reminder"}, {"type": "text", "text": "mend it", **CACHED}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "read first", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I read.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "t2", "name": "Read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1 helo"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no path", "is_error": True, **CACHED},
            ],
        },
        {"role": "system", "content": "reminder"},
    ],
    "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "eager_input_streaming": True}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CODEX = {
    "instructions": "You mend files.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "mend it"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        item("message", role="assistant", phase="commentary", content=[{"type": "output_text", "text": "I read."}]),
        item("function_call", name="exec_command", arguments='{"cmd": "cat a"}', call_id="c1", id="fc_1"),
        {"type": "function_call_output", "call_id": "c1", "output": "helo"},
        item("custom_tool_call", status="completed", call_id="c2", name="apply_patch", input="*** Begin"),
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
}
OPENCODE = {
    "messages": [
        {"role": "system", "content": "You mend files."},
        {"role": "user", "content": [{"type": "text", "text": "mend it"}]},
        {"role": "assistant", "content": "", "reasoning_content": "read first", "tool_calls": [call('{"path": "a"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "helo"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "and b"},
    ],
    "tools": [READ],
    "tool_choice": "auto",
    "max_tokens": 32,
    "reasoning_effort": "medium",
}
AIDER = {
    "messages": [
        {"role": "system", "content": "Answer with blocks."},
        {"role": "user", "content": [{"type": "text", "text": "a.py", **CACHED}]},
        {
            "role": "assistant",
            "content": "Done.",
            "tool_calls": None,
            "function_call": None,
            "images": [],
            "thinking_blocks": [],
            "annotations": [],
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "user", "content": "I committed it."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "mend b"},
    ],
    "temperature": 0,
}
OPENHANDS = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You mend files.", **CACHED}]},
        {"role": "user", "content": [{"type": "text", "text": "mend it"}], "name": "user"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I read."}],
            "tool_calls": [call("", index=0, extra_content={"google": {"thought_signature": "s"}})],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "read", "content": [{"type": "text", "text": "no path"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call({"path": "a"}), call("{'path': 'a'}"), call('{"pa')],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "helo", **CACHED},
    ],
    "tools": [READ | CACHED],
    "tool_choice": "auto",
}
AGENTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "claude_code": ("/v1/messages", CLAUDE_CODE, 2),
    "codex": ("/v1/responses", CODEX, 2),
    "opencode": (CHAT, OPENCODE, 1),
    "aider": (CHAT, AIDER, 0),
    "openhands": (CHAT, OPENHANDS, 2),
}
"""Path, request, and the results of calls that the model sees."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
async def test_histories_of_agents_go_on(gateway: Answers, agent: str, stream: bool) -> None:
    path, body, results = AGENTS[agent]
    more = STREAM_OPTIONS if stream and path == CHAT else {}
    answered = await gateway.http.post(path, json={**body, "stream": stream, **more})
    assert answered.status_code == 200, answered.text
    turns = gateway.asked.chat.messages
    assert [turn.role for turn in turns].count("tool") == results
    assert any("mend" in turn.content for turn in turns if turn.role == "user")
