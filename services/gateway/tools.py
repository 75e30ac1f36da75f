"""Functions that a request lets the model call: what it says of them, and how the calls come back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.errors import InvalidRequest
from services.gateway.calls import DEFAULT_IDS, FAMILIES, CallFinder, ForcedCalls
from services.gateway.objects import FoundCall
from services.gateway.telling import Arguments, CallBegins, Found

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that may be called.

    Attributes:
        definitions: in OpenAI's form, as chat templates take them.
        several: an answer may call more than one.
        forced: what an answer has to call: a function by its name, "" = any of them, None = it need not.
    """

    definitions: Sequence[Mapping[str, Any]]
    several: bool = True
    forced: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(definition["function"]["name"] for definition in self.definitions)

    def schema(self) -> dict[str, Any]:
        """What an answer is made to be that has to call: the arguments, or a list of calls.

        Raises:
            InvalidRequest: naming `tools`: references in parameters do not hold within the list's schema.
        """
        parameters = {it["function"]["name"]: it["function"]["parameters"] for it in self.definitions}
        if self.forced:
            return dict(parameters[self.forced])
        if any("$defs" in schema or "definitions" in schema for schema in parameters.values()):
            raise InvalidRequest("tools", "with $defs in parameters, tool_choice can name a function, not require any")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in parameters.items()
        ]
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if self.several else {"maxItems": 1})}


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer: its number there, its id, the function, and the arguments: a JSON object as text."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Further characters of the arguments of a call that has begun, by its number."""

    number: int
    arguments: str


Piece = str | Call | CallPart
"""A part of an answer: text or a call."""


def definition(place: str, name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function as chat templates take it.

    Raises:
        InvalidRequest: its name is wrong; names `place`.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.name", "must have 1 to 64 letters, digits, _, . and -")
    told = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **told, "parameters": parameters or _NO_PARAMETERS}}


def checked(definitions: Sequence[Mapping[str, Any]], forced: str | None, *, several: bool) -> Tools | None:
    """The functions of a request; None when there are none.

    Raises:
        InvalidRequest: two have the same name, or what is to be called is not among them.
    """
    if forced == "" and len(definitions) == 1:
        forced = str(definitions[0]["function"]["name"])
    tools = Tools(definitions, several, forced)
    if len(tools.names) < len(definitions):
        raise InvalidRequest("tools", "two of them have the same name")
    if forced is not None and forced not in ({""} if definitions else set()) | tools.names:
        raise InvalidRequest("tool_choice", "calls what is not among the tools")
    return tools if definitions else None


class Reading:
    """The pieces of a request's answers, as they come: calls too, where the request has tools.

    In a stream (`push`, `end`) a call comes as its beginning, with all its arguments or none, and parts of these.
    """

    def __init__(self, tools: Tools | None, family: str) -> None:
        """`family` is one of `FAMILIES`; any when there are no tools."""
        self._tools = tools
        self._family = FAMILIES.get(family)
        self._request_id = ""
        self._ids = self._family.ids if self._family is not None else DEFAULT_IDS
        self._finders: dict[int, CallFinder | ForcedCalls] = {}
        self._calls: dict[int, int] = {}  # how many have begun, by choice
        self._dropped: dict[int, bool] = {}  # the last that has begun is one too many

    def begin(self, request_id: str) -> None:
        """Take the request's id, from which ids of calls are made."""
        self._request_id = request_id

    def called(self, choice: int) -> bool:
        """Whether an answer has called something."""
        return bool(self._calls.get(choice))

    def push(self, text: str, choice: int) -> list[Piece]:
        """The pieces that a text of an answer makes certain."""
        if self._tools is None:
            return [text] if text else []
        return list(self._numbered(self._finder(self._tools, choice).push(text), choice))

    def end(self, choice: int) -> list[Piece]:
        """The last pieces of an answer."""
        if self._tools is None:
            return []
        return list(self._numbered(self._finder(self._tools, choice).end(), choice))

    def whole(self, text: str, choice: int) -> list[str | Call]:
        """The pieces of a whole answer; texts that follow one another are one, and calls are whole."""
        if self._tools is not None:
            self._finders[choice] = self._new_finder(self._tools, piecewise=False)
        pieces: list[str | Call] = []
        for piece in [*self.push(text, choice), *self.end(choice)]:
            assert not isinstance(piece, CallPart), "calls are whole"
            if pieces and isinstance(piece, str) and isinstance(pieces[-1], str):
                pieces[-1] += piece
            else:
                pieces.append(piece)
        return pieces

    def _finder(self, tools: Tools, choice: int) -> CallFinder | ForcedCalls:
        if choice not in self._finders:
            self._finders[choice] = self._new_finder(tools, piecewise=True)
        return self._finders[choice]

    def _new_finder(self, tools: Tools, *, piecewise: bool) -> CallFinder | ForcedCalls:
        if tools.forced is not None:
            return ForcedCalls(tools.forced, tools.names, piecewise=piecewise)
        assert self._family is not None
        return CallFinder(self._family, tools.names, piecewise=piecewise)

    def _numbered(self, found: Sequence[Found], choice: int) -> Iterator[Piece]:
        for piece in found:
            match piece:
                case str():
                    yield piece
                case FoundCall(name, arguments):
                    yield from self._begin(choice, name, arguments)
                case CallBegins(name):
                    yield from self._begin(choice, name, "")
                case Arguments(text):
                    if not self._dropped.get(choice):
                        yield CallPart(self._calls[choice] - 1, text)

    def _begin(self, choice: int, name: str, arguments: str) -> Iterator[Call]:
        """The next call, unless it is one too many."""
        number = self._calls.get(choice, 0)
        self._dropped[choice] = bool(number) and self._tools is not None and not self._tools.several
        if not self._dropped[choice]:
            self._calls[choice] = number + 1
            yield Call(number, self._id(choice, number), name, arguments)

    def _id(self, choice: int, number: int) -> str:
        return self._ids.format(hashlib.sha256(f"{self._request_id}/{choice}/{number}".encode()).hexdigest())
