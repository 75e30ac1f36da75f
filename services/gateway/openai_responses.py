"""OpenAI's `/v1/responses`: request body, response object and stream events. Responses are not stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from moonpool.client import GenerateResult, Message, TokenEvent, Usage
from moonpool.errors import InvalidRequest
from moonpool.logprobs import TokenLogprobs
from moonpool.sampling_params import SamplingParams
from services.gateway.errors import ErrorResponse
from services.gateway.json_body import Body, FailFastList, GenerateBody, SmallObject, to_json_bytes
from services.gateway.openai_completions import ContentPart, FunctionBody, forced_tool, joined_text, sdk_tool_call
from services.gateway.structured_outputs import responses_text_format
from services.gateway.tool_calls import (
    AnswerArgumentsDelta,
    AnswerParser,
    AnswerPiece,
    AnswerToolCall,
    ToolSet,
    checked_tools,
)

RESPONSES_PATH = "/v1/responses"


INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""The one thing of `include` that there is."""


_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesContentPart(ContentPart):
    """A piece of an item; an answer's that is sent back has fields that say nothing here."""

    annotations: FailFastList[Any] | None = None
    logprobs: FailFastList[Any] | None = None


class ResponsesItem(Body):
    """A turn, a call, or the result of a call."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | FailFastList[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | FailFastList[ResponsesContentPart] | None = None

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
            calls.append(sdk_tool_call(call_id, name, arguments))

    def _needed(self, name: str, place: str) -> str:
        value: str | None = getattr(self, name)
        if not value:
            raise InvalidRequest(f"{place}.{name}", "is missing")
        return value

    def _text(self, name: str, place: str) -> str:
        content: str | list[ContentPart] | None = getattr(self, name)
        if content is None:
            raise InvalidRequest(f"{place}.{name}", "is missing")
        return joined_text(content, f"{place}.{name}", _TEXT_PARTS)


class ResponsesTool(FunctionBody):
    """A function that may be called."""

    type: Literal["function"]


class ResponsesText(Body):
    """What an answer's text is."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    format: dict[str, Any] | None = None


class ResponsesBody(GenerateBody):
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

    input: str | FailFastList[ResponsesItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: SmallObject[str] | None = None
    text: ResponsesText | None = None
    include: FailFastList[str] | None = None
    top_logprobs: int | None = None
    tools: FailFastList[ResponsesTool] | None = None
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
            if wanted != INCLUDE_LOGPROBS:
                raise InvalidRequest(f"include.{index}", f"only {INCLUDE_LOGPROBS} is supported")
        if self.scored() is not None and self.tools:
            raise InvalidRequest("tools", "do not go with log probabilities, which are those of a text")

    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.top_logprobs or INCLUDE_LOGPROBS in (self.include or ()) else None

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

    def tools_offered(self) -> ToolSet | None:
        forced = forced_tool(self.tool_choice)
        given = [] if self.tool_choice == "none" else self.tools or []
        definitions = [tool.definition(f"tools.{index}") for index, tool in enumerate(given)]
        return checked_tools(definitions, forced, several=self.parallel_tool_calls is not False)

    def sampling(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        given["response_format"], given["grammar"] = responses_text_format(self._format())
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


class ResponsesFormatter:
    """A response. Its output are items: a message per run of text, and calls of functions."""

    def __init__(
        self,
        model: str,
        reading: AnswerParser,
        told: Mapping[str, Any],
        spell: Callable[[Sequence[TokenLogprobs]], Mapping[str, Any]],
    ) -> None:
        """Take what makes the answer.

        Args:
            model: its name.
            reading: finds the calls in the answer.
            told: fields that repeat the request.
            spell: makes a chat's log probabilities.
        """
        self._spell = spell
        self._new_scores: list[TokenLogprobs] = []  # not told yet
        self._scores: list[dict[str, Any]] = []  # of the message that goes on
        self._model = model
        self._reading = reading
        self._told = told
        self._request_id = ""
        self._head: dict[str, Any] = {}
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._text: list[str] | None = None  # of the message that goes on; it is not among the items yet
        self._call: AnswerToolCall | None = None  # that goes on, with its arguments so far; neither is it

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._reading.begin(request_id)
        self._request_id = request_id
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            **self._told,
            **({"emulated": True} if emulated else {}),
        }

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        pieces = self._reading.whole(result.text, 0)
        self._scores = self._spelled(result.logprobs)
        output = [self._item(number, piece, "completed") for number, piece in enumerate(pieces)]
        return self._response(output, result)

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._object("in_progress", []))

    def piece(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._piece, self._reading.push(text, choice)))

    def note(self, event: TokenEvent) -> None:
        self._new_scores += event.logprobs

    def _spelled(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._spell(logprobs)["content"] if logprobs else []
        return found

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._piece, self._reading.end(0))
        yield self._end_text() + self._end_call("incomplete" if result.finish_reason == "length" else "completed")
        response = self._response(self._items, result)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, refused: ErrorResponse) -> bytes:
        error = {"code": "server_error", "message": refused.message}
        return self._event("response.failed", response={**self._object("failed", self._items), "error": error})

    def refused(self, refused: ErrorResponse) -> dict[str, Any]:
        return refused.body()

    def _response(self, output: list[dict[str, Any]], result: GenerateResult) -> dict[str, Any]:
        """The response when the answer has ended."""
        cut = result.finish_reason == "length"
        whole = self._object("incomplete" if cut else "completed", output)
        whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return {**whole, "usage": responses_usage(result.usage)}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **nothing, "status": status, "output": output}

    def _item(self, number: int, piece: str | AnswerToolCall, status: str) -> dict[str, Any]:
        """An item of the output; `status` is "in_progress", "completed" or "incomplete"."""
        if isinstance(piece, str):
            content = [_output_text_part(piece, self._scores)] if status == "completed" else []
            message_id = f"msg_{self._request_id}_{number}"
            return {"type": "message", "id": message_id, "status": status, "role": "assistant", "content": content}
        call = {"call_id": piece.id, "name": piece.name, "arguments": piece.arguments}
        return {"type": "function_call", "id": f"fc_{self._request_id}_{number}", "status": status, **call}

    def _piece(self, piece: AnswerPiece) -> bytes:
        """The events of a piece: a text goes on with the next one, a call is an item of its own."""
        match piece:
            case str():
                before = self._end_call() + (self._begin_text() if self._text is None else b"")
                assert self._text is not None
                self._text.append(piece)
                new, self._new_scores = self._spelled(self._new_scores), []
                self._scores += new
                return before + self._of_text("response.output_text.delta", delta=piece, logprobs=new)
            case AnswerArgumentsDelta():
                return self._goes_on(piece.arguments)
        before = self._end_text() + self._end_call()
        self._call, number = replace(piece, arguments=""), len(self._items)
        item = self._item(number, self._call, "in_progress")
        started = self._event("response.output_item.added", output_index=number, item=item)
        return before + started + self._goes_on(piece.arguments)

    def _goes_on(self, arguments: str) -> bytes:
        """Further arguments of the call that goes on."""
        if self._call is None or not arguments:
            return b""
        self._call = replace(self._call, arguments=self._call.arguments + arguments)
        return self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)

    def _end_call(self, status: str = "completed") -> bytes:
        if self._call is None:
            return b""
        call, place, number = self._call, self._place(), len(self._items)
        item = self._item(number, call, status)
        self._items.append(item)
        self._call = None
        done = self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        return done + self._event("response.output_item.done", output_index=number, item=item)

    def _place(self) -> dict[str, Any]:
        """Where the call that goes on stands in the output."""
        number = len(self._items)
        return {"item_id": f"fc_{self._request_id}_{number}", "output_index": number}

    def _begin_text(self) -> bytes:
        self._text = []
        number = len(self._items)
        item = self._event(
            "response.output_item.added", output_index=number, item=self._item(number, "", "in_progress")
        )
        return item + self._of_text("response.content_part.added", part=_output_text_part("", []))

    def _end_text(self) -> bytes:
        if self._text is None:
            return b""
        text, number = "".join(self._text), len(self._items)
        self._scores += self._spelled(self._new_scores)  # of tokens that had no text, as the one that ends an answer
        self._new_scores = []
        ends = self._of_text("response.output_text.done", text=text, logprobs=self._scores)
        ends += self._of_text("response.content_part.done", part=_output_text_part(text, self._scores))
        item = self._item(number, text, "completed")
        self._items.append(item)
        self._text, self._scores = None, []
        return ends + self._event("response.output_item.done", output_index=number, item=item)

    def _of_text(self, kind: str, **content: Any) -> bytes:
        """An event of the message that goes on."""
        number = len(self._items)
        return self._event(
            kind, item_id=f"msg_{self._request_id}_{number}", output_index=number, content_index=0, **content
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        number = self._events
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (
            kind.encode(),
            to_json_bytes({"type": kind, "sequence_number": number, **content}),
        )


def responses_usage(counted: Usage) -> dict[str, Any]:
    """The usage, under this form's names."""
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def _output_text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
