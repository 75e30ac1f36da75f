"""A conversation of the contract as the chat template takes it."""

from __future__ import annotations

from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from moonpool.checkpoint import Tokenizer
from moonpool.errors import InvalidRequest
from moonpool.v1 import conductor_pb2


def chars(chat: conductor_pb2.ChatPrompt) -> int:
    """Characters of the client's that the template is given."""
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    called = sum(len(call.name) + len(call.arguments) for call in calls)
    return called + len(chat.tools) + sum(len(turn.role) + len(turn.content) for turn in chat.messages)


def render(chat: conductor_pb2.ChatPrompt, tokenizer: Tokenizer) -> str:
    """Return the prompt's text.

    Raises:
        InvalidRequest: names what the chat template does not take, or what is wrong.
    """
    return tokenizer.render_chat(list(map(_turn, chat.messages)), tools=_tools(chat.tools))


def _turn(turn: conductor_pb2.ChatMessage) -> dict[str, Any]:
    """What a turn does not have is left out: templates ask whether it is there."""
    if unknown := UnknownFieldSet(turn):
        raise InvalidRequest("messages", f"has field number {unknown[0].field_number}, which is not known here")
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        found["tool_calls"] = [_call(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        found["tool_call_id"] = turn.tool_call_id
    return found


def _call(call: conductor_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    try:
        tools = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("tools", f"invalid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a JSON list of objects")
    return tools
