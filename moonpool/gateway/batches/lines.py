"""The lines of a batch's input file: checked before the batch runs, and put into the order in which they run.

Reading lines takes the interpreter lock and memory, and files are large: so files are read piece by piece on a thread,
a line has as many parts as a body, and of a line only a short key of its prompt is kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import check_json_parts, parse_json
from moonpool.gateway.batches.store import StoredLine

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Endpoints whose requests generate tokens: they have a priority, and their prompts can be announced."""
ENDPOINTS = (*GENERATING, "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank")
"""Endpoints that a batch may be for: OpenAI's, Anthropic's messages, and those of models with a head."""
MAX_LINES = 50_000
"""Requests in a batch, as at OpenAI."""
MAX_ERRORS = 100
"""Errors that a batch names."""
MAX_ID_CHARS = 512
"""Characters of a line's `custom_id`."""
PIECE_BYTES = 256 << 10
"""Text that is read in one turn, if no line is longer."""
HEAD_CHARS = 512
"""Of a prompt, kept as they are to compare prompts."""
PART_CHARS, PART_BYTES = 1024, 8
"""Of the rest, a hash of each part: prompts with a common beginning have a common beginning of hashes."""
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
    order: tuple[str, bytes]


class InputFile:
    """A batch's input file, which is read piece by piece.

    Attributes:
        errors: what is wrong with lines so far.

    Args:
        path: the file.
        endpoint: that the lines must name.
        max_line_bytes: bytes of a line at most.
    """

    def __init__(self, path: Path, endpoint: str, max_line_bytes: int) -> None:
        self.errors: list[LineError] = []
        self._path, self._endpoint, self._max_line_bytes = path, endpoint, max_line_bytes
        self._checked: list[_CheckedLine] = []
        self._ids: set[str] = set()
        self._number = 0
        self._read = 0
        self._skips = False
        """What comes next is the rest of a line that is too long."""

    def read_on(self) -> bool:
        """Read a piece of the file; False once nothing more is to be read. Blocking."""
        until = self._read + PIECE_BYTES
        with self._path.open("rb") as file:
            file.seek(self._read)
            while self._read < until:
                text = file.readline(self._max_line_bytes + 2)
                if not text:
                    if not self._number:
                        self.errors.append(LineError(1, "empty_file", "the file has no request"))
                    return False
                if not self._skips and text.strip() and not self._add(self._read, text):
                    return False
                self._skips = len(text) > self._max_line_bytes and not text.endswith(b"\n")
                self._read += len(text)
        return True

    def _add(self, begin: int, text: bytes) -> bool:
        """Check a line; False if no further one matters."""
        self._number += 1
        if self._number > MAX_LINES:
            self.errors.append(LineError(self._number, "too_many_lines", f"a batch has at most {MAX_LINES} requests"))
            return False
        found = _check(self._number, begin, text, self._endpoint, self._max_line_bytes, self._ids)
        if isinstance(found, LineError):
            self.errors.append(found)
        else:
            self._checked.append(found)
            self._ids.add(found.custom_id)
        return len(self.errors) < MAX_ERRORS

    def lines(self) -> list[StoredLine]:
        """The lines in the order in which they run.

        Lines run in the order of their prompts, so that those with a common beginning follow each other and a prefix is
        computed once, however small the pool is: the order of arrival may come back to a document after the document's
        KV has made room for others. Prompts are compared as text, which groups chains as tokens do.
        """
        self._checked.sort(key=lambda line: (line.order, line.number))
        return [
            StoredLine(place, line.number - 1, line.custom_id, line.begin, line.length)
            for place, line in enumerate(self._checked)
        ]


def _check(
    number: int, begin: int, text: bytes, endpoint: str, max_line_bytes: int, ids: set[str]
) -> _CheckedLine | LineError:
    def wrong(code: str, message: str) -> LineError:
        return LineError(number, code, message)

    try:
        if len(text) > max_line_bytes:
            raise InvalidRequest("", f"a request has at most {max_line_bytes} bytes")
        check_json_parts(text)
        line = parse_json(text)
    except InvalidRequest as error:
        return wrong("line_too_long", str(error))
    except ValueError:
        return wrong("invalid_json_line", "this line is not JSON")
    if not isinstance(line, dict):
        return wrong("invalid_json_line", "this line is no JSON object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return wrong("missing_required_parameter", f"custom_id: must be a text of at most {MAX_ID_CHARS} characters")
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
    return _CheckedLine(number, custom_id, begin, len(text), _order(_prompt_chain(body)))


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line's request, ready to be sent.

    Attributes:
        body: for the line's endpoint.
        announcement: body for `/v1/prefetch`; None for an endpoint that generates nothing.
        head: a text with which the prompts of other lines begin that share a longer beginning with this one.
    """

    body: bytes
    announcement: bytes | None
    head: str


def line_request(text: bytes, endpoint: str, priority: int, within_s: float) -> LineRequest:
    """What a line that was checked before asks for: below other requests, unless the line says otherwise. Blocking."""
    request: dict[str, Any] = parse_json(text)["body"]
    head = _prompt_chain(request)[:HEAD_CHARS]
    if endpoint not in GENERATING:
        return LineRequest(json.dumps(request).encode(), None, head)
    announced = {"requests": [{"url": endpoint, "body": request}], "within_s": within_s}
    return LineRequest(json.dumps({"priority": priority, **request}).encode(), json.dumps(announced).encode(), head)


def _prompt_chain(body: dict[str, Any]) -> str:
    """A text in whose order bodies with a common prompt prefix follow each other."""
    parts = [body[field] for field in _PROMPT_FIELDS if body.get(field) is not None]
    return json.dumps([body.get("model"), body.get("cache_salt"), *parts], ensure_ascii=False)


def _order(chain: str) -> tuple[str, bytes]:
    """Much shorter than a long chain; chains with a longer common beginning are nearer to each other."""
    parts = (chain[at : at + PART_CHARS] for at in range(HEAD_CHARS, len(chain), PART_CHARS))
    hashes = (blake2b(part.encode(errors="surrogatepass"), digest_size=PART_BYTES).digest() for part in parts)
    return chain[:HEAD_CHARS], b"".join(hashes)
