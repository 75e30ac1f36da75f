"""Items of a conversation: messages, calls, results of calls, thinking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from moonpool.base.errors import InvalidRequest
from moonpool.client import Message
from moonpool.gateway.responses.response_object import output_text
from moonpool.gateway.responses.store import Item
from moonpool.gateway.serving.body import Body, FailFastList
from moonpool.gateway.serving.known_fields import ITEM_IGNORED
from moonpool.gateway.serving.messages import ContentPart, joined_text, sdk_tool_call, with_content
from moonpool.gateway.serving.pictures import PICTURE_PARTS
from moonpool.gateway.serving.tolerance import check_content

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class ResponsesContentPart(ContentPart):
    """A part of an item. A part of an earlier answer has further fields, which are ignored."""

    kinds = (*_TEXT_PARTS, *PICTURE_PARTS)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    annotations: FailFastList[Any] | None = None
    logprobs: FailFastList[Any] | None = None


class ResponsesItem(Body):
    """A message, a call, a call's result, the thinking before an answer, or a stored item's id."""

    ignored = ITEM_IGNORED

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | FailFastList[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | FailFastList[ResponsesContentPart] | None = None

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        if self.type != "reasoning":
            return super().ignored_fields(place)
        return iter(() if self.content else (place.removesuffix("."),))

    def add_to(self, messages: list[Message], field: str) -> None:
        """Add the item to the messages for the SDK. A tool call joins the assistant's message before the call.

        Raises:
            InvalidRequest: a field is missing or is not text; names the field.
        """
        if self.type == "message":
            role = "system" if self.role == "developer" else self._required("role", field)
            if role == "assistant" and messages and messages[-1] == _thought(messages[-1]):
                messages[-1]["content"] = self._text("content", field)
            else:
                messages.append(self._with_content({"role": role, "content": ""}, "content", field))
        elif self.type == "reasoning":
            text = joined_text(self.content or "", f"{field}.content", ("reasoning_text",))
            if text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif self.type in ("function_call_output", "custom_tool_call_output"):
            call: Message = {"role": "tool", "content": "", "tool_call_id": self._required("call_id", field)}
            messages.append(self._with_content(call, "output", field))
        elif self.type == "item_reference":
            raise InvalidRequest(f"{field}.type", "is allowed only in the input of a response")
        else:
            call_id, function = (self._required(name, field) for name in ("call_id", "name"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)  # created above
            given = {"input": self.input or ""} if self.type == "custom_tool_call" else self.arguments
            calls.append(sdk_tool_call(call_id, function, given))

    def stored(self, default_id: str) -> Item:
        """The item as stored and listed: with an id, and a message's text as a part."""
        item = {"status": "completed", **self.model_dump(by_alias=True, exclude_unset=True), "type": self.type}
        if self.type == "message" and isinstance(self.content, str):
            part = {"type": "input_text", "text": self.content}
            item["content"] = [output_text(self.content, []) if self.role == "assistant" else part]
        return {**item, "id": self.id or f"{_ID_PREFIXES[self.type]}_{default_id}"}

    def _required(self, name: str, field: str) -> str:
        value: str | None = getattr(self, name)
        if not value:
            raise InvalidRequest(f"{field}.{name}", "is missing")
        return value

    def _text(self, name: str, field: str) -> str:
        content: str | list[ResponsesContentPart] | None = getattr(self, name)
        check_content(content, "tool" if name == "output" else self.role or "", f"{field}.{name}")
        return joined_text(content or "", f"{field}.{name}", _TEXT_PARTS)

    def _with_content(self, message: Message, name: str, field: str) -> Message:
        content: str | list[ResponsesContentPart] | None = getattr(self, name)
        check_content(content, message["role"], f"{field}.{name}")
        return with_content(message, content or "", f"{field}.{name}", _TEXT_PARTS)


def _thought(message: Message) -> Message:
    """The message, if there was only thinking."""
    return {"role": "assistant", "content": "", "reasoning_content": message.get("reasoning_content", "")}
