"""The trace for SDK calls, as W3C Trace Context, passed over gRPC as OpenTelemetry does."""

from __future__ import annotations

from moonpool.base.telemetry.trace_context import TRACEPARENT, is_traceparent, traceparent

__all__ = ["TRACEPARENT", "is_traceparent", "metadata", "traceparent"]


def metadata() -> tuple[tuple[str, str], ...]:
    """The current trace as gRPC metadata."""
    value = traceparent.get()
    return ((TRACEPARENT, value),) if value else ()
