"""The trace for SDK calls, as W3C Trace Context, passed over gRPC as OpenTelemetry does."""

from __future__ import annotations

import re
from contextvars import ContextVar

TRACEPARENT = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")

traceparent: ContextVar[str] = ContextVar(TRACEPARENT, default="")
"""`traceparent` of the current context, sent with requests that start in the context; "" for none."""


def is_traceparent(value: str) -> bool:
    """Whether a value is a valid `traceparent` with a trace id and a span id."""
    return len(value) <= 256 and _FORM.fullmatch(value) is not None


def metadata() -> tuple[tuple[str, str], ...]:
    """The current trace as gRPC metadata."""
    value = traceparent.get()
    return ((TRACEPARENT, value),) if value else ()
