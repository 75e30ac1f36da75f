"""Messages of a conversation in OpenAI's form, and the body that has messages and tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Literal, TypeVar

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest
from moonpool.client import Message, MessagePart, ToolCall
from moonpool.gateway.serving.body import Body, FailFastList
from moonpool.gateway.serving.known_fields import (
    CALL_IGNORED,
    MESSAGE_IGNORED,
    MESSAGE_REFUSED,
    PART_IGNORED,
)
from moonpool.gateway.serving.offered_tools import ToolBody, ToolChoice, chosen_tools
from moonpool.gateway.serving.pictures import PICTURE_PARTS, ImageSource, ImageUrl, sent_picture
from moonpool.gateway.serving.tolerance import ToolOrPassedOver, check_content, known
from moonpool.gateway.serving.tool_set import ToolSet

TEXT_PARTS = ("text", "refusal")
"""Types of parts that are message text."""
DROPPED_PARTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts in an assistant's message that are left out of the prompt, because they do not belong to the
answer.
"""


class ContentPart(Body):
    """A part of a message's content."""

    ignored: ClassVar[Collection[str]] = PART_IGNORED
    kinds: ClassVar[Collection[str]] = (*TEXT_PARTS, *DROPPED_PARTS, *PICTURE_PARTS)
    """Values of `type` that are accepted; others are refused when the text of the part is read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    source: ImageSource | None = None
    detail: str | None = None

    def prompt_text(self) -> str | None:
        """The text that stands in the prompt; None for none."""
        return self.refusal if self.type == "refusal" else self.text

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        if self.type in DROPPED_PARTS:
            return iter((place.removesuffix("."),))
        return super().ignored_fields(place) if self.type in self.kinds else iter(())  # others are refused as a whole


class FunctionCallBody(Body):
    """A called function. `arguments` is a JSON object as text; models and clients also write something else."""

    ignored = CALL_IGNORED

    name: str
    arguments: Any = None


class ToolCallBody(Body):
    """A tool call in an assistant's message."""

    ignored = CALL_IGNORED

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody

    def to_tool_call(self) -> ToolCall:
        """The call for the SDK."""
        return sdk_tool_call(self.id, self.function.name, self.function.arguments)


class ChatMessageBody(Body):
    """One message in a conversation."""

    ignored = MESSAGE_IGNORED
    refused = MESSAGE_REFUSED

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FailFastList[ContentPart] | None = None
    refusal: str | None = None
    tool_calls: FailFastList[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_message(self, field: str) -> Message:
        """The message for the SDK. A developer's message becomes a system's.

        Args:
            field: name of the message in errors, for example "messages.0".

        Raises:
            InvalidRequest: a part is not text, or the role cannot have tool calls; names the field.
        """
        self._check_fields(field)
        role = "system" if self.role == "developer" else self.role
        check_content(self.content, self.role, f"{field}.content")
        dropped = DROPPED_PARTS if self.role == "assistant" else ()
        content = (self.refusal or "") if self.content is None else self.content
        message = with_content({"role": role, "content": ""}, content, f"{field}.content", dropped=dropped)
        if self.tool_calls:
            message["tool_calls"] = [call.to_tool_call() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            message["reasoning_content"] = reasoning
        return message

    def _check_fields(self, field: str) -> None:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{field}.tool_calls", "only an assistant's message may have tool calls")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise InvalidRequest(f"{field}.tool_call_id", "must be in each message of a tool, and in no other")


def sdk_tool_call(id: str, name: str, arguments: Any) -> ToolCall:  # noqa: A002
    """A past tool call for the SDK.

    A conversation must continue whatever the call's arguments are; the conductor reads them.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


PartT = TypeVar("PartT", bound=ContentPart)


def joined_text(
    content: str | list[PartT], field: str, types: Collection[str] = TEXT_PARTS, dropped: Collection[str] = ()
) -> str:
    """Text of a message's content. Line breaks join the parts; parts of the types `dropped` are left out.

    Raises:
        InvalidRequest: a part is not text; names the part below `field`.
    """
    if isinstance(content, str):
        return content
    return "\n".join(
        part_text(part, f"{field}.{index}", types) for index, part in enumerate(content) if part.type not in dropped
    )


def with_content(
    message: Message,
    content: str | list[PartT],
    field: str,
    types: Collection[str] = TEXT_PARTS,
    dropped: Collection[str] = (),
) -> Message:
    """The message with its text, or with texts and pictures as parts if there is a picture.

    Raises:
        InvalidRequest: a part is neither, or an assistant's picture; names the part below `field`.
    """
    pictures = not isinstance(content, str) and any(part.type in PICTURE_PARTS for part in content)
    if isinstance(content, str) or not pictures:
        return {**message, "content": joined_text(content, field, types, dropped)}
    check_picture_role(message["role"], field)
    parts = [
        message_part(part, f"{field}.{index}", types) for index, part in enumerate(content) if part.type not in dropped
    ]
    return {**message, "parts": parts}


def check_picture_role(role: str, field: str) -> None:
    """Check that a message may have pictures.

    Raises:
        InvalidRequest: it may not; names `field`.
    """
    if role not in ("user", "tool"):
        raise InvalidRequest(field, f"pictures are a user's or a tool's, not of the role {role}")


def message_part(part: ContentPart, field: str, types: Collection[str] = TEXT_PARTS) -> MessagePart:
    """A part for the SDK; raises as `part_text` and `sent_picture`."""
    if part.type in PICTURE_PARTS:
        return {"picture": sent_picture(field, part.image_url, part.source, part.detail)}
    return {"text": part_text(part, field, types)}


def part_text(part: ContentPart, field: str, types: Collection[str] = TEXT_PARTS) -> str:
    """A part's text if the part's type is in `types`.

    Raises:
        InvalidRequest: the part has another type; names `field`.
    """
    text = part.prompt_text()
    if part.type not in types or text is None:
        raise InvalidRequest(field, f"must be a text, not {part.type!r}")
    return text


class ChatOptionsBody(Body):
    """How messages become a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat_options(self) -> ChatOptions:
        """How the messages become a prompt.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("continue_final_message", "conflicts with add_generation_prompt")
        return ChatOptions(
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            self.chat_template_kwargs or {},
        )


class ConversationBody(Body):
    """A body with messages for the chat template, and tools."""

    unknown_ignored = True

    messages: FailFastList[ChatMessageBody] | None = None
    tools: FailFastList[ToolOrPassedOver[ToolBody]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def to_messages(self) -> list[Message]:
        """The messages for the SDK.

        Raises:
            InvalidRequest: a message is wrong; names the field.
        """
        return [message.to_message(f"messages.{index}") for index, message in enumerate(self.messages or ())]

    def tool_set(self) -> ToolSet | None:
        """Functions that the model may call; None without tools, or if `tool_choice` is "none".

        Raises:
            InvalidRequest: a tool is wrong or not supported; names the field.
        """
        definitions = [tool.function.definition(f"tools.{index}.function") for index, tool in known(self.tools)]
        return chosen_tools(definitions, self.tool_choice, parallel=self.parallel_tool_calls is not False)
