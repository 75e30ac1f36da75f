"""Qwen3-Coder's tool calls: `<function=NAME>` with a `<parameter=NAME>` for each argument, inside `<tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar, text_expressions
from moonpool.gateway.tool_parsers.base import (
    DelimitedToolParser,
    ObjectForm,
    ParsedToolCall,
    ToolParameters,
    ToolParserFamily,
    object_forms,
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
        types = _types(self._tools[match["name"]])
        arguments = {
            found["name"]: _value(found["value"], types.get(found["name"]))
            for found in _PARAMETER.finditer(match["body"])
        }
        return ParsedToolCall(match["name"], json.dumps(arguments, ensure_ascii=False))


def _types(parameters: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Schemas of the parameters by name; of several forms, the first that has the parameter."""
    try:
        forms = object_forms(parameters)
    except InvalidRequest:  # not strict, so nobody has checked the schema
        return parameters.get("properties") or {}
    return {name: schema for form in reversed(forms) for name, schema in form.members.items()}


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
    begin = answer.text(f"\n<function={name}>\n")
    return f"{begin} ({' | '.join(_form(answer, object_form) for object_form in object_forms(parameters))})"


def _form(answer: AnswerGrammar, form: ObjectForm) -> str:
    if form.is_open:
        return answer.text_until(_FUNCTION_END)
    arguments: list[str] = []
    for member, schema in form.members.items():
        argument = f"{answer.text(_PARAMETER_BEGIN.format(member))} {_argument(answer, schema)}"
        arguments.append(argument if member in form.required else f"({argument})?")
    return " ".join([*arguments, answer.text(_FUNCTION_END)])


def _argument(answer: AnswerGrammar, schema: Mapping[str, Any]) -> str:
    """The form of an argument: text unchanged, anything else as JSON."""
    if schema.get("type") != "string":
        return f"{answer.json(schema)} {answer.text(_PARAMETER_END)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        return f"({' | '.join(answer.text(f'{choice}{_PARAMETER_END}') for choice in choices)})"
    return answer.text_until(_PARAMETER_END, text_expressions(schema))


QWEN3_CODER = ToolParserFamily(Qwen3CoderToolParser, lambda template: "<function=" in template, _hold)
