"""Structured outputs: from the response formats of OpenAI, vLLM and Anthropic to the SDK's two fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moonpool.errors import InvalidRequest

FormatAndGrammar = tuple[str, str]
"""`response_format` and `grammar` of `SamplingParams`."""


_UNCONSTRAINED: FormatAndGrammar = ("", "")


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""vLLM's kinds: members of `structured_outputs`, and with "guided_" before them its older fields."""


def openai_response_format(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> FormatAndGrammar:
    """The one format that is asked for, if any.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's `structured_outputs`.
        guided: vLLM's older fields, by kind.

    Raises:
        InvalidRequest: names what is wrong, or that there are two.
    """
    found = [("response_format", _openai_format(response_format))] if response_format is not None else []
    found += _vllm_options("structured_outputs.", structured or {})
    found += _vllm_options("guided_", guided)
    asked = [(name, it) for name, it in found if it != _UNCONSTRAINED]
    if len(asked) > 1:
        raise InvalidRequest(asked[1][0], f"does not go with {asked[0][0]}: an answer has one format")
    return asked[0][1] if asked else _UNCONSTRAINED


def responses_text_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    """The format of a response: `text.format`, where a schema lies beside its type.

    Raises:
        InvalidRequest: names what is wrong.
    """
    return _response_format("text.format", field, "schema", field)


def messages_output_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    """The format of a message: `output_config.format`, always a schema.

    Raises:
        InvalidRequest: names what is wrong.
    """
    if field.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type", f"must be json_schema, not {field.get('type')!r}")
    return _response_format("output_config.format", field, "schema", field)


def _openai_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    return _response_format("response_format", field, "json_schema.schema", field.get("json_schema"))


def _response_format(name: str, field: Mapping[str, Any], place: str, holder: object) -> FormatAndGrammar:
    """`holder` has the schema, which errors name by its `place` in the field of that `name`."""
    kind = field.get("type")
    if kind == "text":
        return _UNCONSTRAINED
    if kind == "json_object":
        return "json_object", ""
    if kind != "json_schema":
        raise InvalidRequest(f"{name}.type", f"must be text, json_object or json_schema, not {kind!r}")
    if not isinstance(holder, Mapping) or not isinstance(holder.get("schema"), Mapping):
        raise InvalidRequest(f"{name}.{place}", "must be a JSON schema")
    return "json_schema", _schema_text(holder["schema"])


def _vllm_options(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, FormatAndGrammar]]:
    for kind in _KINDS:
        value = given.get(kind)
        if value is not None:
            yield prefix + kind, _structured_output(prefix + kind, kind, value)


def _structured_output(name: str, kind: str, value: Any) -> FormatAndGrammar:
    match kind, value:
        case "json_object", bool():
            return ("json_object", "") if value else _UNCONSTRAINED
        case "json", str():
            return "json_schema", value
        case "json", Mapping():
            return "json_schema", _schema_text(value)
        case "regex", str() if value:
            return "regex", value
        case "grammar", str() if value:
            return "lark", value
        case "choice", [*texts] if texts and all(isinstance(it, str) and it for it in texts):
            return "lark", _choice_grammar(texts)
    raise InvalidRequest(name, "has a wrong type, or is empty")


def _choice_grammar(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False)
