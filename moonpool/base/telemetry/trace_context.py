"""W3C Trace Context: which trace what runs now is a part of."""

from __future__ import annotations

import re
from contextvars import ContextVar

from moonpool.base import world

TRACEPARENT = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_SAMPLED = 1

traceparent: ContextVar[str] = ContextVar(TRACEPARENT, default="")
"""`traceparent` of the current context, sent with requests that start in the context; "" for none."""


def is_traceparent(value: str) -> bool:
    """Whether a value is a valid `traceparent` with a trace id and a span id."""
    return len(value) <= 256 and _FORM.fullmatch(value) is not None


def ids_of(value: str) -> tuple[int, int]:
    """Trace id and span id of a valid `traceparent`."""
    _, trace_id, span_id, *_ = value.split("-")
    return int(trace_id, 16), int(span_id, 16)


def is_sampled(value: str) -> bool:
    """Whether whoever began the trace of a valid `traceparent` wants its spans."""
    return bool(int(value.split("-")[3], 16) & _SAMPLED)


def child_of(parent: str) -> str:
    """Return the `traceparent` of a new span in the trace of `parent`; in a new trace if `parent` is ""."""
    trace_id = parent.split("-")[1] if parent else world.random_hex(16)
    return f"00-{trace_id}-{world.random_hex(8)}-{_SAMPLED:02x}"
