"""DeepSeek's tool calls: V3 and R1 write the arguments in a code block, V3.1 as they are."""

from __future__ import annotations

import re

from services.gateway.tool_parsers.base import (
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


class DeepSeekToolParser(DelimitedToolParser):
    """Finds calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""

    def __init__(self, tools: ToolParameters) -> None:
        """Start an answer; `tools` are the functions that may be called."""
        around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        super().__init__("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", around)
        self._tools = tools

    def read(self, text: str) -> ParsedToolCall | None:
        match = _CALL.fullmatch(text)
        if match is None:
            return None
        name, arguments = match["old"] or match["new"], parse_json(match["arguments"])
        return tool_call_from_json({"name": name, "arguments": arguments}, self._tools) if arguments else None


DEEPSEEK = ToolParserFamily(DeepSeekToolParser, lambda template: "tool▁call▁begin" in template)
