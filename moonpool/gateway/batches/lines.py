"""The lines of a batch's input file: checked before the batch runs, and put into the order in which they run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.base.json_parts import parse_json
from moonpool.gateway.batches.store import StoredLine

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Endpoints whose requests generate tokens: they have a priority, and their prompts can be announced."""
ENDPOINTS = (*GENERATING, "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank")
"""Endpoints that a batch may be for: OpenAI's, Anthropic's messages, and those of models with a head."""
MAX_LINES = 50_000
"""Requests in a batch, as at OpenAI."""
MAX_ERRORS = 100
"""Errors that a batch names."""
_PROMPT_FIELDS = (
    *("instructions", "system", "tools", "messages", "prompt", "input"),
    *("query", "queries", "text_1", "data_1", "documents", "text_2", "data_2"),
)
"""Fields of a body that a prompt begins with, in the order in which templates render them."""


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with a line; `number` counts from 1."""

    number: int
    code: str
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.number, "message": self.message, "param": None}


@dataclass(frozen=True, slots=True)
class _CheckedLine:
    number: int
    custom_id: str
    begin: int
    length: int
    chain: str


def read_lines(path: Path, endpoint: str, max_line_bytes: int) -> tuple[list[StoredLine], list[LineError]]:
    """Return a file's lines in the order in which they run, or what is wrong. Blocking.

    Lines run in the order of their prompts, so that those with a common beginning follow each other and a prefix is
    computed once, however small the pool is: the order of arrival may come back to a document after the document's KV
    has made room for others. Prompts are compared as text, which groups chains as tokens do.
    """
    checked, errors, ids = list[_CheckedLine](), list[LineError](), set[str]()
    number = 0
    for begin, text in _texts(path):
        number += 1
        found = _check(number, begin, text, endpoint, max_line_bytes, ids)
        if isinstance(found, LineError):
            errors.append(found)
        else:
            checked.append(found)
            ids.add(found.custom_id)
        if number > MAX_LINES:
            errors.append(LineError(number, "too_many_lines", f"a batch has at most {MAX_LINES} requests"))
        if len(errors) >= MAX_ERRORS or number > MAX_LINES:
            break
    if not number:
        errors.append(LineError(1, "empty_file", "the file has no request"))
    checked.sort(key=lambda line: (line.chain, line.number))
    lines = [
        StoredLine(place, line.number - 1, line.custom_id, line.begin, line.length)
        for place, line in enumerate(checked)
    ]
    return lines, errors


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, each with the first byte."""
    begin = 0
    with path.open("rb") as file:
        for text in file:
            if text.strip():
                yield begin, text
            begin += len(text)


def _check(
    number: int, begin: int, text: bytes, endpoint: str, max_line_bytes: int, ids: set[str]
) -> _CheckedLine | LineError:
    def wrong(code: str, message: str) -> LineError:
        return LineError(number, code, message)

    if len(text) > max_line_bytes:
        return wrong("line_too_long", f"a request has at most {max_line_bytes} bytes")
    try:
        line = parse_json(text)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "this line is not JSON")
    if not isinstance(line, dict):
        return wrong("invalid_json_line", "this line is no JSON object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong("missing_required_parameter", "custom_id: must be a text")
    if custom_id in ids:
        return wrong("duplicate_custom_id", f"custom_id: {custom_id!r} is that of an earlier line")
    if line.get("method", "POST") != "POST":
        return wrong("invalid_method", "method: must be POST")
    if line.get("url") != endpoint:
        return wrong("mismatched_endpoint", f"url: must be {endpoint}, the endpoint of the batch")
    if not isinstance(body, dict):
        return wrong("missing_required_parameter", "body: must be an object")
    if body.get("stream") or body.get("background"):
        return wrong("invalid_request", "body.stream, body.background: nobody waits for the answers of a batch")
    return _CheckedLine(number, custom_id, begin, len(text), prompt_chain(body))


def prompt_chain(body: dict[str, Any]) -> str:
    """A text in whose order bodies with a common prompt prefix follow each other."""
    parts = [body[field] for field in _PROMPT_FIELDS if body.get(field) is not None]
    return json.dumps([body.get("model"), body.get("cache_salt"), *parts], ensure_ascii=False)
