"""`python -m tests.faults --seconds 120 --seed 7`: fault storms on a local stack, one after the other."""

import argparse
import itertools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moonpool.engine.models.random_checkpoint import SHAPES, create
from tests.faults.report import StormPlan
from tests.faults.scene import base_plan, judge_of
from tests.faults.schedule import FAULTS
from tests.faults.storm import run_storm

SEED = 20_26


def main(argv: Sequence[str] | None = None) -> int:
    """Runs storms; returns 1 when a promise was broken or faults did not happen."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each storm")
    parser.add_argument("--seed", type=int, default=1, help="of the first storm; the next has the next one")
    parser.add_argument("--storms", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--minutes", type=float, help="storms until so much time has passed, however many")
    parser.add_argument("--clients", type=int, default=6, help="requests at once")
    parser.add_argument("--corrupt", type=float, default=0.05, help="share of damaged frames")
    parser.add_argument("--transports", default="local", help="the transport that KV takes: local, tcp or grpc")
    parser.add_argument(
        "--break-connections", type=float, default=0.03, help="share of payloads that break their transport"
    )
    parser.add_argument("--gap-s", type=float, default=2.0, help="mean seconds between faults")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="faults, separated by commas")
    parser.add_argument("--targets", default="prefill,decode,kvstore,conductor", help="kinds of services that are hit")
    parser.add_argument("--shape", default="tiny-llama", choices=SHAPES, help="of the model, whose weights are random")
    parser.add_argument("--engine", default="real", help="real or emulated:PROFILE")
    parser.add_argument("--device", default="cpu", help="of real engines, for example staged:3")
    parser.add_argument("--prefill", type=int, default=2, help="prefill instances")
    parser.add_argument("--decode", type=int, default=2, help="decode instances")
    parser.add_argument("--kvstore", type=int, default=1, help="kvstores")
    parser.add_argument("--conductors", type=int, default=1, help="conductors, side by side")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages of prefill instances")
    parser.add_argument("--ranks", type=int, default=1, help="engine processes of each stage")
    parser.add_argument(
        "--both", action="store_true", help="no prefill instances: decode instances compute the prompts, too"
    )
    parser.add_argument(
        "--blocks", type=int, default=256, help="blocks of each engine's pool; few, so that requests wait for room"
    )
    parser.add_argument("--longest-prompt", type=int, default=400, help="tokens")
    parser.add_argument("--longest-answer", type=int, default=60, help="tokens")
    parser.add_argument("--keep", type=Path, help="folder for logs and stores, kept afterwards")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the reference must not take the cores from the services
    with tempfile.TemporaryDirectory(prefix="moonpool-storm-") as temporary:
        model = Path(temporary) / args.shape
        create(args.shape, model, seed=SEED, dtype="float32")
        judge, failed, began = judge_of(model, args.engine), 0, time.monotonic()
        for done in itertools.count():
            minutes = (time.monotonic() - began) / 60
            if minutes >= args.minutes if args.minutes else done >= args.storms:
                break
            of = f"{args.minutes:g} min" if args.minutes else args.storms
            print(f"storm {done + 1} of {of}: {failed} failed, {minutes:.1f} min", flush=True)
            seed = args.seed + done
            plan = StormPlan(
                seed=seed,
                seconds=args.seconds,
                kinds=args.kinds.split(","),
                targets=args.targets.split(","),
                clients=args.clients,
                corrupt=args.corrupt,
                transports=args.transports,
                break_connections=args.break_connections,
                gap_s=args.gap_s,
                longest_prompt=args.longest_prompt,
                longest_answer=args.longest_answer,
                conductors=args.conductors,
            )
            folder = (args.keep or Path(temporary)) / f"storm-{seed}"
            base = replace(
                base_plan(
                    model,
                    folder,
                    args.engine,
                    blocks=args.blocks,
                    device=args.device,
                    ranks=args.ranks,
                    both=args.both,
                ),
                prefill=0 if args.both else args.prefill,
                decode=args.decode,
                kvstore=args.kvstore,
                conductors=args.conductors,
                pipeline_parallel_size=args.stages,
            )
            report = run_storm(plan, base, judge, os.environ.__setitem__)
            found = report.failures + report.shortfalls()
            for failure in found:
                print(f"FAILED {failure}", flush=True)
            if found:
                failed += 1
                print(f"repeat with: {_again(args, seed)}", flush=True)
    return 1 if failed else 0


def _again(args: argparse.Namespace, seed: int) -> str:
    """The command that repeats one storm."""
    given = vars(args) | {"seed": seed, "storms": 1, "minutes": None, "keep": None, "both": None}
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
    both = ["--both"] if args.both else []
    return shlex.join(["python", "-m", "tests.faults", *(part for flag in flags for part in flag), *both])


if __name__ == "__main__":
    sys.exit(main())
