"""Bodies with a conversation: its turns, and the functions that the model may call in them, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from moonpool.client import Message, ToolCall
from moonpool.errors import InvalidRequest
from services.gateway.fields import Body, GenerationBody, Many
from services.gateway.tools import Tools, checked, definition

_REFUSED = ("function_call", "audio")
"""Fields of a turn that are refused; without a value they say nothing."""


class ContentPart(Body):
    """A piece of a turn."""

    type: str
    text: str | None = None


class CalledFunction(Body):
    """What was called, and with which arguments: a JSON object as text."""

    name: str
    arguments: str


class CallPart(Body):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> ToolCall:
        """As the SDK takes it."""
        return tool_call(self.id, self.function.name, self.function.arguments)


class Turn(Body):
    """One turn of a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = None
    tool_calls: Many[CallPart] | None = None
    tool_call_id: str | None = None

    def ignored(self) -> Iterator[str]:
        return (name for name in super().ignored() if name not in _REFUSED)

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))

    def message(self, place: str) -> Message:
        """The turn as the SDK takes it; a developer's turn is a system's.

        Args:
            place: name of the turn in errors, as "messages.0".

        Raises:
            InvalidRequest: names the part that is not text, or a call where there can be none.
        """
        self._check(place)
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": self._text(place)}
        if self.tool_calls:
            message["tool_calls"] = [call.call() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _check(self, place: str) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value is not None:
                raise InvalidRequest(f"{place}.{name}", "is not supported yet")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{place}.tool_calls", "are in an assistant's turn only")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise InvalidRequest(f"{place}.tool_call_id", "is in each turn of a tool, and in no other")

    def _text(self, place: str) -> str:
        if self.content is None and self.role == "assistant":
            return ""
        if self.content is None:
            raise InvalidRequest(f"{place}.content", "must be text")
        return joined(self.content, f"{place}.content")


def tool_call(id: str, name: str, arguments: str) -> ToolCall:  # noqa: A002
    """A call as the SDK takes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def joined(content: str | list[ContentPart], place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a content: parts become lines.

    Raises:
        InvalidRequest: names the part that is not text, below `place`.
    """
    if isinstance(content, str):
        return content
    return "\n".join(text_of(part, f"{place}.{index}", kinds) for index, part in enumerate(content))


def text_of(part: ContentPart, place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a part.

    Raises:
        InvalidRequest: it is of another kind; names `place`.
    """
    if part.type not in kinds or part.text is None:
        raise InvalidRequest(place, f"must be a text, not {part.type!r}")
    return part.text


class Function(Body):
    """A function that may be called; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def definition(self, place: str) -> dict[str, Any]:
        """As chat templates take it.

        Raises:
            InvalidRequest: its name is wrong; names `place`.
        """
        return definition(place, self.name, self.description, self.parameters)


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield "function", self.function


class Conversation(Body):
    """A body with turns."""

    messages: Many[Turn] | None = None
    tools: Many[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages or ()))
        yield from ((f"tools.{index}", tool) for index, tool in enumerate(self.tools or ()))

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text.
        """
        return [turn.message(f"messages.{index}") for index, turn in enumerate(self.messages or ())]

    def tools_offered(self) -> Tools | None:
        """Functions that the model may call; none with the choice "none".

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        forced = forced_call(self.tool_choice)
        given = [] if self.tool_choice == "none" else self.tools or []
        definitions = [tool.function.definition(f"tools.{index}.function") for index, tool in enumerate(given)]
        return checked(definitions, forced, several=self.parallel_tool_calls is not False)


def forced_call(choice: str | dict[str, Any] | None) -> str | None:
    """What an answer has to call: a function by its name, "" = any, None = it need not.

    Raises:
        InvalidRequest: names `tool_choice`: it is of no known form.
    """
    match choice:
        case None | "none" | "auto":
            return None
        case "required":
            return ""
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return name
    raise InvalidRequest("tool_choice", "must be 'auto', 'none', 'required' or name a function")


class ChatBody(Conversation, GenerationBody):
    """`/v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only for logprobs: true")
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("messages", "either messages or prompt_token_ids must be given")
        if self.messages is None and self.tools:
            raise InvalidRequest("tools", "are for messages only: the chat template shows them to the model")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens, its older name")


class TokenizeBody(Conversation):
    """`/tokenize`: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages must be given")
