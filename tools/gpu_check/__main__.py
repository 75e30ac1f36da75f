"""`python -m tools.gpu_check --out DIR` proves and measures the path of a GPU; exits with 1 if a stage failed.

Each stage is a process with a time limit. A stage that fails lets the next go on. DIR gets results.json, results.md and
logs.txt, written anew after each stage. `--device staged --tiny` runs the same stages on a CPU.
"""

import argparse
import sys
from pathlib import Path

from tools.gpu_check.frame import STAGES, Options, Stage, run
from tools.gpu_check.stages import ORDER
from tools.gpu_check.where import DEVICES


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the results")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="staged: a CPU that behaves like a GPU")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds on a CPU")
    parser.add_argument("--only", default="", metavar="STAGE,...", help=f"some of {', '.join(ORDER)}")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="of all stages together")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else ORDER
    unknown = sorted(set(names) - set(ORDER))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: not among {', '.join(ORDER)}")
    stages = [Stage.read(STAGES, name) for name in ORDER if name in names]
    results = run(stages, Options(options.out, options.device, options.tiny, options.budget))
    failed = [result.stage for result in results if result.ok is False]
    skipped = [result.stage for result in results if result.ok is None]
    print(f"failed: {', '.join(failed) or 'none'}; skipped: {', '.join(skipped) or 'none'}; {options.out}/results.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
