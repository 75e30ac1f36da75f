"""The trace that calls of the SDK belong to, in W3C Trace Context's form, as OpenTelemetry passes it over gRPC."""

from __future__ import annotations

import re
from contextvars import ContextVar

TRACEPARENT = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")

traceparent: ContextVar[str] = ContextVar(TRACEPARENT, default="")
"""`traceparent` of the current context; requests that begin in it carry it. "" = none."""


def is_traceparent(value: str) -> bool:
    """Whether a value has the form, and names a trace and a span."""
    return len(value) <= 256 and _FORM.fullmatch(value) is not None


def metadata() -> tuple[tuple[str, str], ...]:
    """The current trace as metadata of a call."""
    value = traceparent.get()
    return ((TRACEPARENT, value),) if value else ()
