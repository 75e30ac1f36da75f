"""What a start does, on standard error: on a terminal a line for each part, rewritten; in a pipe plain lines."""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

PLAIN_INTERVAL_S = 10.0
"""Seconds between two plain lines that differ in their numbers only."""
ECHO_COLUMNS = 4
"""Columns that bars leave free for the `^C` of a terminal, which else would begin a line and leave a bar behind."""
_NUMBER = re.compile(r"\d+")


class StartProgress(Protocol):
    """Shows what a start's parts do. Any thread may call this."""

    def show(self, part: str, what: str, done: int = 0, of: int = 0) -> None:
        """A part's progress: `done` items out of `of`; `of` 0 = unknown."""
        ...

    def finish(self, part: str) -> None:
        """A part has ended."""
        ...


class PlainProgress:
    """Text lines: a line when a part does something else, and a line now and then during the same work.

    Args:
        write: takes a line.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, float]] = {}

    def show(self, part: str, what: str, done: int = 0, of: int = 0) -> None:
        kind, now = _NUMBER.sub("", what), self._clock()
        with self._lock:
            last, at = self._last.get(part, ("", 0.0))
            if kind == last and now - at < PLAIN_INTERVAL_S and not (of and done == of):
                return
            self._last[part] = kind, now
            self._write(f"{part}: {what}" + (f" {done}/{of}" if of else ""))

    def finish(self, part: str) -> None:
        """See `StartProgress`."""


class TerminalProgress:
    """A bar with text for each part."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def show(self, part: str, what: str, done: int = 0, of: int = 0) -> None:
        text = f"{part}: {what}" + (f" {done}/{of}" if of else "")
        with self._lock:
            if part not in self._bars:
                self._bars[part] = self._progress.add_task(text, total=None)
            self._progress.update(self._bars[part], description=text, completed=done, total=of or None)

    def finish(self, part: str) -> None:
        with self._lock:
            if (bar := self._bars.pop(part, None)) is not None:
                self._progress.remove_task(bar)


@contextlib.contextmanager
def start_progress(console: Console | None = None) -> Iterator[StartProgress]:
    """Show on standard error, while the body runs, what a start does."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield PlainProgress(lambda line: print(line, file=console.file, flush=True))
        return
    console.width = max(1, console.width - ECHO_COLUMNS)
    # One line a part: what is wider than the terminal would leave lines behind.
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = text, BarColumn(bar_width=20), TimeElapsedColumn()
    # Standard output meanwhile stays there, unless it is the same terminal: then the output stands above the bars.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=shared, expand=True) as progress:
        yield TerminalProgress(progress)
