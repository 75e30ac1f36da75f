"""`python -m tests.faults --seconds 120 --seed 7`: storms on a stack of this machine, until one finds something."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from moonpool.cli.stack import StackPlan
from moonpool.model.create import create
from tests.faults.judges import ReferenceJudge
from tests.faults.schedule import FAULTS
from tests.faults.storm import StormPlan, run_storm
from tests.integration.reference import Reference

SEED = 20_26
BLOCK = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs storms; returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each storm")
    parser.add_argument("--seed", type=int, default=1, help="of the first storm; the next has the next one")
    parser.add_argument("--storms", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--clients", type=int, default=6, help="requests at once")
    parser.add_argument("--corrupt", type=float, default=0.05, help="share of damaged frames")
    parser.add_argument("--gap-s", type=float, default=2.0, help="mean seconds between faults")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="faults, separated by commas")
    parser.add_argument("--targets", default="prefill,decode,kvstore,conductor", help="kinds of services that are hit")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages of prefill instances")
    parser.add_argument("--keep", type=Path, help="folder for logs and stores, kept afterwards")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the judge must not take the cores from the services
    with tempfile.TemporaryDirectory(prefix="moonpool-storm-") as temporary:
        model = Path(temporary) / "tiny-llama"
        create("tiny-llama", model, seed=SEED, dtype="float32")
        judge = ReferenceJudge(Reference(model))
        for seed in range(args.seed, args.seed + args.storms):
            plan = StormPlan(
                seed=seed,
                seconds=args.seconds,
                kinds=args.kinds.split(","),
                targets=args.targets.split(","),
                clients=args.clients,
                corrupt=args.corrupt,
                gap_s=args.gap_s,
            )
            base = base_plan(model, (args.keep or Path(temporary)) / f"storm-{seed}", stages=args.stages)
            report = run_storm(plan, base, judge, os.environ.__setitem__)
            for failure in report.failures:
                print(f"FAILED {failure}", flush=True)
            if report.failures:
                return 1
    return 0


def base_plan(model: Path, folder: Path, *, stages: int = 1) -> StackPlan:
    """Two instances of each kind of engine, with pools that are small enough to be fought over."""
    return StackPlan(
        model=str(model),
        data_dir=folder,
        dtype="float32",
        prefill=2,
        decode=2,
        stages=stages,
        threads=1,
        block_tokens=BLOCK,
        kv_bytes=4 << 20,
        dram_bytes=4 << 20,
        ssd_bytes=64 << 20,
        extra={"prefill": ["--step-tokens", "64"]},
    )


if __name__ == "__main__":
    sys.exit(main())
