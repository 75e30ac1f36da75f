"""gpt-oss's answers: messages of several channels, of which some are thinking, some calls, and some text.

`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.` A message to a function is
a call: `<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import re

from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.tool_parsers.base import (
    ArgumentsDelta,
    ParserOutput,
    ToolCallStart,
    ToolParameters,
    ToolParser,
    marker_overlap,
)
from moonpool.gateway.tool_parsers.json_calls import ToolCallJson

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
_ENDS = (END, "<|return|>", "<|call|>", START, CHANNEL)
"""What ends a message; the last two begin another one whose end was forgotten."""
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_MAX_HEADER_CHARS = 400
_HEADERS = ("assistant", "to=", CHANNEL, MESSAGE, START, "<|constrain|>")
_THINKING = ("analysis",)
_BETWEEN = "\n\n"
"""Between two messages of one kind."""


class HarmonyParser(ToolParser):
    """Reads the messages of an answer. The prompt ends with the beginning of the first header."""

    def __init__(self, tools: ToolParameters) -> None:
        """Start an answer; `tools` are the functions that may be called."""
        self._tools = tools
        self._held = ""
        self._state = "header"  # then "text", "thinking", "call", "skipped"
        self._json: ToolCallJson | None = None
        self._name = ""  # of the call
        self._called = False  # the call has been passed on
        self._told = 0  # characters of its arguments that have been passed on
        self._kind = ""  # of the last message with text: "text" or "thinking"
        self._begun = False  # the message has shown something
        self._space = ""

    def push(self, text: str) -> list[ParserOutput]:
        self._held += text
        output: list[ParserOutput] = []
        while self._step(output):
            pass
        return output

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        output: list[ParserOutput] = []
        if self._state in ("text", "thinking"):
            self._show(self._held, output)
        elif self._state == "header" and not self._kind and not self._is_header(self._held):
            self._state = "text"
            self._show(self._held, output)
        if self._state == "text" and self._space and self._begun:
            output.append(self._space)
        self._held = self._space = ""
        return output

    def _step(self, output: list[ParserOutput]) -> bool:
        """Read on. Returns whether there may be more."""
        if self._state == "header":
            return self._read_header()
        if self._state == "call":
            return self._read_call(output)
        return self._read_body(output)

    def _is_header(self, text: str) -> bool:
        """Whether a text may be the beginning of a header."""
        stripped = text.lstrip()
        return any(stripped.startswith(sign) or sign.startswith(stripped) for sign in _HEADERS)

    def _read_header(self) -> bool:
        before, mark, behind = self._held.partition(MESSAGE)
        if not self._is_header(self._held) or (not mark and len(self._held) > _MAX_HEADER_CHARS):
            self._open("text")
            return True
        if not mark:
            return False
        before = before.rpartition(START)[2]
        recipient, channel = _RECIPIENT.search(before), _CHANNEL.search(before)
        thinks = channel is not None and channel[1] in _THINKING
        self._held = behind
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if name in self._tools:
            self._json = ToolCallJson((name,))
            self._state, self._name, self._called = "call", name, False
        else:
            self._open("thinking" if thinks else "text")
        return True

    def _open(self, state: str) -> None:
        """Begin a message with text."""
        self._state, self._begun, self._space = state, False, ""

    def _read_body(self, output: list[ParserOutput]) -> bool:
        found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if not found:
            certain = len(self._held) - max(marker_overlap(self._held, mark) for mark in _ENDS)
            text, self._held = self._held[:certain], self._held[certain:]
            self._show(text, output)
            return False
        at, mark = min(found)
        self._show(self._held[:at], output)
        self._end_message(at, mark)
        return True

    def _end_message(self, at: int, mark: str) -> None:
        self._held = self._held[at:] if mark in (START, CHANNEL) else self._held[at + len(mark) :]
        self._state, self._space = "header", ""

    def _show(self, text: str, output: list[ParserOutput]) -> None:
        """Show text of a message; white space at its ends is dropped."""
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            parted = _BETWEEN if self._kind == self._state and not self._begun else self._space
            said = f"{parted}{shown}"
            output.append(ReasoningText(said) if self._state == "thinking" else said)
            self._kind, self._begun, self._space = self._state, True, ""
        self._space += text[len(shown) :]

    def _read_call(self, output: list[ParserOutput]) -> bool:
        """The arguments: JSON, whatever marks its texts hold."""
        assert self._json is not None, "a call is being read"
        if not self._called:
            stripped = self._held.lstrip()
            if not stripped:
                return False
            self._held, self._called, self._told = stripped, True, 0
            output.append(ToolCallStart(self._name))
        end = self._json.find_end(self._held) if self._held.startswith("{") else None
        if end is None and not self._held.startswith("{"):
            return self._read_broken(output)
        told = len(self._held) if end is None else end
        if told > self._told:
            output.append(ArgumentsDelta(self._held[self._told : told]))
            self._told = told
        if end is None:
            return False
        self._held, self._state, self._kind = self._held[end:], "skipped", ""
        return True

    def _read_broken(self, output: list[ParserOutput]) -> bool:
        """Arguments that are no JSON come as they are, up to the end of the message."""
        found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        certain = min(found)[0] if found else len(self._held) - max(marker_overlap(self._held, m) for m in _ENDS)
        if certain > self._told:
            output.append(ArgumentsDelta(self._held[self._told : certain]))
            self._told = certain
        if not found:
            return False
        self._end_message(*min(found))
        self._kind = ""
        return True


def harmony_grammar(answer: AnswerGrammar, tools: ToolParameters) -> str:
    """The grammar of an answer whose calls follow their schemas."""
    call = answer.form(_calls(answer, tools))
    again = f"{answer.mark(END)} {answer.mark(START)} {answer.text('assistant')}"
    channel = answer.form([answer.text(name) for name in ("analysis", "commentary", "final")])
    message = answer.form([f"{answer.mark(CHANNEL)} {channel} {answer.mark(MESSAGE)} TEXT"])
    return answer.lark_of(answer.form([f"{message} ({again} {message})* ({again} {call})?", call]))


def harmony_forced(answer: AnswerGrammar, tools: ToolParameters) -> str:
    """The grammar of an answer that has to call: thinking, if the model likes, and one call, which ends the answer."""
    call = answer.form(_calls(answer, tools))
    begin = f"{answer.mark(CHANNEL)} {answer.text('analysis')} {answer.mark(MESSAGE)}"
    again = f"{answer.mark(END)} {answer.mark(START)} {answer.text('assistant')}"
    return answer.lark_of(answer.form([f"({begin} TEXT {again})? {call}"]))


def _calls(answer: AnswerGrammar, tools: ToolParameters) -> list[str]:
    kind = f"{answer.text(' ')} {answer.mark('<|constrain|>')} {answer.text('json')}"
    commentary, message = f"{answer.mark(CHANNEL)} {answer.text('commentary')}", answer.mark(MESSAGE)
    found = []
    for name, schema in tools.items():
        arguments, to = answer.form([answer.json(schema)]), answer.text(f" to=functions.{name}")
        found += [
            f"{commentary} {to} {kind} {message} {arguments}",
            f"{to} {commentary} {kind} {message} {arguments}",
        ]
    return found
