"""`make bench`: runs benchmarks, keeps their JSON objects in `benchmarks/results/`, and writes the page."""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import page
from benchmarks.frame import machine, run, today

ALL = (
    "batches",
    "checkpoint",
    "conductor",
    "engine",
    "eviction",
    "failover",
    "attacks",
    "fairness",
    "gateway",
    "kernels",
    "kv_stream",
    "kv_transfer",
    "kvstore",
    "predictions",
    "sampling",
    "serving",
    "simulated",
    "simulator",
    "stage_links",
    "steps",
    "tls",
    "weight_types",
)
BY_NAME = (
    "connections",
    "goodput",
    "kv_links",
    "next_turn",
    "one_engine",
    "pictures",
    "prefill",
    "requests",
    "routers",
)
"""Run only where they are named: all runs of one take tens of minutes."""
HELP = f"some of {', '.join(ALL)} (default: all of these), or {', '.join(BY_NAME)}, which take minutes a run"


def main(argv: list[str] | None = None) -> int:
    """Run benchmarks, one after the other; return 0 whether their targets are met or not, as the page says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, *BY_NAME, []], help=HELP)
    parser.add_argument("--runs", type=int, default=5, help="measured pairs of each figure")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="folder that results are kept in")
    options = parser.parse_args(argv)
    date = today()
    for name in options.names or ALL:
        module = importlib.import_module(f"benchmarks.{name}")
        path = page.result_path(options.results, name, machine())
        arguments = ["--runs", str(options.runs), "--out", str(path), "--date", date]
        run(name, module.measure, arguments, flags=getattr(module, "flags", None))
    print(page.write(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
