"""`/v1/messages`: Anthropic's form of a chat, its body and its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

from moonpool.client import GenerateResult, Message, SamplingParams, Usage
from moonpool.errors import InvalidRequest
from services.gateway.errors import Refusal
from services.gateway.fields import AnsweredBody, Body, ContentPart, Turn, joined
from services.gateway.forms import compact

MESSAGES = "/v1/messages"

_ERRORS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class MessagesBody(AnsweredBody):
    """The body. A system's text is a turn before the others."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, {"type": "none"}, {"type": "auto"}),
        "thinking": (None, {"type": "disabled"}),
        "mcp_servers": (None, []),
        "container": (None,),
        "context_management": (None,),
        "output_config": (None, {}),
        "output_format": (None,),
    }

    max_tokens: int
    messages: list[Turn]
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages))
        if isinstance(self.system, list):
            yield from ((f"system.{index}", part) for index, part in enumerate(self.system))

    def check(self) -> None:
        for index, turn in enumerate(self.messages):
            if turn.role == "developer":
                raise InvalidRequest(f"messages.{index}.role", "must be system, user or assistant")
        if not self.messages or self.messages[-1].role != "user":
            raise InvalidRequest(
                "messages", "the last turn must be a user's; continuing an answer is not supported yet"
            )

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text.
        """
        system = joined(self.system or "", "system")
        before: list[Message] = [{"role": "system", "content": system}] if system else []
        return before + [turn.message(f"messages.{index}") for index, turn in enumerate(self.messages)]

    def sampling(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return SamplingParams(max_tokens=max_tokens, stop=self.stop_sequences or (), **given)


class MessageForm:
    """A message, or the events that make one."""

    def __init__(self, model: str, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of tokens: it tells which of the texts `stops` has ended an answer."""
        self._model = model
        self._stops = stops
        self._decode = decode
        self._head: dict[str, Any] = {}

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": self._model}
        if emulated:
            self._head["emulated"] = True

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        content = [{"type": "text", "text": result.text}]
        return {**self._head, "content": content, **self._end(result), "usage": usage(result.usage)}

    def opening(self) -> Iterator[bytes]:
        # Tokens are counted at the end: Moonpool's stream tells of the prompt's with the answer's.
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage(Usage())}
        yield _event("message_start", {"message": {**self._head, **empty}})
        yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})

    def piece(self, text: str, choice: int) -> bytes:
        return _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        yield _event("content_block_stop", {"index": 0})
        yield _event("message_delta", {"delta": self._end(result), "usage": usage(result.usage)})
        yield _event("message_stop", {})

    def failure(self, refused: Refusal) -> bytes:
        return _event("error", error_body(refused))

    def refused(self, refused: Refusal) -> dict[str, Any]:
        return error_body(refused)

    def _end(self, result: GenerateResult) -> dict[str, str | None]:
        stop = self._stopped_by(result)
        ended = "stop_sequence" if stop is not None else "end_turn"
        return {"stop_reason": "max_tokens" if result.finish_reason == "length" else ended, "stop_sequence": stop}

    def _stopped_by(self, result: GenerateResult) -> str | None:
        """The stop text that ended the answer, which is where the answer's text ends and its tokens go on."""
        if result.finish_reason != "stop" or not self._stops:
            return None
        # Without the prompt before them, some tokenizers drop the first token's leading space.
        rest = self._decode(result.token_ids)[max(0, len(result.text) - 1) :]
        found = {rest.find(stop): stop for stop in self._stops if stop in rest}
        return found[min(found)] if found else None


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
