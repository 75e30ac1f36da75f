"""DeepSeek's tool calls: V3 and R1 write the arguments in a code block, V3.1 as they are."""

from __future__ import annotations

import re

from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.base import (
    DelimitedToolParser,
    ParsedToolCall,
    ToolParameters,
    ToolParserFamily,
    parse_json,
    tool_call_from_json,
)

_CALL = re.compile(
    r"\s*(?:function<｜tool▁sep｜>(?P<old>[\w.-]+)\s*```json\s*|(?P<new>[\w.-]+)<｜tool▁sep｜>\s*)"
    r"(?P<arguments>\{.*\})\s*(?:```)?\s*",
    re.DOTALL,
)


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekToolParser(DelimitedToolParser):
    """Finds calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""

    def __init__(self, tools: ToolParameters) -> None:
        """Start an answer; `tools` are the functions that may be called."""
        super().__init__(_BEGIN, _END, (_CALLS_BEGIN, _CALLS_END))
        self._tools = tools

    def read(self, text: str) -> ParsedToolCall | None:
        match = _CALL.fullmatch(text)
        if match is None:
            return None
        name, arguments = match["old"] or match["new"], parse_json(match["arguments"])
        return tool_call_from_json({"name": name, "arguments": arguments}, self._tools) if arguments else None


def _hold(answer: AnswerGrammar, tools: ToolParameters) -> None:
    separator, end, fence = answer.mark(_SEPARATOR), answer.mark(_END), answer.text("\n```")
    forms: list[str] = []
    for name, parameters in tools.items():
        arguments = answer.form([answer.json(parameters)])
        forms.append(f"{answer.text(name)} {separator} {arguments} {end}")
        block = answer.text(f"{name}\n```json\n")
        forms.append(f'"function" {separator} {block} {arguments} {fence} {end}')
    answer.add(_BEGIN, forms)
    answer.pass_mark(_CALLS_BEGIN)
    answer.pass_mark(_CALLS_END)


DEEPSEEK = ToolParserFamily(DeepSeekToolParser, lambda template: "tool▁call▁begin" in template, _hold)
