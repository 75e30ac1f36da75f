"""The conductor's decisions in a large cluster: `python -m benchmarks.conductor [--json]`.

A picture of 1,000 prefill and 1,000 decode instances (three kinds of machines, speeds some percent apart) and eight
kvstores is told of a million KV blocks in chains of 2,000, each chain held by a kvstore, by parts at three prefill
instances, and by a part at a decode instance. Then requests for those chains are placed, 2,000 of them in flight, with
reports and releases in between. A decision is the plan and both claims; hashing the prompt comes before and is the
reference beside it. Each run is a separate process; times are the process's processor times, so that other processes do
not count.

Then requests go through a whole conductor (conductor_proxy.py), unless `--requests 0`.
"""

import argparse
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.conductor_proxy import measure_proxy
from benchmarks.conductor_world import SEED, ConductorWorld, Size, Told, chain_keys, hashing_seconds
from benchmarks.frame import Progress, Row, paired, run
from benchmarks.kvstore_match import percentile
from moonpool.base.rpc.tuning import tune_gc
from moonpool.conductor.placement.policies import DEFAULT_POLICY

WANTED_DECISIONS, WANTED_EVENTS = 2000.0, 200_000.0
ASKED_CHAINS = 100
KEY_BYTES = 32.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run: reporting, seconds for decisions on chains asked for the first time and again, seconds for hashing."""

    told: Told
    first: list[float]
    again: list[float]
    hashing: float


def one_run(size: Size, decisions: int, policy: str) -> Run:
    """Builds a world and places that many requests."""
    tune_gc()
    world = ConductorWorld(size, policy)
    told = world.tell()
    chains = [chain_keys(number) for number in range(min(ASKED_CHAINS, size.chains))]
    first = [world.decide(keys) for keys in chains]
    generator = random.Random(SEED)
    again = [world.decide(generator.choice(chains)) for _ in range(decisions)]
    return Run(told, first, again, hashing_seconds())


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    size = Size(options.prefills, options.decodes, options.blocks)
    runs = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        one = partial(one_run, size, options.decisions, options.policy)
        for _ in range(options.runs):
            done = processes.submit(one).result()
            runs.append(done)
            progress(f"run {len(runs)} of {options.runs}: {1e6 * statistics.mean(done.again):.0f} us a decision")
    where = f"{options.policy}, {size.prefills:,}+{size.decodes:,} instances, {size.chains} chains of 2,000 blocks"
    rate = [(1 / statistics.mean(done.again), WANTED_DECISIONS) for done in runs]
    events = [(done.told.events / done.told.seconds, WANTED_EVENTS) for done in runs]
    memory = [(done.told.nbytes / done.told.blocks, KEY_BYTES) for done in runs]

    def beside_hashing(name: str, seconds: list[float]) -> Row:
        pairs = [(1e6 * own, 1e6 * done.hashing) for own, done in zip(seconds, runs, strict=True)]
        return paired(f"{name}, {where}", "us", pairs, "hashing the prompt's 2,000 keys", less_is_better=True)

    return [
        paired(f"decisions, one core, {where}", "1/s", rate, "wanted", target=1.0),
        beside_hashing("decision p50", [statistics.median(done.again) for done in runs]),
        beside_hashing("decision p99", [percentile(done.again, 99) for done in runs]),
        beside_hashing("first decision on a chain, p50", [statistics.median(done.first) for done in runs]),
        paired(f"key events, one core, {where}", "1/s", events, "wanted", target=1.0),
        paired(f"memory of a block, {where}", "B", memory, "its key", less_is_better=True),
        *(measure_proxy(options.runs, options.requests, progress) if options.requests else ()),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--prefills", type=int, default=1000, help="prefill instances (default 1,000)")
    add("--decodes", type=int, default=1000, help="decode instances (default 1,000)")
    add("--blocks", type=int, default=1_000_000, help="KV blocks in the index (default 1,000,000)")
    add("--policy", default=DEFAULT_POLICY, help=f"chooses prefill instances (default {DEFAULT_POLICY})")
    add("--decisions", type=int, default=5000, help="requests placed in each run (default 5,000)")
    add("--requests", type=int, default=400, help="sent through a conductor in each run (default 400; 0 = none)")


if __name__ == "__main__":
    run("conductor", measure, flags=flags)
