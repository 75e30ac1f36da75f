"""The frame of all benchmarks: rows with a figure, the limit or peer measured in the same run, and their ratio."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("moonpool", "torch", "grpcio", "protobuf", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured.
        value: median over the runs.
        unit: its unit.
        spread: (max - min) / median over the runs.
        limit_name, limit_value: the limit's or peer's name and median, measured in the same run.
        ratio: median of the ratios, run by run; oriented so that more is better for us.
        target: the ratio wanted; None where none is set.
    """

    name: str
    value: float
    unit: str
    spread: float
    limit_name: str
    limit_value: float
    ratio: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.ratio >= self.target


def paired(
    name: str,
    unit: str,
    runs: Sequence[tuple[float, float]],
    limit_name: str,
    *,
    less_is_better: bool = False,
    target: float | None = None,
) -> Row:
    """A row from pairs (ours, limit's or peer's) measured one after the other."""
    ours = [pair[0] for pair in runs]
    ratios = [limit / own if less_is_better else own / limit for own, limit in runs]
    median = statistics.median(ours)
    spread = (max(ours) - min(ours)) / median
    limit_value = statistics.median(pair[1] for pair in runs)
    return Row(name, median, unit, spread, limit_name, limit_value, statistics.median(ratios), target)


def machine() -> dict[str, str | int | None]:
    """What the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> Iterator[tuple[str, str]]:
    """Versions of what takes part."""
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def report(name: str, rows: Sequence[Row]) -> dict[str, object]:
    """The JSON object of one benchmark."""
    return {
        "benchmark": name,
        "machine": machine(),
        "versions": dict(versions()),
        "rows": [dataclasses.asdict(row) | {"met": row.met} for row in rows],
    }


def show(name: str, rows: Sequence[Row], console: Console) -> None:
    """Prints the rows as a table."""
    table = Table(title=name, title_justify="left")
    for heading in ("figure", "value", "spread", "beside", "its value", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("figure", "beside") else "right")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g} {'met' if row.met else 'MISSED'}"
        table.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            f"{100 * row.spread:.0f} %",
            row.limit_name,
            f"{row.limit_value:.4g}",
            f"{row.ratio:.2f}",
            target,
        )
    console.print(table)


def run(
    name: str, measure: Callable[[int, Callable[[str], None]], Sequence[Row]], argv: Sequence[str] | None = None
) -> None:
    """Entry point of a benchmark module: `--json`, `--runs`, `--out`; progress goes to standard error.

    Args:
        name: of the benchmark.
        measure: takes the number of runs and a function that reports progress; gives the rows.
        argv: flags; None = the process's.
    """
    parser = argparse.ArgumentParser(description=f"benchmark: {name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=5, help="measured pairs; medians are reported (default 5)")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    progress = Console(stderr=True)
    rows = measure(options.runs, lambda text: progress.print(f"  {name}: {text}", highlight=False))
    result = json.dumps(report(name, rows), indent=2)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(result + "\n")
    if options.json:
        print(result)
    else:
        show(name, rows, Console(width=150))
