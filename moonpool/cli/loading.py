"""Bars on a terminal while engines load their model: layers of each service."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moonpool.cli.stack import ServiceProcess


class Bars:
    """A bar for each service that loads; told by several threads."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def show(self, service: ServiceProcess) -> None:
        """A service has loaded one more layer."""
        loaded = list(service.loaded.values())
        done, of = (sum(counts) for counts in zip(*loaded, strict=True))
        with self._lock:
            if service.id not in self._bars:
                self._bars[service.id] = self._progress.add_task(f"{service.id} loads layers")
            self._progress.update(self._bars[service.id], completed=done, total=of)


@contextlib.contextmanager
def loading_bars(console: Console | None = None) -> Iterator[Callable[[ServiceProcess], None]]:
    """Show bars on standard error while the body runs, if it is a terminal; yields what to tell of services."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda service: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # What goes to standard output meanwhile stays there, unless it is the same terminal: then it stands above the bars.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=shared) as progress:
        yield Bars(progress).show
