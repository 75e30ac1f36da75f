"""The frame of all benchmarks: figures beside a reference measured in the same run, how they are shown and kept.

What cannot be measured here, for example because a peer is not installed, is shown and kept with the reason.
"""

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moonpool.base.native.build import BuildError, detect

PACKAGES = (
    *("moonpool", "torch", "grpcio", "protobuf", "transformers", "uvloop"),
    *("redis", "hiredis", "mooncake-transfer-engine-non-cuda"),
)

Progress = Callable[[str], None]
"""Called with a few words after each step."""
Measure = Callable[[argparse.Namespace, Progress], "Sequence[Row | Absent]"]
"""A benchmark: takes flags (`runs` among them) and gives rows; raises Skipped if not runnable here."""
_RATIO_AT_MOST = 1000.0


class Skipped(Exception):  # noqa: N818  # not an error: something optional is missing
    """The benchmark cannot run here; the message says what is missing."""


def optional(module: str) -> Any:
    """Import a peer that is an optional installation.

    Raises:
        Skipped: not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured.
        value: median over the runs.
        unit: the figure's unit.
        spread: (max - min) / median over the runs; None for a single run.
        limit_name, limit_value: name and median of the reference, measured in the same run or set in advance.
        ratio: median of the ratios, run by run; oriented so that more is better for us.
        target: the ratio wanted; None where none is set.
    """

    name: str
    value: float
    unit: str
    spread: float | None
    limit_name: str
    limit_value: float
    ratio: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.ratio >= self.target


@dataclasses.dataclass(frozen=True, slots=True)
class Absent:
    """A figure that could not be measured here beside its reference, and why."""

    name: str
    limit_name: str
    reason: str


def spread_of(values: Sequence[float]) -> float | None:
    """(max - min) / median; None for a single value."""
    median = statistics.median(values)
    return (max(values) - min(values)) / abs(median) if len(values) > 1 and median else None


def paired(
    name: str,
    unit: str,
    runs: Sequence[tuple[float, float]],
    limit_name: str,
    *,
    less_is_better: bool = False,
    target: float | None = None,
) -> Row:
    """A row from pairs (ours, the reference's) measured one after the other."""
    ours = [pair[0] for pair in runs]
    ratios = [limit / own if less_is_better else own / limit for own, limit in runs]
    limit_value = statistics.median(pair[1] for pair in runs)
    ratio = statistics.median(ratios)
    return Row(name, statistics.median(ours), unit, spread_of(ours), limit_name, limit_value, ratio, target)


def bounded(name: str, unit: str, values: Sequence[float], limit_name: str, limit: float) -> Row:
    """A row that must stay below a limit set in advance; the target is met if the median is within the limit."""
    median = statistics.median(values)
    ratio = min(limit / median, _RATIO_AT_MOST) if median > 0 else _RATIO_AT_MOST
    return Row(name, median, unit, spread_of(values), limit_name, limit, ratio, 1.0)


def machine() -> dict[str, str | int | None]:
    """The machine that the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _instructions() -> str:
    """Those that native kernels would use: processors of one name differ in them."""
    try:
        return detect()
    except BuildError:
        return "none"


def versions() -> Iterator[tuple[str, str]]:
    """Versions of the packages that take part."""
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def report(
    name: str, rows: Sequence[Row | Absent], *, date: str, skipped: str = "", took_s: float = 0.0
) -> dict[str, object]:
    """One benchmark's JSON object.

    Args:
        name: the benchmark's name.
        rows: figures.
        date: date of the measurement, ISO format.
        skipped: why there are no figures.
        took_s: duration, seconds.
    """
    return {
        "benchmark": name,
        "date": date,
        "machine": machine(),
        "versions": dict(versions()),
        "skipped": skipped,
        "took_s": round(took_s, 1),
        "rows": [dataclasses.asdict(row) | {"met": row.met} for row in rows if isinstance(row, Row)],
        "not_measured": [dataclasses.asdict(row) for row in rows if isinstance(row, Absent)],
    }


def target_text(row: Row) -> str:
    """The target, and whether met; "" without one."""
    if row.target is None:
        return ""
    return f"target {row.target:g} {'met' if row.met else f'missed: {row.ratio:.3g}'}"


def show(name: str, rows: Sequence[Row | Absent], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(title=name, title_justify="left")
    for heading in ("figure", "value", "spread", "beside", "its value", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("figure", "beside") else "right")
    for row in rows:
        if isinstance(row, Absent):
            table.add_row(row.name, "not measured", "", row.limit_name, "", "", row.reason)
            continue
        table.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            "one run" if row.spread is None else f"{100 * row.spread:.0f} %",
            row.limit_name,
            f"{row.limit_value:.4g}",
            f"{row.ratio:.2f}",
            target_text(row),
        )
    console.print(table)


def today() -> str:
    """The date, ISO format."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def _file(text: str) -> Path:
    """The path of a result, checked before anything is measured.

    Raises:
        argparse.ArgumentTypeError: the path is a folder.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, not a file")
    return path


def run(
    name: str,
    measure: Measure,
    argv: Sequence[str] | None = None,
    *,
    flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> bool:
    """Entry point of a benchmark module: `--json`, `--runs`, `--out`; progress goes to standard error.

    Args:
        name: the benchmark's name.
        measure: the benchmark.
        argv: flags; None = the process's.
        flags: adds the benchmark's own flags.

    Returns:
        Whether every target was met; a skipped benchmark misses none.
    """
    parser = argparse.ArgumentParser(description=f"benchmark: {name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=5, help="measured pairs; medians are reported (default 5)")
    parser.add_argument("--out", type=_file, help="also write the JSON object to this file")
    parser.add_argument("--date", default=today(), help="date to keep the result under (default: today)")
    if flags is not None:
        flags(parser)
    options = parser.parse_args(argv)
    progress, screen = Console(stderr=True), Console(width=150)
    rows: Sequence[Row | Absent] = ()
    skipped, began = "", time.monotonic()

    def tell(text: str) -> None:
        progress.print(f"  {name}: {text}", highlight=False)

    try:
        rows = measure(options, tell)
    except Skipped as reason:
        skipped = str(reason)
    took_s = time.monotonic() - began
    tell(f"took {took_s:.0f} s, load average {os.getloadavg()[1]:.1f}")
    result = json.dumps(report(name, rows, date=options.date, skipped=skipped, took_s=took_s), indent=2)
    # A machine that lacks something does not replace what another machine measured.
    if options.out and not (skipped and options.out.exists()):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(result + "\n")
    if options.json:
        print(result)
    elif skipped:
        screen.print(f"{name}: not measured, {skipped}")
    else:
        show(name, rows, screen)
    return all(row.met is not False for row in rows if isinstance(row, Row))
