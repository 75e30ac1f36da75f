"""Finds text, thinking and tool calls in an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.base.answer_formats import DEFAULT_CALL_ID, AnswerFormat, HarmonyCalls, ReasoningFormat
from moonpool.client import Choice
from moonpool.gateway.reasoning_parsers.base import ReasoningParser, ReasoningText
from moonpool.gateway.serving.tool_set import ToolSet
from moonpool.gateway.tool_parsers import answer_reader
from moonpool.gateway.tool_parsers.base import (
    ArgumentsDelta,
    ParsedToolCall,
    ParserOutput,
    ToolCallStart,
    ToolParser,
)
from moonpool.gateway.tool_parsers.json_calls import ForcedToolParser


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A call in an answer. `number` counts the calls of the answer from 0; `arguments` is a JSON object as text."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerArgumentsDelta:
    """The next characters in the arguments for the call with this number."""

    number: int
    arguments: str


AnswerPart = str | ReasoningText | AnswerToolCall | AnswerArgumentsDelta
"""A part of an answer: text, thinking, a call, or more call arguments."""
WholePart = str | ReasoningText | AnswerToolCall
"""A part of a whole answer."""


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers of a request are read.

    Attributes:
        tools: functions that may be called; None = none.
        row: how the model writes answers; None = not known, so that calls come in no form but a schema's.
        reasoning: how the model marks thinking; None = the answers are text only.
        thinks_at_once: the answers begin within the thinking, because the prompt has begun the thinking.
        count_reasoning: returns how many of an answer's tokens are thinking and marks.
        calls_before: calls of the conversation before the answers.
    """

    tools: ToolSet | None = None
    row: AnswerFormat | None = None
    reasoning: ReasoningFormat | None = None
    thinks_at_once: bool = False
    count_reasoning: Callable[[Sequence[int]], int] = len
    calls_before: int = 0


class AnswerParser:
    """Splits the answers of a request into thinking, text and tool calls, and gives numbers and ids to the calls.

    In a stream (`push`, `end`), a call comes as a start, with all arguments or none, then as argument deltas. A whole
    answer is read in the same way, and the parts are joined.
    """

    def __init__(self, reading: AnswerReading = AnswerReading()) -> None:  # frozen
        self._reading = reading
        self._request_id = ""
        self._id_format = reading.row.call_id if reading.row is not None else DEFAULT_CALL_ID
        self._has_channels = reading.row is not None and isinstance(reading.row.calls, HarmonyCalls)
        self._thought_choices: set[int] = set()  # choices with thinking of a channel
        self._thinking: dict[int, ReasoningParser] = {}  # by choice
        self._parsers: dict[int, ToolParser] = {}  # by choice
        self._num_calls: dict[int, int] = {}  # calls that have started, by choice
        self._dropping: dict[int, bool] = {}  # the current call is one too many, by choice

    def afresh(self) -> AnswerParser:
        """A parser for the same answers that has read nothing."""
        return AnswerParser(self._reading)

    def start(self, request_id: str) -> None:
        """Take the request's id, which the ids of the calls are derived from."""
        self._request_id = request_id

    def has_tool_calls(self, choice: int) -> bool:
        """Whether an answer has a tool call."""
        return bool(self._num_calls.get(choice))

    def reasoning_tokens(self, answers: Sequence[Choice]) -> int:
        """Number of thinking tokens in the answers, all of which were parsed."""
        thought = [
            answer
            for index, answer in enumerate(answers)
            if index in self._thought_choices or (index in self._thinking and self._thinking[index].thought)
        ]
        return sum(self._reading.count_reasoning(answer.token_ids) for answer in thought)

    def push(self, text: str, choice: int) -> list[AnswerPart]:
        """Take the next text of an answer. Returns the parts that are certain now."""
        return list(self._called(self._thought(text, choice), choice))

    def end(self, choice: int, *, is_cut: bool = False) -> list[AnswerPart]:
        """The last parts of an answer; `is_cut`: the answer was cut at its last token."""
        thinking = self._thinking.get(choice)
        rest = list(self._called(thinking.end() if thinking is not None else (), choice))
        parser = self._parser(choice)
        return rest if parser is None else [*rest, *self._numbered(parser.end(is_cut=is_cut), choice)]

    def parse_full(self, text: str, choice: int, *, is_cut: bool = False) -> list[WholePart]:
        """The parts of a whole answer, with whole calls. Consecutive texts are one part."""
        parts: list[WholePart] = []
        for part in [*self.push(text, choice), *self.end(choice, is_cut=is_cut)]:
            match part, parts[-1] if parts else None:
                case str(), str() as last:
                    parts[-1] = last + part
                case ReasoningText(more), ReasoningText(last):
                    parts[-1] = ReasoningText(last + more)
                case AnswerArgumentsDelta(), AnswerToolCall() as call:
                    parts[-1] = replace(call, arguments=call.arguments + part.arguments)
                case AnswerArgumentsDelta(), _:
                    raise AssertionError("arguments follow the start of their call")
                case _:
                    parts.append(part)
        return parts

    def _thought(self, text: str, choice: int) -> Sequence[ReasoningText | str]:
        """The thinking and the rest in the next text."""
        if self._reading.reasoning is None or self._has_channels:
            return [text] if text else []
        if choice not in self._thinking:
            is_open = self._reading.thinks_at_once
            self._thinking[choice] = ReasoningParser(self._reading.reasoning, is_open=is_open)
        return self._thinking[choice].push(text)

    def _called(self, parts: Sequence[ReasoningText | str], choice: int) -> Iterator[AnswerPart]:
        """The thinking, and text and calls in the rest."""
        parser = self._parser(choice)
        for part in parts:
            if parser is None or isinstance(part, ReasoningText):
                yield part
            else:
                yield from self._numbered(parser.push(part), choice)

    def _parser(self, choice: int) -> ToolParser | None:
        if choice not in self._parsers and (parser := self._new_parser()) is not None:
            self._parsers[choice] = parser
        return self._parsers.get(choice)

    def _new_parser(self) -> ToolParser | None:
        tools, row = self._reading.tools, self._reading.row
        if row is not None and (tools is not None or row.always):
            return answer_reader(row, {} if tools is None else tools.parameters)
        if tools is None:
            return None
        assert tools.tool_choice is not None, "checked when the tools were offered"
        return ForcedToolParser(tools.tool_choice, tools.names)

    def _numbered(self, output: Sequence[ParserOutput], choice: int) -> Iterator[AnswerPart]:
        for part in output:
            match part:
                case str():
                    yield part
                case ReasoningText():
                    self._thought_choices.add(choice)
                    yield part
                case ParsedToolCall(name, arguments):
                    yield from self._start_call(choice, name, arguments)
                case ToolCallStart(name, number):
                    yield from self._start_call(choice, name, "", number)
                case ArgumentsDelta(text):
                    if not self._dropping.get(choice):
                        yield AnswerArgumentsDelta(self._num_calls[choice] - 1, text)

    def _start_call(
        self, choice: int, name: str, arguments: str, written: int | None = None
    ) -> Iterator[AnswerToolCall]:
        """The next call, unless the answer may have only one call and has that call."""
        number = self._num_calls.get(choice, 0)
        tools = self._reading.tools
        self._dropping[choice] = bool(number) and tools is not None and not tools.parallel
        if not self._dropping[choice]:
            self._num_calls[choice] = number + 1
            counted = self._reading.calls_before + number if written is None else written
            yield AnswerToolCall(number, self._call_id(choice, number, name, counted), name, arguments)

    def _call_id(self, choice: int, number: int, name: str, counted: int) -> str:
        digits = hashlib.sha256(f"{self._request_id}/{choice}/{number}".encode()).hexdigest()
        return self._id_format.format(digits=digits, name=name, number=counted)
