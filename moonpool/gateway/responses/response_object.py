"""The response object, parts of its output, and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.base import world
from moonpool.client import Usage
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.json_response import to_json_bytes

UNDER_WAY = ("queued", "in_progress")
"""Status of a response that has no answer yet."""
UNANSWERED = {"error": None, "incomplete_details": None, "usage": None}


def response_head(model: str, echoed_fields: Mapping[str, Any]) -> dict[str, Any]:
    """A response's fields independent of the status, except the id."""
    return {"object": "response", "created_at": int(world.unix_time()), "model": model, **echoed_fields}


def failure(error: ErrorResponse) -> dict[str, str]:
    """Return the `error` of a response that failed."""
    return {"code": "server_error", "message": error.message}


def responses_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """`usage` under the names of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the text of an answer as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_text(text: str) -> dict[str, str]:
    """Return thinking as a part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def response_event(event_type: str, number: int, **fields: Any) -> bytes:
    """A server-sent event."""
    content = to_json_bytes({"type": event_type, "sequence_number": number, **fields})
    return b"event: %s\ndata: %s\n\n" % (event_type.encode(), content)
