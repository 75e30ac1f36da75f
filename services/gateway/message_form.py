"""Answers in Anthropic's form: a message, the events of a stream, error bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from moonpool.client import GenerateResult, TokenEvent, Usage
from services.gateway.errors import Refusal
from services.gateway.forms import compact
from services.gateway.tools import Call, CallPart, Piece, Reading

_ERRORS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class MessageForm:
    """A message, or the events that make one."""

    def __init__(
        self, model: str, reading: Reading, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """`reading` finds the calls in the answer.

        `decode` gives the text of tokens: it tells which of the texts `stops` has ended an answer.
        """
        self._model = model
        self._reading = reading
        self._stops = stops
        self._decode = decode
        self._head: dict[str, Any] = {}
        self._blocks = 0  # of the stream, that have begun
        self._open = ""  # what the last of them is that goes on: "text" or "call"

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._reading.begin(request_id)
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": self._model}
        if emulated:
            self._head["emulated"] = True

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        content = [_filled(piece) for piece in self._reading.whole(result.text, 0)]
        return {**self._head, "content": content, **self._end(result), "usage": usage(result.usage)}

    def opening(self) -> Iterator[bytes]:
        # Tokens are counted at the end: Moonpool's stream tells of the prompt's with the answer's.
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage(Usage())}
        yield _event("message_start", {"message": {**self._head, **empty}})

    def piece(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._block, self._reading.push(text, choice)))

    def note(self, event: TokenEvent) -> None:
        """This form has no place for log probabilities and tokens, and no field of its bodies asks for them."""

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._block, self._reading.end(0))
        yield self._stop()
        yield _event("message_delta", {"delta": self._end(result), "usage": usage(result.usage)})
        yield _event("message_stop", {})

    def failure(self, refused: Refusal) -> bytes:
        return _event("error", error_body(refused))

    def refused(self, refused: Refusal) -> dict[str, Any]:
        return error_body(refused)

    def _block(self, piece: Piece) -> bytes:
        """The events of a piece: a text goes on with the next one, a call with its next part."""
        match piece:
            case str():
                before = b"" if self._open == "text" else self._start("text", {"type": "text", "text": ""})
                return before + self._delta({"type": "text_delta", "text": piece})
            case CallPart():
                return self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        start = self._start("call", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        whole = {"type": "input_json_delta", "partial_json": piece.arguments}
        return start + (self._delta(whole) if piece.arguments else b"")

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        """A block begins; the one before it ends."""
        before = self._stop()
        self._open = kind
        self._blocks += 1
        return before + _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _stop(self) -> bytes:
        """The block that goes on, if any, ends."""
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._blocks - 1})

    def _end(self, result: GenerateResult) -> dict[str, str | None]:
        stop = self._stopped_by(result)
        ended = "stop_sequence" if stop is not None else "tool_use" if self._reading.called(0) else "end_turn"
        return {"stop_reason": "max_tokens" if result.finish_reason == "length" else ended, "stop_sequence": stop}

    def _stopped_by(self, result: GenerateResult) -> str | None:
        """The stop text that ended the answer, which is where the answer's text ends and its tokens go on."""
        if result.finish_reason != "stop" or not self._stops:
            return None
        # Without the prompt before them, some tokenizers drop the first token's leading space.
        rest = self._decode(result.token_ids)[max(0, len(result.text) - 1) :]
        found = {rest.find(stop): stop for stop in self._stops if stop in rest}
        return found[min(found)] if found else None


def _filled(piece: str | Call) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


def error_body(refused: Refusal) -> dict[str, Any]:
    """Anthropic's error body, with what else is known of a refusal."""
    defect = "api_error" if refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = {"type": _ERRORS.get(refused.status, defect), "message": refused.message}
    return {"type": "error", "error": error | refused.detail}


def usage(counted: Usage) -> dict[str, int]:
    """Anthropic's usage, where prompt tokens from the cache are counted apart from the others."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }


def _event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), compact({"type": kind, **content}))
