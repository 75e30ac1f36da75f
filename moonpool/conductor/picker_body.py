"""The bodies that proxies show to the endpoint picker: what placement sees of them, and how much they may cost.

Bodies are end users' own, and no gateway has checked them. What placement sees is read, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from pydantic_core import from_json

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import check_json_parts
from moonpool.v1 import conductor_pb2

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
MAX_OUTPUT_TOKENS = (1 << 31) - 1
MAX_TOKEN_ID = (1 << 31) - 1
NO_PROMPT = conductor_pb2.TokenPrompt(token_ids=[0])
"""What a request without a body is placed as."""


def read_body(body: bytes, headers: Mapping[str, str]) -> conductor_pb2.GenerateRequest:
    """Return the request as clients of Moonpool send it.

    Args:
        body: the body as the engine gets it; empty for a request without one.
        headers: the request's headers, names in small letters.

    Raises:
        InvalidRequest: the body is no JSON object, has too many parts, or a field has a wrong type; names the field.
    """
    message = conductor_pb2.GenerateRequest()
    for name, field in ((TTFT_HEADER, "ttft_s"), (TPOT_HEADER, "tbt_s")):
        if name in headers:
            setattr(message.slo, field, _milliseconds(name, headers[name]))
    if not body:
        message.tokens.CopyFrom(NO_PROMPT)
        return message
    check_json_parts(body)
    try:
        fields = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest("body", f"is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "must be a JSON object")
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if isinstance(most, int) and not isinstance(most, bool) and most > 0:
        message.sampling.max_tokens = min(most, MAX_OUTPUT_TOKENS)
    if (salt := fields.get("cache_salt")) is not None:
        message.cache_salt = _text("cache_salt", salt)
    if "messages" in fields:
        message.chat.CopyFrom(_chat(fields))
    else:
        _set_prompt(message, fields)
    return message


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise InvalidRequest(name, f"must be milliseconds, is {text[:64]!r}")
    return value / 1000


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, "must be a text")
    return value


def _object(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be an object")
    return value


def _list(field: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(field, "must be a list")
    return value


def _chat(fields: Mapping[str, Any]) -> conductor_pb2.ChatPrompt:
    found = conductor_pb2.ChatPrompt()
    for at, given in enumerate(_list("messages", fields["messages"])):
        place = f"messages[{at}]"
        turn = _object(place, given)
        told = found.messages.add(
            role=_text(f"{place}.role", turn.get("role")), content=_text_of(f"{place}.content", turn.get("content"))
        )
        if (call_id := turn.get("tool_call_id")) is not None:
            told.tool_call_id = _text(f"{place}.tool_call_id", call_id)
        for number, call in enumerate(_list(f"{place}.tool_calls", turn.get("tool_calls") or [])):
            _add_call(told, f"{place}.tool_calls[{number}]", call)
    if tools := fields.get("tools"):
        found.tools = json.dumps(_list("tools", tools))
    if kwargs := fields.get("chat_template_kwargs"):
        found.template_kwargs = json.dumps(_object("chat_template_kwargs", kwargs))
    return found


def _add_call(turn: conductor_pb2.ChatMessage, place: str, given: object) -> None:
    call = _object(place, given)
    function = _object(f"{place}.function", call.get("function", {}))
    turn.tool_calls.add(
        id=_text(f"{place}.id", call.get("id", "")),
        name=_text(f"{place}.function.name", function.get("name", "")),
        arguments=_text(f"{place}.function.arguments", function.get("arguments", "")),
    )


def _text_of(field: str, content: object) -> str:
    """Return a turn's text; images and the like do not count."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_object(f"{field}[{at}]", part) for at, part in enumerate(_list(field, content))]
    return "".join([_text(f"{field}[{at}].text", part["text"]) for at, part in enumerate(parts) if "text" in part])


def _set_prompt(message: conductor_pb2.GenerateRequest, fields: Mapping[str, Any]) -> None:
    """Set the prompt; of a list of prompts the first."""
    field = "prompt" if "prompt" in fields else "input"
    prompt = fields.get(field)
    first = prompt[0] if isinstance(prompt, list) and prompt and not _is_token(prompt[0]) else prompt
    match first:
        case None | [] | "":
            message.tokens.CopyFrom(NO_PROMPT)
        case str():
            message.text = first
        case list() if all(map(_is_token, first)):
            message.tokens.token_ids.extend(first)
        case _:
            raise InvalidRequest(field, "must be a text, token ids, or a list of these")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID
