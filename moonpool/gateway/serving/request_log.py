"""One line of the log for an HTTP request."""

from __future__ import annotations

from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.serving.served_request import ServedRequest

MAX_LINES_S = 2000
"""Lines a second: more than a gateway answers."""
POLLED = frozenset({"/health", "/ping", "/load", "/metrics"})
"""Handlers that programs poll: requests to these that succeed have no line."""
FIRST_ERROR = 400

log = get_logger(__name__, MAX_LINES_S)


class RequestLog:
    """Writes a line for each request that was refused, was wrong or failed; with `every`, for all requests.

    A line has the client's `x-request-id` or the gateway's own id (`request`), and never a prompt, an answer or a key.
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def ended(self, request: ServedRequest) -> None:
        """Write the line of a request that has ended, if there is one."""
        good = request.status < FIRST_ERROR
        if good and (not self._every or request.handler in POLLED):
            return
        log.info(
            "request",
            request=request.id,
            method=request.method,
            path=request.handler,
            status=request.status,
            duration_s=round(request.duration_s, 6),
            **request.notes,
        )
