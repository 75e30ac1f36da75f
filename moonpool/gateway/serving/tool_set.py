"""The functions that an answer may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.base.answer_formats import AnswerFormat
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar
from moonpool.base.json_schema import SchemaWordError, close_objects, moved_schema
from moonpool.gateway.tool_parsers import forced_grammar, strict_grammar

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_FORCED_CALLS = 16
"""Calls of an answer that must call. Without a bound, a small model may add calls until the answer is cut."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Functions that the model may call.

    Attributes:
        definitions: OpenAI's definitions, as chat templates take them.
        parallel: an answer may have more than one call.
        tool_choice: the function that an answer must call; "" for any function, None for no obligation.
    """

    definitions: Sequence[Mapping[str, Any]]
    parallel: bool = True
    tool_choice: str | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(definition["function"]["name"] for definition in self.definitions)

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """JSON schemas of the parameters by function."""
        return {definition["function"]["name"]: definition["function"]["parameters"] for definition in self.definitions}

    @property
    def strict(self) -> frozenset[str]:
        """Names of functions whose calls must follow their schemas, also if no call is forced."""
        return frozenset(
            definition["function"]["name"] for definition in self.definitions if definition["function"].get("strict")
        )

    def grammar(self, row: AnswerFormat, answer: AnswerGrammar) -> str:
        """Lark grammar for answers that must call, or in which strict functions' calls follow their schemas.

        "" if no call is forced and no function is strict. Objects of a forced call have only the named members, as in
        `schema`.

        Raises:
            InvalidRequest: the parameters of a function cannot be followed; names `tools`.
        """
        if self.tool_choice is None and not self.strict:
            return ""
        try:
            if self.tool_choice is not None:
                names = [self.tool_choice] if self.tool_choice else list(self.parameters)
                forced = {name: close_objects(self.parameters[name]) for name in names}
                return forced_grammar(row, answer, forced, 1 if self.tool_choice else self.most_calls)
            anything = {"type": "object"}
            held = {name: schema if name in self.strict else anything for name, schema in self.parameters.items()}
            return strict_grammar(row, answer, held)
        except SchemaWordError as error:
            raise InvalidRequest("tools", str(error)) from None

    @property
    def most_calls(self) -> int:
        """Calls that a forced answer may have."""
        return MAX_FORCED_CALLS if self.parallel else 1

    def schema(self) -> dict[str, Any]:
        """JSON schema for an answer that must call: a function's arguments, or a list of calls.

        For models whose own form of calls is not known.

        Objects have only the named members, unless `additionalProperties` says otherwise: small models would continue
        with further members until the answer is cut.
        """
        parameters = {name: close_objects(schema) for name, schema in self.parameters.items()}
        if self.tool_choice:
            return dict(parameters[self.tool_choice])
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in parameters
        ]
        definitions = {name: moved_schema(schema, f"/$defs/{name}") for name, schema in parameters.items()}
        return {
            "type": "array",
            "items": {"anyOf": calls},
            "minItems": 1,
            "maxItems": self.most_calls,
            "$defs": definitions,
        }


def tool_definition(
    field: str, name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool = False
) -> dict[str, Any]:
    """OpenAI's definition of a function, as chat templates take definitions.

    `strict`: calls must follow the parameters.

    Raises:
        InvalidRequest: the name is wrong; names `field`.
    """
    if not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{field}.name", "must have 1 to 64 letters, digits, _, . and -")
    function: dict[str, Any] = {"name": name, **({} if description is None else {"description": description})}
    function |= {"parameters": parameters or _NO_PARAMETERS, **({"strict": True} if strict else {})}
    return {"type": "function", "function": function}


def checked_tools(
    definitions: Sequence[Mapping[str, Any]],
    tool_choice: str | None,
    *,
    parallel: bool,
) -> ToolSet | None:
    """The functions of a request; None without functions.

    Raises:
        InvalidRequest: two functions have the same name, or `tool_choice` names none of them.
    """
    if tool_choice == "" and len(definitions) == 1:
        tool_choice = str(definitions[0]["function"]["name"])
    tools = ToolSet(definitions, parallel, tool_choice)
    if len(tools.names) < len(definitions):
        raise InvalidRequest("tools", "two functions have the same name")
    if tool_choice is not None and tool_choice not in ({""} if definitions else set()) | tools.names:
        raise InvalidRequest("tool_choice", "must name a function of tools")
    return tools if definitions else None
