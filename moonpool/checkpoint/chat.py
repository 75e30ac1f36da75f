"""Chat templates: a conversation and the functions that the model may call become the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from pydantic_core import from_json

from moonpool.errors import CheckpointError, InvalidRequest


class ChatTemplate:
    """A checkpoint's chat template, in a sandbox. Stateless; may be used from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile `source`; `special` are `bos_token` and the like, as the template sees them.

        Raises:
            CheckpointError: it is no valid template.
        """
        self.source = source
        self._special = dict(special)
        environment = _environment()
        try:
            self._template: Template = environment.from_string(source)
            self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: each with `role` and `content`; an assistant's turn may have `tool_calls` in OpenAI's form, a
                tool's turn has its `tool_call_id`.
            tools: functions that the model may call: OpenAI's definitions.
            add_generation_prompt: the text ends with what begins an answer.

        Raises:
            InvalidRequest: the template refuses the messages or takes no tools; names what is wrong.
        """
        if tools and not self._takes_tools:
            raise InvalidRequest("tools", "this model's chat template takes no tools")
        turns = [_turn(index, _plain(message)) for index, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=turns,
                tools=_plain(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from None


def _turn(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A turn as templates take it: arguments of calls are objects there, and text in OpenAI's form."""
    for number, call in enumerate(message.get("tool_calls", ())):
        function, place = call["function"], f"messages.{index}.tool_calls.{number}.function.arguments"
        function["arguments"] = _json_object(function["arguments"], place)
    return message


def _json_object(text: str, place: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InvalidRequest: it is none; names `place`.
    """
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(place, f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(place, "must be a JSON object")
    return found


class _Generation(Extension):
    """Lets `{% generation %}` through, with which some templates mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> SandboxedEnvironment:
    """A sandbox with the filters and functions that transformers gives to templates.

    Source: `transformers/utils/chat_template_utils.py`. The sandbox refuses access to Python's internals and changes
    of its arguments; a template can compute text and nothing else.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """Rebuild `value` out of plain JSON types: objects with methods have no place in a sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise InvalidRequest("messages", f"must be plain JSON data, not {type(value).__name__}")
