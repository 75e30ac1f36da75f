"""What clients leave out, and what they add for another vendor's servers: one policy in three interfaces."""

import json
from typing import Any

import pytest

from .fakes import CHAT, TURNS, Answers

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
ITEM = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
NOTHING: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
"""What a tool gives that gave nothing."""
FUNCTION = {"name": "read", "parameters": SCHEMA}


async def post(gateway: Answers, path: str, **body: Any) -> Any:
    more = {} if path == RESPONSES else {"max_tokens": 4}
    return await gateway.http.post(path, json={**more, **body})


def shown_tools(gateway: Answers) -> list[str]:
    """Names of the functions that the model sees."""
    return [tool["function"]["name"] for tool in json.loads(gateway.asked.chat.tools or "[]")]


def with_result(path: str, result: dict[str, Any]) -> dict[str, Any]:
    """A history in which a tool has given a result."""
    if path == CHAT:
        turns = [*TURNS, {"role": "assistant", "tool_calls": [CALL]}]
        return {"messages": [*turns, {"role": "tool", "tool_call_id": "c", **result}]}
    if path == RESPONSES:
        output = {"output" if name == "content" else name: value for name, value in result.items()}
        return {"input": [*TURNS, ITEM, {"type": "function_call_output", "call_id": "c", **output}]}
    block = {"type": "tool_result", "tool_use_id": "c", **result}
    return {"messages": [*TURNS, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [block]}]}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("result", NOTHING, ids=str)
async def test_a_tool_may_give_nothing(gateway: Answers, path: str, result: dict[str, Any]) -> None:
    answered = await post(gateway, path, **with_result(path, result))
    assert answered.status_code == 200, answered.text
    last = gateway.asked.chat.messages[-1]
    assert (last.role, last.content, last.tool_call_id) == ("tool", "", "c")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_only_answers_and_tools_may_be_empty(gateway: Answers, path: str, role: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    for content in ({}, {"content": None}):
        given = await post(gateway, path, **{name: [*TURNS, {"role": role, **content}, *TURNS]})
        assert given.status_code == (200 if role == "assistant" else 400), given.text
        assert role == "assistant" or f"{name}.1.content" in given.text


def with_tools(path: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """A request with the function `read` and more tools. `more` of the function stands in the function's tool."""
    if path == RESPONSES:
        return {"input": "hi", "tools": [{"type": "function", **FUNCTION}, *tools]}
    function = {"type": "function", "function": FUNCTION}
    return {
        "messages": TURNS,
        "tools": [function if path == CHAT else {"name": "read", "input_schema": SCHEMA}, *tools],
    }


SERVERS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["a.org"]},
    {"type": "web_search", "external_web_access": True},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "image_generation", "size": "auto"},
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("tool", SERVERS, ids=lambda tool: tool["type"])
async def test_tools_of_a_vendors_servers_are_passed_over(gateway: Answers, path: str, tool: dict[str, Any]) -> None:
    answered = await post(gateway, path, **with_tools(path, tool))
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"] == '299 moonpool "ignored fields: tools.1"'
    assert shown_tools(gateway) == ["read"]
    if path == RESPONSES:
        assert answered.json()["tools"][1] == tool


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_tools_that_the_client_runs_in_a_vendors_form_are_refused(gateway: Answers, path: str) -> None:
    for kind in ("bash_20250124", "text_editor_20250728", "computer_20251124", "local_shell", "file_search"):
        refused = await post(gateway, path, **with_tools(path, {"type": kind, "name": "x"}))
        assert refused.status_code == 400
        assert "tools.1.type" in refused.text


async def test_a_tool_of_the_servers_cannot_be_forced(gateway: Answers) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    refused = await post(
        gateway, MESSAGES, messages=TURNS, tools=[tool], tool_choice={"type": "tool", "name": "web_search"}
    )
    assert (refused.status_code, "tool_choice" in refused.text) == (400, True)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_deferred_tool_is_seen_from_the_start(gateway: Answers, path: str) -> None:
    body = with_tools(path)
    body["tools"][0]["defer_loading"] = True
    answered = await post(gateway, path, **body)
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"].endswith('tools.0.defer_loading"')
    assert shown_tools(gateway) == ["read"]


async def test_what_a_search_for_tools_found(gateway: Answers) -> None:
    found = [{"type": "tool_reference", "tool_name": "read"}, {"type": "text", "text": "one"}]
    answered = await post(gateway, MESSAGES, **with_result(MESSAGES, {"content": found}))
    assert answered.status_code == 200, answered.text
    assert gateway.asked.chat.messages[-1].content == "read\none"
    user = [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "read"}]}]
    assert (await post(gateway, MESSAGES, messages=user)).status_code == 400


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


async def test_tools_come_and_go_in_the_conversation(gateway: Answers) -> None:
    new = {"name": "write", "input_schema": SCHEMA}
    added = change("tool_addition", type="tool_definition", definition=new)
    named = change("tool_addition", type="tool_reference", name="read")
    removed = change("tool_removal", type="tool_reference", name="read")
    for changes, left in (
        ([named], ["read"]),
        ([added], ["read", "write"]),
        ([added, removed], ["write"]),
        ([removed, change("tool_removal", type="mcp_toolset_reference", server_name="s")], []),
    ):
        gateway.fake.requests.clear()
        answered = await post(gateway, MESSAGES, **{**with_tools(MESSAGES), "messages": [*TURNS, *changes]})
        assert answered.status_code == 200, answered.text
        assert shown_tools(gateway) == left
        assert all(message.content for message in gateway.asked.chat.messages if message.role == "user")
    wrong = change("tool_addition", type="tool_definition", definition={**new, "name": "w w"})
    refused = await post(gateway, MESSAGES, messages=[*TURNS, wrong])
    assert "messages.1.content.0.tool.definition.name" in refused.text
    assert (
        "messages.1.content.0.tool: is missing"
        in (
            await post(gateway, MESSAGES, messages=[*TURNS, {"role": "system", "content": [{"type": "tool_addition"}]}])
        ).text
    )


async def test_what_a_vendors_servers_did_is_passed_over(gateway: Answers) -> None:
    search = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result"}},
        {"type": "text", "text": "found"},
    ]
    answered = await post(gateway, MESSAGES, messages=[*TURNS, {"role": "assistant", "content": search}, *TURNS])
    assert answered.status_code == 200, answered.text
    places = ", ".join(f"messages.1.content.{index}" for index in range(3))
    assert answered.headers["warning"] == f'299 moonpool "ignored fields: {places}"'
    assert [turn.content for turn in gateway.asked.chat.messages] == ["hi", "found", "hi"]
    items = [
        *TURNS,
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
        *TURNS,
    ]
    answered = await post(gateway, RESPONSES, input=items)
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"] == '299 moonpool "ignored fields: input.1"'
    stored = await gateway.http.get(f"{RESPONSES}/{answered.json()['id']}/input_items")
    assert len(stored.json()["data"]) == 2


async def test_a_summary_of_what_was_before_is_seen(gateway: Answers) -> None:
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "we mended a.py"}]}
    assert (await post(gateway, MESSAGES, messages=[*TURNS, summary, *TURNS])).status_code == 200
    assert gateway.asked.chat.messages[1].content == "we mended a.py"


async def test_a_breakpoints_scope_is_passed_over(gateway: Answers) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    answered = await post(gateway, MESSAGES, messages=TURNS, system=[{"type": "text", "text": "s", **mark}])
    assert answered.status_code == 200, answered.text
    assert answered.headers["warning"].endswith('fields: system.0.cache_control.scope"')


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi", "tool_calls": None, "novel": None}], "tools": None}),
        (
            CHAT,
            {"messages": TURNS, "tools": [{"type": "function", "function": {**FUNCTION, "strict": None, "x": None}}]},
        ),
        (CHAT, {"messages": [*TURNS, {"role": "assistant", "tool_calls": [{**CALL, "type": None}]}]}),
        (RESPONSES, {"input": [{"type": None, "role": "user", "content": "hi"}], "text": {"format": None}}),
        (MESSAGES, {"messages": TURNS, "cache_control": {"type": "ephemeral", "ttl": None}, "thinking": None}),
    ],
)
async def test_null_counts_as_absent(gateway: Answers, path: str, body: dict[str, Any]) -> None:
    answered = await post(gateway, path, **body)
    assert answered.status_code == 200, answered.text
    assert "warning" not in answered.headers


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [{"role": None, "content": "hi"}]}, "messages.0.role"),
        (RESPONSES, {"input": None}, "input"),
        (MESSAGES, {"messages": None}, "messages"),
    ],
)
async def test_null_where_a_value_must_be_is_missing(
    gateway: Answers, path: str, body: dict[str, Any], place: str
) -> None:
    refused = await post(gateway, path, **body)
    assert refused.status_code == 400
    assert place in refused.text
    assert "missing" in refused.text or "either messages" in refused.text
