"""What the simulator itself takes: `python -m benchmarks.simulator --trace TRACE.jsonl [--json]`.

`moonpool simulate scale` serves a whole trace with 16 + 16 instances, its first half alone, and then its beginning with
1,000 + 1,000 at the same load each. Each run is a process of its own, so its peak of memory is its own. Times are its
processor's, with the imports, so that other processes do not count but for the caches that they share. Without a trace
requests are generated, and the figure that is of the public trace only is not measured.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Absent, Progress, Row, bounded, paired, run
from benchmarks.processes import own_peak_bytes
from moonpool.cli.simulate import app
from moonpool.simulator.experiments.frame import RequestSource
from moonpool.simulator.traces.mooncake import trace_path

WANTED_S = 60.0
"""Processor seconds for the conversation trace on 16 + 16 instances, at most."""
FLAT = 0.85
"""Wanted of the peak of memory: the first half of the trace, in which caches fill, has at least this share of it. Later
what the trace's checker remembers grows: up to a million ids, of which the public trace has a fifth."""
GENERATED_REQUESTS = 3000
NO_TRACE = "no trace: --trace or $MOONPOOL_TRACE"


class Size(NamedTuple):
    """A run: instances of each kind, the first so many requests, and how many times as quick they come."""

    instances: int
    requests: int
    rate: float = 1.0


class Cost(NamedTuple):
    """What a run took, and how many seconds of virtual time it simulated."""

    processor_s: float
    peak_bytes: int
    virtual_s: float


def simulated(trace: Path | None, size: Size) -> Cost:
    """Simulate in this process, which should have done nothing before."""
    os.environ.pop("MOONPOOL_TRACE", None)
    instances, out = str(size.instances), io.StringIO()
    arguments = ["--prefill", instances, "--decode", instances, "--requests", str(size.requests)]
    arguments += ["--rate", f"{size.rate:g}", "--json", *(("--trace", str(trace)) if trace else ())]
    with contextlib.redirect_stdout(out):
        app(["scale", *arguments], standalone_mode=False)
    (row,) = json.loads(out.getvalue())["rows"]
    return Cost(time.process_time(), own_peak_bytes(), row["virtual_s"])


def rows(
    source: RequestSource, whole: Size, large: Size, runs: Sequence[tuple[Cost, Cost, Cost]]
) -> list[Row | Absent]:
    """The rows of runs of the whole trace, its first half, and the large cluster."""
    name = source.path.name if source.path else "generated"
    where = f"{name}, {whole.requests:,} requests, {whole.instances} + {whole.instances} instances"
    taken = f"{where}: simulated on one core in"
    first: Row | Absent
    flat = FLAT if source.path else None
    if source.path:
        first = bounded(taken, "s", [cost.processor_s for cost, _, _ in runs], "wanted at most", WANTED_S)
    else:
        first = Absent("conversation trace, 16 + 16 instances: simulated on one core in", "wanted at most", NO_TRACE)
    pace = [(cost.virtual_s / cost.processor_s, 1.0) for _, _, cost in runs]
    peaks = [(whole_trace.peak_bytes / 2**20, first_half.peak_bytes / 2**20) for whole_trace, first_half, _ in runs]
    many = f"{name}, {large.requests:,} requests, {large.instances:,} + {large.instances:,} instances"
    return [
        first,
        paired(f"{many}: virtual seconds per second of one core", "s/s", pace, "real time", target=1.0),
        paired(f"{where}: peak of memory", "MiB", peaks, "their first half", less_is_better=True, target=flat),
    ]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    trace = options.trace or trace_path("")
    requests = options.requests or (0 if trace else GENERATED_REQUESTS)
    source = RequestSource(trace, requests)
    count = sum(1 for _ in source.read())
    whole = Size(options.instances, count)
    large = Size(options.many, min(options.many_requests, count), options.many / options.instances)
    sizes = (whole, Size(options.instances, max(1, count // 2)), large)
    runs = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for number in range(options.runs):
            whole_trace, first_half, many = processes.map(simulated, [trace] * len(sizes), sizes)
            runs.append((whole_trace, first_half, many))
            seconds = ", ".join(f"{cost.processor_s:.1f}" for cost in runs[-1])
            progress(f"run {number + 1} of {options.runs}: {seconds} s of one core")
    return rows(source, whole, large, runs)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--trace", type=Path, help="Mooncake's form (default: $MOONPOOL_TRACE; without it requests are generated)")
    add("--requests", type=int, default=0, help="first ones only; 0 = all of the trace, 3,000 generated ones")
    add("--instances", type=int, default=16, help="prefill and as many decode instances (default 16)")
    add("--many", type=int, default=1000, help="of each kind in the large cluster (default 1,000)")
    add("--many-requests", type=int, default=3000, help="that the large cluster gets (default 3,000)")


if __name__ == "__main__":
    run("simulator", measure, flags=flags)
