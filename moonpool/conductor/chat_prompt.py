"""From chat messages to a prompt, by the chat template."""

from __future__ import annotations

from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from moonpool.base.checkpoint import ChatOptions, RenderedChat, Tokenizer
from moonpool.base.errors import InvalidRequest
from moonpool.base.pictures.files import Picture
from moonpool.v1 import conductor_pb2


def chat_chars(chat: conductor_pb2.ChatPrompt) -> int:
    """Return the number of the client's characters that go into the chat template."""
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    called = sum(len(call.name) + len(call.arguments) for call in calls)
    written = sum(len(turn.role) + len(turn.content) + len(turn.reasoning_content) for turn in chat.messages)
    parts = sum(len(part.text) for turn in chat.messages for part in turn.parts)
    return called + len(chat.tools) + len(chat.template_kwargs) + written + parts


def chat_pictures(chat: conductor_pb2.ChatPrompt) -> list[Picture]:
    """Return the pictures of all messages, in their order."""
    return [
        Picture(part.picture.content, part.picture.width, part.picture.height, part.picture.detail)
        for turn in chat.messages
        for part in turn.parts
        if part.HasField("picture")
    ]


def render_chat(chat: conductor_pb2.ChatPrompt, tokenizer: Tokenizer) -> RenderedChat:
    """Return the prompt as written by the chat template.

    Raises:
        InvalidRequest: names the field that is wrong, or that the chat template does not take.
    """
    kwargs = _json_field("chat_template_kwargs", chat.template_kwargs or "{}")
    if not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs", "must be a JSON object")
    options = ChatOptions(continue_final_message=chat.continue_final_message, template_kwargs=kwargs)
    return tokenizer.render_chat(list(map(_chat_turn, chat.messages)), _chat_tools(chat.tools), options)


def _chat_turn(turn: conductor_pb2.ChatMessage) -> dict[str, Any]:
    """Return a message for the template. Absent fields are left out: templates test whether a field is there."""
    if unknown := UnknownFieldSet(turn):
        raise InvalidRequest("messages", f"has field number {unknown[0].field_number}, which is not known here")
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.parts:
        if turn.content:
            raise InvalidRequest("messages", "a message has either content or parts")
        found["content"] = [_content_part(part) for part in turn.parts]
    if turn.tool_calls:
        found["tool_calls"] = [_chat_tool_call(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        found["tool_call_id"] = turn.tool_call_id
    if turn.reasoning_content:
        found["reasoning_content"] = turn.reasoning_content
    return found


def _content_part(part: conductor_pb2.ContentPart) -> dict[str, Any]:
    """Return a part as chat templates take parts."""
    if UnknownFieldSet(part) or UnknownFieldSet(part.picture):
        raise InvalidRequest("messages", "a part has a field that is not known here")
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "picture":
            return {"type": "image"}
        case _:
            raise InvalidRequest("messages", "a part has neither text nor picture")


def _chat_tool_call(call: conductor_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_tools(text: str) -> list[dict[str, Any]]:
    tools = _json_field("tools", text or "[]")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a JSON list of objects")
    return tools


def _json_field(name: str, text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(name, f"invalid JSON: {error}") from None
