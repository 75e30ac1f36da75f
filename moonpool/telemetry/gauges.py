"""What an instance holds, as numbers that a test can compare with their value at rest."""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from moonpool.v1 import kv_pb2

Entry = tuple[str, Callable[[], float], float | None]


class Gauges:
    """Named numbers, each read by a function at the moment it is asked for.

    An entry is (name, function, at_rest): `at_rest` is the value the gauge must have when no request is running,
    None where it may rest anywhere.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[str, Entry] = {}
        for name, read, at_rest in entries:
            self.add(name, read, at_rest)

    def add(self, name: str, read: Callable[[], float], at_rest: float | None = None) -> None:
        """Add a gauge.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"gauge {name!r} exists already")
        self._entries[name] = (name, read, at_rest)

    def read(self) -> list[kv_pb2.Gauge]:
        """All gauges now, in the order they were added."""
        return [kv_pb2.Gauge(name=name, value=read(), at_rest=rest) for name, read, rest in self._entries.values()]

    def __call__(self) -> list[kv_pb2.Gauge]:
        """The same as `read`."""
        return self.read()


def process_entries() -> list[Entry]:
    """What every process has: tasks on its event loop, resident memory, open files. They may rest anywhere.

    To be read on the event loop. Memory and files are known on Linux only and 0 elsewhere.
    """
    return [
        ("tasks", lambda: len(asyncio.all_tasks()), None),
        ("resident_bytes", _resident_bytes, None),
        ("open_files", _open_files, None),
    ]


def _resident_bytes() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def _open_files() -> float:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0.0


def restless(gauges: Iterable[kv_pb2.Gauge]) -> dict[str, tuple[float, float]]:
    """The gauges that are not at rest: name -> (value, value at rest)."""
    return {g.name: (g.value, g.at_rest) for g in gauges if g.HasField("at_rest") and g.value != g.at_rest}
