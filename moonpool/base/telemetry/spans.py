"""Recorded spans: what happened when.

They go to a file in Chrome's trace event format, one JSON object per line, and to a collector of traces. Times are
`time.monotonic_ns()`, one clock for all a host's processes, so that several processes' files can be laid side by side.
Spans are written in batches; without a path, nothing is written. A collector gets the spans of requests whose trace is
known and wanted: a span that names a `request` belongs to the request's span in this process.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from moonpool.base import world
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.trace_context import child_of, is_sampled, is_traceparent

BATCH_EVENTS = 256
BATCH_NS = 200_000_000
SUMMED = ("bytes",)
"""Attributes that add up over a span's parts."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span of a trace. Times are nanoseconds of `time.monotonic_ns()`.

    Attributes:
        name: what was done.
        traceparent: the span's place in its trace.
        parent: `traceparent` of the span around; "" = the trace begins here.
        serves: another process asked for this span's work.
    """

    name: str
    traceparent: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    serves: bool


class SpanExporter(Protocol):
    """Takes the spans of traces."""

    def export(self, span: EndedSpan) -> None:
        """Take a span; returns at once."""
        ...

    def close(self) -> None:
        """Send what waits."""
        ...


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun.

    Attributes:
        traceparent: for those that work for the span; "" if its trace is unknown or not wanted.
        attributes: told at the end; may be added to.
    """

    name: str
    traceparent: str
    parent: str
    start_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Records one process's spans; usable from any thread.

    Memory is bounded: at most a batch of 256 events waits to be written, and a batch older than 0.2 s is written with
    the next event. When the file cannot be written, recording ends with one warning; serving goes on.
    """

    def __init__(self, process_name: str, path: Path | None, exporter: SpanExporter | None = None) -> None:
        self._exporter = exporter
        self._of_request: dict[object, str] = {}  # `traceparent` of the open span of a request
        self._parts: dict[str, dict[str, EndedSpan]] = {}  # of an open span, by name
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._oldest_ns = 0
        self._pid = os.getpid()
        self._file: FileIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Appending: an instance restarted under the same name continues the file.
            self._file = FileIO(path, "a")  # unbuffered: the batches are ours
            self._emit({"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": process_name}}, 0)

    @property
    def enabled(self) -> bool:
        """Whether anything is written to a file."""
        return self._file is not None

    @contextmanager
    def span(self, name: str, parent: str = "", /, *, starts: bool = False, **attrs: object) -> Iterator[OpenSpan]:
        """Record the body's time, also if the body raises; see `begin`."""
        open_span = self.begin(name, parent, starts=starts, **attrs)
        try:
            yield open_span
        finally:
            self.end(open_span)

    def begin(self, name: str, parent: str = "", /, *, starts: bool = False, **attrs: object) -> OpenSpan:
        """Begin a span below `parent`, a `traceparent`.

        Until `end`, spans with the same `request` belong to this span. `starts`: without a parent, a trace begins here.
        """
        own = ""
        parent = parent if is_traceparent(parent) else ""
        if self._exporter is not None and (is_sampled(parent) if parent else starts):
            own = child_of(parent)
            if (request := attrs.get("request")) is not None:
                self._of_request[request] = own
        return OpenSpan(name, own, parent, world.monotonic_ns(), attrs)

    def end(self, span: OpenSpan) -> None:
        """Record a span."""
        end_ns = world.monotonic_ns()
        if self._exporter is not None and span.traceparent:
            ended = EndedSpan(
                span.name, span.traceparent, span.parent, span.start_ns, end_ns, span.attributes, serves=True
            )
            request = span.attributes.get("request")
            with self._lock:
                parts = self._parts.pop(span.traceparent, {})
                if self._of_request.get(request) == span.traceparent:
                    del self._of_request[request]
            for part in (ended, *parts.values()):
                self._exporter.export(part)
        self._write_span(span.name, span.start_ns, end_ns, span.attributes)

    def traceparent_of(self, request: str) -> str:
        """`traceparent` of a request's open span; "" = there is none."""
        return self._of_request.get(request, "")

    def add(self, name: str, start_ns: int, end_ns: int, /, **attrs: object) -> None:
        """Record a span measured elsewhere on this host, nanoseconds of `time.monotonic_ns()`."""
        if self._exporter is not None and "request" in attrs:
            self._add_part(name, start_ns, end_ns, attrs)
        self._write_span(name, start_ns, end_ns, attrs)

    def _add_part(self, name: str, start_ns: int, end_ns: int, attrs: dict[str, Any]) -> None:
        """Note a part of a request's open span. Of layers and chunks, a collector gets one span: first to last."""
        with self._lock:
            parent = self._of_request.get(attrs["request"], "")
            if not parent:
                return
            parts = self._parts.setdefault(parent, {})
            if (known := parts.get(name)) is None:
                parts[name] = EndedSpan(
                    name, child_of(parent), parent, start_ns, end_ns, attrs | {"parts": 1}, serves=False
                )
                return
            sums = {key: known.attributes.get(key, 0) + attrs.get(key, 0) for key in SUMMED if key in attrs}
            attributes = known.attributes | sums | {"parts": known.attributes["parts"] + 1}
            begin, end = min(known.start_ns, start_ns), max(known.end_ns, end_ns)
            parts[name] = replace(known, start_ns=begin, end_ns=end, attributes=attributes)

    def _write_span(self, name: str, start_ns: int, end_ns: int, attrs: dict[str, object]) -> None:
        if self._file is None:
            return
        event = {"name": name, "ph": "X", "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
        self._emit(event | {"pid": self._pid, "tid": threading.get_native_id(), "args": attrs}, end_ns)

    def instant(self, name: str, /, **attrs: object) -> None:
        if self._file is None:
            return
        now_ns = world.monotonic_ns()
        event = {"name": name, "ph": "i", "s": "p", "ts": now_ns / 1000, "dur": 0}
        self._emit(event | {"pid": self._pid, "tid": threading.get_native_id(), "args": attrs}, now_ns)

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what waits and end the recording; may be called again."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _emit(self, event: dict[str, object], now_ns: int) -> None:
        line = json.dumps(event, default=str, separators=(",", ":"))
        with self._lock:
            if not self._pending:
                self._oldest_ns = now_ns
            self._pending.append(line)
            if len(self._pending) >= BATCH_EVENTS or now_ns - self._oldest_ns > BATCH_NS:
                self._write()

    def _write(self) -> None:
        if not self._pending or self._file is None:
            self._pending.clear()
            return
        try:
            self._file.write(("\n".join(self._pending) + "\n").encode())
        except OSError as error:
            log.warning("spans cannot be written any more", reason=str(error))
            self._file.close()
            self._file = None
        self._pending.clear()


CURRENT: ContextVar[Recorder] = ContextVar("recorder", default=Recorder("", None))  # noqa: B039 - records nothing
"""The recorder of the running process."""
