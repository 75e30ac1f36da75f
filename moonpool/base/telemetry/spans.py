"""Recorded spans: what happened when, in Chrome's trace event format, one JSON object per line.

Times are `time.monotonic_ns()`, one clock for all a host's processes, so that several processes' files can be laid side
by side. Spans are written in batches; without a path, nothing is recorded.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from moonpool.base import world
from moonpool.base.telemetry.logs import get_logger

BATCH_EVENTS = 256
BATCH_NS = 200_000_000

log = get_logger(__name__)


class Recorder:
    """Records one process's spans to a file; usable from any thread.

    Memory is bounded: at most a batch of 256 events waits to be written, and a batch older than 0.2 s is written with
    the next event. When the file cannot be written, recording ends with one warning; serving goes on.
    """

    def __init__(self, process_name: str, path: Path | None) -> None:
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
        """Whether anything is recorded."""
        return self._file is not None

    @contextmanager
    def span(self, name: str, /, **attrs: object) -> Iterator[None]:
        """Record the body's time, also if the body raises."""
        if self._file is None:
            yield
            return
        start_ns = world.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, start_ns, world.monotonic_ns(), **attrs)

    def add(self, name: str, start_ns: int, end_ns: int, /, **attrs: object) -> None:
        """Record a span measured elsewhere on this host, nanoseconds of `time.monotonic_ns()`."""
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
