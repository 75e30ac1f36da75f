"""One HTTP request that the gateway serves: who and what, how the request ended, and what the log shall say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

NO_HANDLER = "none"
"""Handler of a request to a path that the gateway does not have; vLLM's server says the same."""
CLIENT_LEFT = 499
"""Status of a request whose client left before the response began; nginx logs the same."""
_KEY = "moonpool.served_request"


@dataclass(slots=True)
class ServedRequest:
    """One HTTP request.

    Attributes:
        id: the client's `x-request-id`, or the gateway's.
        own_id: whether the client chose the id.
        method: HTTP method.
        handler: the path in the route table, or `NO_HANDLER`.
        status: status code of the response.
        duration_s: seconds from the head to the end of the response.
        notes: further fields for the log, by name.
    """

    id: str
    own_id: bool
    method: str
    handler: str = NO_HANDLER
    status: int = CLIENT_LEFT
    duration_s: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)

    def within(self, scope: Scope) -> dict[str, Any]:
        """The scope with which the request is served. Both scopes know the request: defects are told in the outer."""
        scope[_KEY] = self
        return dict(scope)


Ended = Callable[[ServedRequest], None]
"""Called when a request has ended."""


def served_request(scope: Scope) -> ServedRequest:
    """The request that is served in this scope."""
    found: ServedRequest = scope[_KEY]
    return found
