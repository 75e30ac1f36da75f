"""Structured outputs: translates the response formats of OpenAI, vLLM and Anthropic to the SDK's two fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moonpool.errors import InvalidRequest

FormatAndGrammar = tuple[str, str]
"""`response_format` and `grammar` of `SamplingParams`."""
_UNCONSTRAINED: FormatAndGrammar = ("", "")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""vLLM's kinds: members of `structured_outputs`, and the older fields with "guided_" before the kind."""


def openai_response_format(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> FormatAndGrammar:
    """The response format that a body asks for, if any.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's `structured_outputs`.
        guided: vLLM's older fields, by kind.

    Raises:
        InvalidRequest: a format is wrong, or there are two formats; names the field.
    """
    found = [("response_format", _openai_format(response_format))] if response_format is not None else []
    found += _vllm_options("structured_outputs.", structured or {})
    found += _vllm_options("guided_", guided)
    formats = [(name, it) for name, it in found if it != _UNCONSTRAINED]
    if len(formats) > 1:
        raise InvalidRequest(formats[1][0], f"cannot be combined with {formats[0][0]}: an answer has one format")
    return formats[0][1] if formats else _UNCONSTRAINED


def responses_text_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    """Translate `text.format` of `/v1/responses`, where the schema is beside the type.

    Raises:
        InvalidRequest: the format is wrong; names the field.
    """
    return _response_format("text.format", field, "schema", field)


def messages_output_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    """Translate `output_config.format` of `/v1/messages`, which is always a schema.

    Raises:
        InvalidRequest: the format is wrong; names the field.
    """
    if field.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type", f"must be json_schema, not {field.get('type')!r}")
    return _response_format("output_config.format", field, "schema", field)


def _openai_format(field: Mapping[str, Any]) -> FormatAndGrammar:
    return _response_format("response_format", field, "json_schema.schema", field.get("json_schema"))


def _response_format(name: str, field: Mapping[str, Any], place: str, holder: object) -> FormatAndGrammar:
    """Translate a format. `holder` has the schema; errors name the schema `{name}.{place}`."""
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
