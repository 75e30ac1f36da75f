"""What an endpoint is: a handler that takes the gateway's context and a request, and a row in the route table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.event_log import EventLogResponse
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.generation_response import GenerationResponse

Handler = Callable[[ResponsesContext, Request], Awaitable[Response | GenerationResponse | EventLogResponse]]
"""Answers a request, or raises a `MoonpoolError`, which becomes an error response."""


def openai_error_body(error: ErrorResponse) -> dict[str, Any]:
    """Return OpenAI's error body, the default of every endpoint."""
    return error.body()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A row of the route table.

    Attributes:
        method: HTTP method.
        path: path, with parameters in braces as Starlette writes them: `/v1/models/{model:path}`.
        handler: answers the requests.
        error_body: writes the JSON body of an error response.
    """

    method: str
    path: str
    handler: Handler
    error_body: Callable[[ErrorResponse], dict[str, Any]] = openai_error_body
