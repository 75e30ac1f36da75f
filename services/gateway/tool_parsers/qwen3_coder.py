"""Qwen3-Coder's tool calls: `<function=NAME>` with a `<parameter=NAME>` for each argument, inside `<tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.tool_parsers.base import (
    DelimitedToolParser,
    ParsedToolCall,
    ToolParameters,
    ToolParserFamily,
    parse_json,
)

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\s]+)>(?P<body>.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=\s*<parameter=)|$)", re.DOTALL
)


class Qwen3CoderToolParser(DelimitedToolParser):
    """Finds calls between `<tool_call>` and `</tool_call>`."""

    def __init__(self, tools: ToolParameters) -> None:
        """Start an answer; `tools` are the functions that may be called, with the types of their parameters."""
        super().__init__("<tool_call>", "</tool_call>")
        self._tools = tools

    def read(self, text: str) -> ParsedToolCall | None:
        match = _FUNCTION.fullmatch(text)
        if match is None or match["name"] not in self._tools:
            return None
        types = self._tools[match["name"]].get("properties") or {}
        arguments = {
            found["name"]: _value(found["value"], types.get(found["name"]))
            for found in _PARAMETER.finditer(match["body"])
        }
        return ParsedToolCall(match["name"], json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Read the text of an argument: text where the schema has text, else JSON if the text is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    value = parse_json(text)
    return text if value is None and text.strip() != "null" else value


QWEN3_CODER = ToolParserFamily(Qwen3CoderToolParser, lambda template: "<function=" in template)
