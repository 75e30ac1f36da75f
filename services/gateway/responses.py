"""`/v1/responses`: the body of OpenAI's newer form. Responses are not stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from moonpool.client import Message, SamplingParams
from moonpool.errors import InvalidRequest
from services.gateway.fields import AnsweredBody, Body, Few, Many
from services.gateway.formats import responses_format
from services.gateway.tools import Tools, checked
from services.gateway.turns import ContentPart, Function, forced_call, joined, tool_call

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The one thing of `include` that there is."""
_TEXTS = ("input_text", "output_text", "text")


class Part(ContentPart):
    """A piece of an item; an answer's that is sent back has fields that say nothing here."""

    annotations: Many[Any] | None = None
    logprobs: Many[Any] | None = None


class Item(Body):
    """A turn, a call, or the result of a call."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[Part] | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        for name, content in (("content", self.content), ("output", self.output)):
            if isinstance(content, list):
                yield from ((f"{name}.{index}", part) for index, part in enumerate(content))

    def add_to(self, turns: list[Message], place: str) -> None:
        """Add the item to a conversation; calls that follow an assistant's turn are part of it.

        Raises:
            InvalidRequest: names what is missing, or is not text.
        """
        if self.type == "message":
            role = "system" if self.role == "developer" else self._needed("role", place)
            turns.append({"role": role, "content": self._text("content", place)})
        elif self.type == "function_call_output":
            result: Message = {"role": "tool", "content": self._text("output", place)}
            turns.append({**result, "tool_call_id": self._needed("call_id", place)})
        else:
            call_id, name, arguments = (self._needed(field, place) for field in ("call_id", "name", "arguments"))
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            calls = turns[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)  # made here
            calls.append(tool_call(call_id, name, arguments))

    def _needed(self, name: str, place: str) -> str:
        value: str | None = getattr(self, name)
        if not value:
            raise InvalidRequest(f"{place}.{name}", "is missing")
        return value

    def _text(self, name: str, place: str) -> str:
        content: str | list[ContentPart] | None = getattr(self, name)
        if content is None:
            raise InvalidRequest(f"{place}.{name}", "is missing")
        return joined(content, f"{place}.{name}", _TEXTS)


class ResponsesTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class TextField(Body):
    """What an answer's text is."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    format: dict[str, Any] | None = None


class ResponsesBody(AnsweredBody):
    """The body."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "reasoning": (None, {}),
        "store": (None, False),
        "truncation": (None, "disabled"),
    }

    input: str | Many[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Few[str] | None = None
    text: TextField | None = None
    include: Many[str] | None = None
    top_logprobs: int | None = None
    tools: Many[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        if self.text is not None:
            yield "text", self.text
        if isinstance(self.input, list):
            yield from ((f"input.{index}", item) for index, item in enumerate(self.input))
        yield from ((f"tools.{index}", tool) for index, tool in enumerate(self.tools or ()))

    def check(self) -> None:
        for index, wanted in enumerate(self.include or ()):
            if wanted != LOGPROBS:
                raise InvalidRequest(f"include.{index}", f"only {LOGPROBS} is supported")
        if self.scored() is not None and self.tools:
            raise InvalidRequest("tools", "do not go with log probabilities, which are those of a text")

    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text, nor a call or its result.
        """
        turns: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            item.add_to(turns, f"input.{index}")
        return turns

    def tools_offered(self) -> Tools | None:
        forced = forced_call(self.tool_choice)
        given = [] if self.tool_choice == "none" else self.tools or []
        definitions = [tool.definition(f"tools.{index}") for index, tool in enumerate(given)]
        return checked(definitions, forced, several=self.parallel_tool_calls is not False)

    def sampling(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        given["response_format"], given["grammar"] = responses_format(self._format())
        return SamplingParams(max_tokens=max_tokens, logprobs=self.scored(), **given)

    def _format(self) -> dict[str, Any]:
        return (self.text.format if self.text is not None else None) or {"type": "text"}

    def told(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "metadata": self.metadata or {},
            "tools": [
                {"strict": False, **tool.model_dump(include={"type", "name", "description", "parameters"})}
                for tool in self.tools or ()
            ],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": self._format()},
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "background": False,
        }
