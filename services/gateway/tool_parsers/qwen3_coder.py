"""Qwen3-Coder's tool calls: `<function=NAME>` with a `<parameter=NAME>` for each argument, inside `<tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moonpool.grammar import AnswerGrammar, text_expressions
from services.gateway.tool_parsers.base import (
    DelimitedToolParser,
    ParsedToolCall,
    ToolParameters,
    ToolParserFamily,
    named_parameters,
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


_PARAMETER_BEGIN, _PARAMETER_END, _FUNCTION_END = "<parameter={}>\n", "\n</parameter>\n", "</function>\n"


def _hold(answer: AnswerGrammar, tools: ToolParameters) -> None:
    end = answer.mark("</tool_call>")
    answer.add("<tool_call>", [f"{_function(answer, *each)} {end}" for each in tools.items()])


def _function(answer: AnswerGrammar, name: str, parameters: Mapping[str, Any]) -> str:
    """The form of a function and the function's arguments; all in the order of the schema."""
    begin, named = answer.text(f"\n<function={name}>\n"), named_parameters(parameters)
    if named is None:
        return f"{begin} {answer.text_until(_FUNCTION_END)}"
    members, required = named
    arguments: list[str] = []
    for member, schema in members.items():
        form = f"{answer.text(_PARAMETER_BEGIN.format(member))} {_argument(answer, schema)}"
        arguments.append(form if member in required else f"({form})?")
    return " ".join([begin, *arguments, answer.text(_FUNCTION_END)])


def _argument(answer: AnswerGrammar, schema: Mapping[str, Any]) -> str:
    """The form of an argument: text unchanged, anything else as JSON."""
    if schema.get("type") != "string":
        return f"{answer.json(schema)} {answer.text(_PARAMETER_END)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        return f"({' | '.join(answer.text(f'{choice}{_PARAMETER_END}') for choice in choices)})"
    return answer.text_until(_PARAMETER_END, text_expressions(schema))


QWEN3_CODER = ToolParserFamily(Qwen3CoderToolParser, lambda template: "<function=" in template, _hold)
