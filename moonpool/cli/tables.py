"""Tables with names, ids and addresses always whole: rows too wide for the terminal become lines."""

import sys
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 1 << 14
"""Columns that a line may have in a pipe."""


def stdout_console() -> Console:
    """A console for standard output; lines in a pipe are not wrapped, so that a row stays a line."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def age_text(seconds: float) -> str:
    """A length of time as people say it: "40 s", "5 min", "3 h", "2 days"."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit != "days"):
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size_text(count: float) -> str:
    """Bytes as people say them, in decimal units with two digits at least: "93 MB", "1.4 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class RecordTable:
    """A row per record; the first cell names the record.

    If the rows are wider than the terminal, headings of several words are stacked. If the rows are still too wide, each
    record is printed as a name and, below, lines of `heading value`. No cell is ever shortened.

    Args:
        headings: the columns' headings.
        right: headings of the columns that are numbers.
        title: a line above; "" = none.
    """

    def __init__(self, *headings: str, right: Sequence[str] = (), title: str = "") -> None:
        self._headings = headings
        self._right = frozenset(right)
        self._title = title
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a record with a cell per heading; an empty cell is left out where rows become lines."""
        assert len(cells) == len(self._headings)
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(self._title)
        for padding, stacked in ((1, False), (0, False), (1, True), (0, True)):
            table = self._table(padding, stacked)
            natural = Measurement.get(console, options.update(max_width=PIPE_WIDTH), table).maximum
            if natural <= options.max_width:
                yield from console.render(table, options.update(width=natural))
                return
        for line in self._lines(options.max_width):
            yield Segment(line)
            yield Segment.line()

    def _table(self, padding: int, stacked: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, padding, 0, 0), pad_edge=False)
        for heading in self._headings:
            justify: Literal["left", "right"] = "right" if heading in self._right else "left"
            shown = heading.replace("_", " ").replace(" ", "\n") if stacked else heading
            table.add_column(shown, justify=justify, no_wrap=True, vertical="bottom")
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table

    def _lines(self, width: int) -> list[str]:
        lines: list[str] = []
        for name, *cells in self._rows:
            lines.append(name)
            line = ""
            for heading, cell in zip(self._headings[1:], cells, strict=True):
                part = f"  {heading} {cell}" if heading else f"  {cell}"
                if not cell:
                    continue
                if line and len(line) + len(part) > width:
                    lines.append(line)
                    line = ""
                line += part
            if line:
                lines.append(line)
        return lines
