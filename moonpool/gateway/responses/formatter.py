"""Writes responses and their events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moonpool.base.logprobs import TokenLogprobs
from moonpool.client import GenerateResult, TokenEvent
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.responses.response_object import (
    UNANSWERED,
    failure,
    output_text,
    reasoning_text,
    response_event,
    response_head,
    responses_usage,
)
from moonpool.gateway.responses.tools import ToolCallForm, custom_input
from moonpool.gateway.serving.answer_parser import (
    AnswerArgumentsDelta,
    AnswerParser,
    AnswerPart,
    AnswerToolCall,
    WholePart,
)
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.response_formatter import ResponseFormatter


class ResponsesFormatter(ResponseFormatter):
    """Writes a response, or the response's events. The output is a list of items, one per text or tool call."""

    def __init__(
        self, model: str, parser: AnswerParser, logprobs: LogprobsFormatter, options: ResponsesOptions
    ) -> None:
        """Write answers of `model`.

        Args:
            model: name of the model in the response.
            parser: finds the tool calls in the answer.
            logprobs: writes log probabilities.
            options: the request's options that the response repeats.
        """
        self._model = model
        self._parser = parser
        self._logprobs_formatter = logprobs
        self._options = options
        self._ended: dict[str, Any] = {}  # the response
        self._request_id = ""
        self._head: dict[str, Any] = {}
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # complete items
        # The open item is thinking, a text or a call, or there is none.
        self._reasoning: list[str] | None = None
        self._text: list[str] | None = None
        self._call: AnswerToolCall | None = None  # with the arguments so far
        self._new_logprobs: list[TokenLogprobs] = []  # not sent yet
        self._text_logprobs: list[dict[str, Any]] = []  # of the open text

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._parser.start(request_id)
        self._request_id = request_id
        head = response_head(self._model, self._options.echoed_fields)
        self._head = {"id": f"resp_{request_id}", **head, **({"emulated": True} if emulated else {})}

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        parts = self._parser.parse_full(result.text, 0, is_cut=result.finish_reason == "length")
        self._text_logprobs = self._format_logprobs(result.logprobs)
        output = [self._item(index, part, "completed") for index, part in enumerate(parts)]
        if parts and isinstance(parts[-1], AnswerToolCall) and result.finish_reason == "length":
            output[-1]["status"] = "incomplete"
        return self._ended_response(output, result)

    def first_events(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def text_event(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._part_events, self._parser.push(text, choice)))

    def add_tokens(self, event: TokenEvent) -> None:
        self._new_logprobs += event.logprobs

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._part_events, self._parser.end(0, is_cut=result.finish_reason == "length"))
        yield self._close_text() + self._close_reasoning()
        yield self._close_call("incomplete" if result.finish_reason == "length" else "completed")
        response = self._ended_response(self._items, result)
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ErrorResponse) -> bytes:
        response = {**self._response("failed", self._items), "error": failure(error)}
        return self._event("response.failed", response=response)

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return error.body()

    def _format_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = self._logprobs_formatter.chat(logprobs)["content"] if logprobs else []
        return content

    def _ended_response(self, output: list[dict[str, Any]], result: GenerateResult) -> dict[str, Any]:
        """The response object after the answer has ended."""
        cut = result.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed", output)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        usage = responses_usage(result.usage, self._parser.reasoning_tokens(result.choices))
        self._ended = {**response, "usage": usage}
        return self._ended

    async def keep(self) -> None:
        await self._options.keep(self._ended)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, **UNANSWERED, "status": status, "output": output}

    def _item(self, index: int, part: WholePart, status: str) -> dict[str, Any]:
        """An item of the output; `status` is "in_progress", "completed" or "incomplete"."""
        if isinstance(part, str):
            content = [output_text(part, self._text_logprobs)] if status == "completed" else []
            message_id = f"msg_{self._request_id}_{index}"
            return {"type": "message", "id": message_id, "status": status, "role": "assistant", "content": content}
        if isinstance(part, ReasoningText):
            content = [reasoning_text(part.text)] if status == "completed" else []
            reasoning_id = f"rs_{self._request_id}_{index}"
            return {"type": "reasoning", "id": reasoning_id, "status": status, "summary": [], "content": content}
        kind, item_id = self._kind(part), self._call_id(part, index)
        if kind.custom:
            call = {"call_id": part.id, "name": part.name, "input": custom_input(part.arguments)}
            return {"type": "custom_tool_call", "id": item_id, "status": status, **call}
        call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
        call |= {"namespace": kind.namespace} if kind.namespace else {}
        return {"type": "function_call", "id": item_id, "status": status, **call}

    def _kind(self, call: AnswerToolCall) -> ToolCallForm:
        return self._options.call_kinds.get(call.name, ToolCallForm())

    def _call_id(self, call: AnswerToolCall, index: int) -> str:
        return f"{'ctc' if self._kind(call).custom else 'fc'}_{self._request_id}_{index}"

    def _part_events(self, part: AnswerPart) -> bytes:
        """Events for a part: more text or thinking, a new tool call, or more arguments for the open call."""
        match part:
            case ReasoningText():
                return self._add_reasoning(part)
            case str():
                before = self._close_reasoning() + self._close_call()
                before += self._open_text() if self._text is None else b""
                assert self._text is not None
                self._text.append(part)
                new, self._new_logprobs = self._format_logprobs(self._new_logprobs), []
                self._text_logprobs += new
                return before + self._text_item_event("response.output_text.delta", delta=part, logprobs=new)
            case AnswerArgumentsDelta():
                return self._add_arguments(part.arguments)
        before = self._close_reasoning() + self._close_text() + self._close_call()
        self._call, index = replace(part, arguments=""), len(self._items)
        item = self._item(index, self._call, "in_progress")
        started = self._event("response.output_item.added", output_index=index, item=item)
        return before + started + self._add_arguments(part.arguments)

    def _add_reasoning(self, part: ReasoningText) -> bytes:
        """Events with more thinking."""
        index, before = len(self._items), b""
        if self._reasoning is None:
            self._reasoning = []
            item = self._item(index, ReasoningText(""), "in_progress")
            before = self._event("response.output_item.added", output_index=index, item=item)
        self._reasoning.append(part.text)
        return before + self._reasoning_event("delta", delta=part.text)

    def _close_reasoning(self) -> bytes:
        if self._reasoning is None:
            return b""
        text, index = "".join(self._reasoning), len(self._items)
        done, item = self._reasoning_event("done", text=text), self._item(index, ReasoningText(text), "completed")
        self._items.append(item)
        self._reasoning = None
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _reasoning_event(self, kind: str, **fields: str) -> bytes:
        index = len(self._items)
        position = {"item_id": f"rs_{self._request_id}_{index}", "output_index": index, "content_index": 0}
        return self._event(f"response.reasoning_text.{kind}", **position, **fields)

    def _add_arguments(self, arguments: str) -> bytes:
        """The event with more arguments of the open call."""
        if self._call is None or not arguments:
            return b""
        self._call = replace(self._call, arguments=self._call.arguments + arguments)
        if self._kind(self._call).custom:  # the text is known once the arguments are whole
            return b""
        return self._event("response.function_call_arguments.delta", **self._call_position(), delta=arguments)

    def _close_call(self, status: str = "completed") -> bytes:
        if self._call is None:
            return b""
        call, position, index = self._call, self._call_position(), len(self._items)
        item = self._item(index, call, status)
        self._items.append(item)
        self._call = None
        if self._kind(call).custom:
            done = self._event("response.custom_tool_call_input.delta", **position, delta=item["input"])
            done += self._event("response.custom_tool_call_input.done", **position, input=item["input"])
        else:
            name = "response.function_call_arguments.done"
            done = self._event(name, **position, name=call.name, arguments=call.arguments)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _call_position(self) -> dict[str, Any]:
        """Id and index of the open call."""
        assert self._call is not None
        index = len(self._items)
        return {"item_id": self._call_id(self._call, index), "output_index": index}

    def _open_text(self) -> bytes:
        self._text = []
        index = len(self._items)
        item = self._event("response.output_item.added", output_index=index, item=self._item(index, "", "in_progress"))
        return item + self._text_item_event("response.content_part.added", part=output_text("", []))

    def _close_text(self) -> bytes:
        if self._text is None:
            return b""
        text, index = "".join(self._text), len(self._items)
        # Some tokens have no text, for example the token that ends an answer.
        self._text_logprobs += self._format_logprobs(self._new_logprobs)
        self._new_logprobs = []
        done = self._text_item_event("response.output_text.done", text=text, logprobs=self._text_logprobs)
        done += self._text_item_event("response.content_part.done", part=output_text(text, self._text_logprobs))
        item = self._item(index, text, "completed")
        self._items.append(item)
        self._text, self._text_logprobs = None, []
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _text_item_event(self, event_type: str, **fields: Any) -> bytes:
        """An event of the open text."""
        index = len(self._items)
        return self._event(
            event_type, item_id=f"msg_{self._request_id}_{index}", output_index=index, content_index=0, **fields
        )

    def _event(self, event_type: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return response_event(event_type, number, **fields)


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """The request's options that the response repeats.

    Attributes:
        echoed_fields: fields of the request that the response repeats.
        call_kinds: how calls come back, by the name of the function.
        keep: stores the response that has ended.
    """

    echoed_fields: Mapping[str, Any]
    call_kinds: Mapping[str, ToolCallForm]
    keep: Callable[[Mapping[str, Any]], Awaitable[None]]


class BackgroundFormatter(ResponsesFormatter):
    """As `ResponsesFormatter`, after the three events that a background response has before the answer."""

    def __init__(
        self,
        head: Mapping[str, Any],
        model: str,
        parser: AnswerParser,
        logprobs: LogprobsFormatter,
        options: ResponsesOptions,
    ) -> None:
        """As `ResponsesFormatter`; `head`: the response's fields independent of the status."""
        super().__init__(model, parser, logprobs, options)
        self._stored_head = head
        self._num_events = 3

    def start(self, request_id: str, *, emulated: bool) -> None:
        super().start(request_id, emulated=emulated)
        self._head |= self._stored_head

    def first_events(self) -> Iterator[bytes]:
        return iter(())
