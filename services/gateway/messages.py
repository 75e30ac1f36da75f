"""`/v1/messages`: the body of a chat in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from moonpool.client import Message, SamplingParams, ToolCall
from moonpool.errors import InvalidRequest
from services.gateway.fields import AnsweredBody, Body, Many
from services.gateway.formats import messages_format
from services.gateway.tools import Tools, checked, definition
from services.gateway.turns import ContentPart, joined, text_of, tool_call

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"

_WITHOUT = {
    "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []),
    "container": (None,),
    "context_management": (None,),
    "output_format": (None,),
}
"""Fields that are not built, with the values that ask for nothing."""


class Block(ContentPart):
    """A block of a turn: a text, a call (an assistant's), or the result of a call (a user's)."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Many[ContentPart] | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))


class MessageTurn(Body):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str | Many[Block]

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))

    def messages(self, place: str) -> Iterator[Message]:
        """The turn as the SDK takes it: results of calls are turns of their own, before the user's text.

        Raises:
            InvalidRequest: names the block that has no place here.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(self.content):
            match self.role, block.type:
                case "user", "tool_result":
                    yield _result(block, f"{place}.content.{index}")
                case "assistant", "tool_use":
                    calls.append(_call(block, f"{place}.content.{index}"))
                case _:
                    texts.append(text_of(block, f"{place}.content.{index}"))
        message: Message = {"role": self.role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if texts or self.role != "user":
            yield message


class MessagesTool(Body):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesChoice(Body):
    """Whether the model may call functions."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    """What an answer is to be."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"effort": (None,)}

    format: dict[str, Any] | None = None


class MessagesPrompt(Body):
    """What a conversation and its count have in common. A system's text is a turn before the others."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _WITHOUT

    model: str | None = None
    messages: Many[MessageTurn]
    system: str | Many[ContentPart] | None = None
    tools: Many[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages))
        yield from ((f"tools.{index}", tool) for index, tool in enumerate(self.tools or ()))
        if isinstance(self.system, list):
            yield from ((f"system.{index}", part) for index, part in enumerate(self.system))

    def check(self) -> None:
        if not self.messages or self.messages[-1].role != "user":
            raise InvalidRequest(
                "messages", "the last turn must be a user's; continuing an answer is not supported yet"
            )

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text, nor a call or its result.
        """
        system = joined(self.system or "", "system")
        turns: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, turn in enumerate(self.messages):
            turns += turn.messages(f"messages.{index}")
        return turns

    def tools_offered(self) -> Tools | None:
        """Functions that the model may call; none with the choice "none".

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        choice = self.tool_choice or MessagesChoice(type="auto")
        forced = {"any": "", "tool": choice.name or "?"}.get(choice.type)
        given = [] if choice.type == "none" else self.tools or []
        definitions = [
            definition(f"tools.{index}", tool.name, tool.description, tool.input_schema)
            for index, tool in enumerate(given)
        ]
        return checked(definitions, forced, several=not choice.disable_parallel_tool_use)


class MessagesBody(MessagesPrompt, AnsweredBody):
    """The body."""

    unsupported = _WITHOUT

    max_tokens: int
    stop_sequences: Many[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        if self.output_config is not None:
            yield "output_config", self.output_config

    def sampling(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        if self.output_config is not None and self.output_config.format is not None:
            given["response_format"], given["grammar"] = messages_format(self.output_config.format)
        return SamplingParams(max_tokens=max_tokens, stop=self.stop_sequences or (), **given)


class CountTokensBody(MessagesPrompt):
    """`/v1/messages/count_tokens`."""


def _result(block: Block, place: str) -> Message:
    if not block.tool_use_id:
        raise InvalidRequest(f"{place}.tool_use_id", "is missing")
    content = joined(block.content or "", f"{place}.content")
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _call(block: Block, place: str) -> Any:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise InvalidRequest(f"{place}.{name}", "is missing")
    return tool_call(block.id or "", block.name or "", json.dumps(block.input, ensure_ascii=False))
