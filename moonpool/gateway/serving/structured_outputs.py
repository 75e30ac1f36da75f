"""Structured outputs: translates the response formats of other servers to the SDK's two fields.

OpenAI and Anthropic have a response format, vLLM `structured_outputs` and the older `guided_*` fields, SGLang and
llama.cpp a field for each kind of format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import parse_json
from moonpool.base.json_schema import WHITESPACE, close_objects, ignored_words
from moonpool.gateway.serving.body import Body, FailFastList, TextOr
from moonpool.gateway.serving.structural_tags import STRUCTURAL_TAG, tag_text

FormatAndGrammar = tuple[str, str]
"""`response_format` and `grammar` of `SamplingParams`."""
UNCONSTRAINED: FormatAndGrammar = ("", "")


class SchemaBody(Body):
    """An object that has a JSON schema. Schema words without effect are ignored with a warning."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        yield from super().ignored_fields(place)
        yield from (f"{place}schema.{word}" for word in ignored_words(self.schema_ or {}))


class JsonSchemaBody(SchemaBody):
    """`json_schema` of a response format. The name and the description only label the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormatBody(SchemaBody):
    """OpenAI's `response_format`. As in llama.cpp, the schema may stand beside the type, too."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaBody | None = None
    format: dict[str, Any] | None = None
    structures: FailFastList[dict[str, Any]] | None = None
    triggers: FailFastList[str] | None = None

    def format_and_grammar(self, field: str) -> FormatAndGrammar:
        """The SDK's fields.

        Raises:
            InvalidRequest: the schema is missing; names the schema below `field`.
        """
        if self.type == "text":
            return UNCONSTRAINED
        if self.type == STRUCTURAL_TAG:
            given_tag = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
            return STRUCTURAL_TAG, tag_text(field, given_tag)
        given = self.json_schema or JsonSchemaBody()
        schema = self.schema_ if given.schema_ is None else given.schema_
        if schema is None and self.type == "json_object":
            return "json_object", ""
        if schema is None:
            raise InvalidRequest(f"{field}.json_schema.schema", "must be a JSON schema")
        return "json_schema", _schema_text(schema, closed=bool(given.strict))


class TextFormatBody(JsonSchemaBody):
    """`text.format` of `/v1/responses`, where the schema stands beside the type."""

    type: Literal["text", "json_object", "json_schema"]

    def format_and_grammar(self, field: str) -> FormatAndGrammar:
        """The SDK's fields.

        Raises:
            InvalidRequest: the schema is missing; names the schema below `field`.
        """
        if self.type != "json_schema":
            return ("json_object", "") if self.type == "json_object" else UNCONSTRAINED
        if self.schema_ is None:
            raise InvalidRequest(f"{field}.schema", "must be a JSON schema")
        return "json_schema", _schema_text(self.schema_, closed=bool(self.strict))


class OutputFormatBody(SchemaBody):
    """`output_config.format` of `/v1/messages`, which is always a schema."""

    type: Literal["json_schema"]

    def format_and_grammar(self, field: str) -> FormatAndGrammar:
        """The SDK's fields.

        Raises:
            InvalidRequest: the schema is missing; names the schema below `field`.
        """
        if self.schema_ is None:
            raise InvalidRequest(f"{field}.schema", "must be a JSON schema")
        return "json_schema", _schema_text(self.schema_)


class StructuredOutputsBody(Body):
    """VLLM's `structured_outputs`: one kind of format, and options for the JSON kinds."""

    ignored = ("disable_fallback",)
    json_: TextOr[dict[str, Any]] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: FailFastList[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    structural_tag: TextOr[dict[str, Any]] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def formats(self, prefix: str) -> Iterator[tuple[str, FormatAndGrammar]]:
        """The SDK's fields for each kind that is given, with the name of the kind behind `prefix`.

        Raises:
            InvalidRequest: a schema is wrong, or an option does not fit the kind; names the field.
        """
        if self.json_ is not None:
            yield prefix + "json", self._json(prefix + "json", self.json_)
        if self.json_object:
            whole = (
                self._json(prefix + "json_object", {"type": "object"}) if self._json_options() else ("json_object", "")
            )
            yield prefix + "json_object", whole
        if self.regex is not None:
            yield prefix + "regex", ("regex", self.regex)
        if self.choice is not None:
            if not all(self.choice):
                raise InvalidRequest(prefix + "choice", "a choice must not be empty")
            yield prefix + "choice", ("lark", _choice_grammar(self.choice))
        if self.grammar is not None:
            yield prefix + "grammar", ("lark", self.grammar)
        if self.structural_tag is not None:
            yield prefix + STRUCTURAL_TAG, (STRUCTURAL_TAG, tag_text(prefix + STRUCTURAL_TAG, self.structural_tag))
        if self.json_ is None and not self.json_object:
            for name in self._json_options():
                raise InvalidRequest(prefix + name, "has a meaning for JSON only")

    def _json_options(self) -> list[str]:
        names = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
        return [name for name in names if getattr(self, name) not in (None, False)]

    def _json(self, field: str, given: str | dict[str, Any]) -> FormatAndGrammar:
        schema = _parsed_schema(field, given) if isinstance(given, str) else given
        pattern = "" if self.disable_any_whitespace else self.whitespace_pattern
        if pattern is not None:
            schema = {**schema, WHITESPACE: pattern}
        return "json_schema", _schema_text(schema, closed=bool(self.disable_additional_properties))


def only_format(found: Iterable[tuple[str, FormatAndGrammar]]) -> tuple[str, str, str]:
    """A request's one format, from the fields with their names: the field's name, and the SDK's fields.

    Raises:
        InvalidRequest: there are two formats; names the second.
    """
    formats = [(name, asked) for name, asked in found if asked != UNCONSTRAINED]
    if len(formats) > 1:
        raise InvalidRequest(formats[1][0], f"cannot be combined with {formats[0][0]}: an answer has one format")
    return (formats[0][0], *formats[0][1]) if formats else ("", *UNCONSTRAINED)


def schema_format(field: str, given: str | dict[str, Any]) -> FormatAndGrammar:
    """A schema that is given as an object or as text.

    Raises:
        InvalidRequest: the text is no JSON object; names `field`.
    """
    return "json_schema", _schema_text(_parsed_schema(field, given) if isinstance(given, str) else given)


def _choice_grammar(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _parsed_schema(field: str, text: str) -> dict[str, Any]:
    try:
        schema = parse_json(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON schema: an object, or an object as text")
    return schema


def _schema_text(schema: Mapping[str, Any], *, closed: bool = False) -> str:
    try:
        return json.dumps(close_objects(schema) if closed else schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidRequest("", "a JSON schema has a number that is not finite, or is nested too deeply") from None
