"""Tools of a request, and how their calls come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from moonpool.base.errors import InvalidRequest
from moonpool.gateway.serving.body import Body, FailFastList
from moonpool.gateway.serving.offered_tools import FunctionBody
from moonpool.gateway.serving.tolerance import DEFERRED
from moonpool.gateway.tool_parsers.base import parse_json

_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesTool(Body):
    """A function, a custom tool with a text as argument, or several functions in a namespace."""

    ignored = ("cache_control", "format", "output_schema", *DEFERRED)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"allowed_callers": (["direct"],), "async": (False,)}

    type: Literal["function", "custom", "namespace"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: FailFastList[ResponsesTool] | None = None

    def definitions(self, field: str) -> Iterator[dict[str, Any]]:
        """The functions as chat templates take functions. A custom tool is a function with one text.

        Raises:
            InvalidRequest: a name is missing or wrong; names the field.
        """
        if self.type == "namespace":
            for index, tool in enumerate(self.tools or ()):
                yield from tool.definitions(f"{field}.tools.{index}")
        else:
            if self.name is None:
                raise InvalidRequest(f"{field}.name", "is missing")
            given = _CUSTOM_PARAMETERS if self.type == "custom" else self.parameters
            function = FunctionBody(name=self.name, description=self.description, parameters=given, strict=self.strict)
            yield function.definition(field)

    def call_kinds(self) -> Iterator[tuple[str, ToolCallForm]]:
        """How calls of the functions come back, by name."""
        for tool in self.tools or ():
            yield from ((name, replace(kind, namespace=self.name or "")) for name, kind in tool.call_kinds())
        if self.name is not None and self.type != "namespace":
            yield self.name, ToolCallForm(custom=self.type == "custom")

    def echoed(self) -> dict[str, Any]:
        """The tool in the response."""
        if self.type != "function":
            return self.model_dump(by_alias=True, exclude_unset=True)
        given = self.model_dump(include={"type", "name", "description", "parameters"})
        return {**given, "strict": bool(self.strict)}


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a call comes back.

    Attributes:
        custom: as a custom tool's call, with a text in place of arguments.
        namespace: the namespace of the function; "" for none.
    """

    custom: bool = False
    namespace: str = ""


def custom_input(arguments: str) -> str:
    """The text in a custom tool's call, whose arguments have the text as `input`."""
    value = parse_json(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
