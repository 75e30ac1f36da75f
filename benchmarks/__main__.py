"""`make bench`: runs every benchmark and keeps its JSON object in `benchmarks/results/`."""

import datetime
import importlib
from pathlib import Path

from benchmarks.frame import run

ALL = ("serving",)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs all benchmarks, one after the other."""
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    for name in ALL:
        module = importlib.import_module(f"benchmarks.{name}")
        run(name, module.measure, ["--out", str(RESULTS / f"{date}-{name}.json")])


if __name__ == "__main__":
    main()
