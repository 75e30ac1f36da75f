"""The functions that a client offers to the model, and what `tool_choice` makes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_schema import close_objects
from moonpool.gateway.serving.body import Body, FailFastList, TextOr
from moonpool.gateway.serving.tolerance import DEFERRED
from moonpool.gateway.serving.tool_set import ToolSet, checked_tools, tool_definition


class FunctionBody(Body):
    """A function that the model may call; `parameters` is a JSON schema. `strict` closes the objects of the schema."""

    ignored = DEFERRED

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self, field: str) -> dict[str, Any]:
        """The function as chat templates take functions.

        Raises:
            InvalidRequest: the name is wrong; names `field`.
        """
        return tool_definition(
            field,
            self.name,
            self.description,
            strict_parameters(self.parameters, self.strict),
            strict=bool(self.strict),
        )


def strict_parameters(parameters: dict[str, Any] | None, strict: bool | None) -> Mapping[str, Any] | None:
    """Parameters of a function. If the function is strict, objects have only the members that are named."""
    return close_objects(parameters) if strict and parameters is not None else parameters


class ToolBody(Body):
    """A tool. Only functions are supported."""

    ignored = ("cache_control", *DEFERRED)

    type: Literal["function"]
    function: FunctionBody


class FunctionNameBody(Body):
    """A function that `tool_choice` names."""

    name: str


class AllowedToolBody(Body):
    """A function of `allowed_tools`: chat names the function in an object, responses beside the type."""

    type: Literal["function"] = "function"
    function: FunctionNameBody | None = None
    name: str | None = None


class AllowedToolsBody(Body):
    """The functions that an answer may call, and whether the answer must call one."""

    mode: Literal["auto", "required"] | None = None
    tools: FailFastList[AllowedToolBody] | None = None


class ToolChoiceBody(AllowedToolsBody):
    """`tool_choice` as an object: one function, or several. The members of `allowed_tools` may stand in the object."""

    type: Literal["function", "allowed_tools"]
    function: FunctionNameBody | None = None
    name: str | None = None
    allowed_tools: AllowedToolsBody | None = None

    def forced(self) -> str | None:
        """The function that an answer must call; "" for any of the allowed functions, None for no obligation.

        Raises:
            InvalidRequest: the choice names no function; names `tool_choice.function.name`.
        """
        if self.type == "allowed_tools":
            return "" if (self.allowed_tools or self).mode == "required" else None
        name = self.function.name if self.function is not None else self.name
        if not name:
            raise InvalidRequest("tool_choice.function.name", "is missing")
        return name

    def allowed(self) -> Collection[str] | None:
        """Names of the functions that an answer may call; None for all.

        Raises:
            InvalidRequest: a tool has no name; names `tool_choice.allowed_tools`.
        """
        if self.type == "function":
            return None
        tools = (self.allowed_tools or self).tools or []
        names = [tool.function.name if tool.function is not None else tool.name for tool in tools]
        if not names or not all(names):
            raise InvalidRequest("tool_choice.allowed_tools.tools", "must name functions")
        return frozenset(name for name in names if name)


ToolChoice = TextOr[ToolChoiceBody]


def chosen_tools(
    definitions: Sequence[dict[str, Any]], choice: str | ToolChoiceBody | None, *, parallel: bool
) -> ToolSet | None:
    """The functions that the model may call; None without functions, or if `choice` is "none".

    Raises:
        InvalidRequest: the choice is unknown or names no function of `definitions`; names `tool_choice`.
    """
    if isinstance(choice, ToolChoiceBody):
        allowed, forced = choice.allowed(), choice.forced()
        if allowed is not None:
            known = {definition["function"]["name"] for definition in definitions}
            if not known.issuperset(allowed):
                raise InvalidRequest("tool_choice.allowed_tools.tools", "must name functions of tools")
            definitions = [definition for definition in definitions if definition["function"]["name"] in allowed]
        return checked_tools(definitions, forced, parallel=parallel)
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice", "must be 'auto', 'none', 'required' or name a function")
    offered = [] if choice == "none" else definitions
    return checked_tools(offered, "" if choice == "required" else None, parallel=parallel)
