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
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.conductor_proxy import measure_proxy
from benchmarks.frame import Progress, Row, paired, run
from benchmarks.kvstore_match import percentile
from benchmarks.processes import own_resident_bytes
from moonpool.base.kv.keys import BlockKey, block_keys, unpack_keys
from moonpool.base.rpc.tuning import tune_gc
from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.events import KeysChanged
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.kv_links import LinkRead
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.routing import RoutingConfig, RoutingRequest
from moonpool.conductor.placement.policies import DEFAULT_POLICY
from moonpool.conductor.placement.policies.registry import load_policy

SEED = 1
CHAIN_BLOCKS = 2000
BLOCK_SIZE = 16
KEYS_PER_MESSAGE = 4096
SHAPE = KVShape(block_size=BLOCK_SIZE, token_bytes=131072, layers=32)
PROFILES = (
    Speeds(1e-3, 4e-5, 2e-9, 8e-3, 5e-5, 3e-8, 3e9, 5e9, 1e-3, 1e-8),
    Speeds(1e-3, 7e-5, 4e-9, 12e-3, 8e-5, 5e-8, 3e9, 5e9, 1e-3, 1e-8),
    Speeds(2e-3, 15e-5, 9e-9, 20e-3, 15e-5, 9e-8, 2e9, 3e9, 1e-3, 1e-8),
)
"""Three kinds of machines, about as an 8B model runs on accelerators; instances differ by some percent."""
NOISE = 0.04
COPIES = 3
"""Prefill instances that hold a part of each chain; a kvstore holds all."""
STORES = 8
IN_FLIGHT = 2000
"""Requests with open claims at a time."""
ASKED_CHAINS = 100
KEY_BYTES = 32.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large a cluster is: instances of each kind, and blocks."""

    prefills: int
    decodes: int
    blocks: int

    @property
    def chains(self) -> int:
        """Chains of blocks."""
        return max(1, self.blocks // CHAIN_BLOCKS)


@dataclass(frozen=True, slots=True)
class Told:
    """How telling the blocks went: key events, their seconds, blocks, and bytes of memory that they took."""

    events: int
    seconds: float
    blocks: int
    nbytes: int


def chain_keys(number: int) -> list[BlockKey]:
    """One chain's keys; the same in every process."""
    generator = random.Random(f"{SEED}/{number}")
    return unpack_keys(generator.randbytes(32 * CHAIN_BLOCKS))


def hashing_seconds() -> float:
    """Seconds for hashing one prompt with `CHAIN_BLOCKS` blocks."""
    tokens = [token % 50_000 for token in range(CHAIN_BLOCKS * BLOCK_SIZE)]
    begin = time.thread_time()
    block_keys(b"r" * 32, tokens, BLOCK_SIZE)
    return time.thread_time() - begin


class ConductorWorld:
    """The view of a cluster with this size, and requests that a policy places there."""

    def __init__(self, size: Size, policy: str = DEFAULT_POLICY) -> None:
        self._size = size
        self._random = random.Random(SEED)
        self.cluster = ClusterView(
            RoutingConfig(policy=load_policy(policy), peers=True, copy_share=0.1), 2 * size.blocks
        )
        self._sequences: dict[str, int] = {}
        self._open: deque[tuple[int, int]] = deque()
        self._now, self._number = 0.0, 0
        self._prefills = [f"prefill-{number}" for number in range(size.prefills)]
        self._decodes = [f"decode-{number}" for number in range(size.decodes)]
        self._stores = [f"kvstore-{number}" for number in range(STORES)]
        for kind, names in (
            (InstanceKind.PREFILL, self._prefills),
            (InstanceKind.DECODE, self._decodes),
            (InstanceKind.KVSTORE, self._stores),
        ):
            for name in names:
                self._join(kind, name)

    def tell(self) -> Told:
        """Report all instances' blocks, as event messages."""
        before, seconds, events = own_resident_bytes(), 0.0, 0
        for number in range(self._size.chains):
            keys = b"".join(chain_keys(number))
            for name, count in self._holders(number):
                for at in range(0, count, KEYS_PER_MESSAGE):
                    message = keys[at * 32 : min(at + KEYS_PER_MESSAGE, count) * 32]
                    begin = time.thread_time()
                    stored = tuple(unpack_keys(message))
                    event = KeysChanged(
                        name, self._sequences[name], stored, (), snapshot_begin=False, snapshot_end=False
                    )
                    self.cluster.keys_changed(event)
                    seconds += time.thread_time() - begin
                    self._sequences[name] += 1
                    events += len(message) // 32
        return Told(events, seconds, len(self.cluster.index), own_resident_bytes() - before)

    def decide(self, keys: list[BlockKey]) -> float:
        """Place a request for a chain and a bit more; return the seconds of plan and claims.

        Some earlier request ends, and two instances report, each apart from the time that is returned.
        """
        self._now += 2e-3
        begin = time.thread_time()
        self._number += 1
        key = QueueKey("", self._now, self._number)
        tokens = len(keys) * BLOCK_SIZE + 5
        plan = self.cluster.plan(RoutingRequest(tokens, 400, keys, keys[0], self._now, queue_key=key))
        best = plan.prefill
        place = key if best.delay_s is None else key.delayed(best.delay_s)
        read = best.source, place, LinkRead.of(best), plan.send_s
        prefill = self.cluster.claim_prefill(best.id, best.busy_s, self._now, *read)
        self.cluster.prefills.in_flight.placed(prefill, best.id, keys)
        self.cluster.replication.placed(keys, plan.hint, "", self._now)
        decode = self.cluster.claim_decode(
            plan.decodes[0].id, PlacedAnswer(plan.demand.prompt_tokens, plan.decodes[0].blocks)
        )
        seconds = time.thread_time() - begin
        self._open.append((prefill, decode))
        if len(self._open) > IN_FLIGHT:
            for claim in self._open.popleft():
                self.cluster.release(claim, self._now)
        for claim in (prefill, decode):
            self.cluster.acknowledged(claim)
        self._report(plan.prefill.id, drain_s=max(plan.prefill.queue_s + plan.prefill.busy_s, 0.0))
        running = self._random.randrange(20, 60)
        self._report(plan.decodes[0].id, running=running, context_tokens=8000 * running, free_blocks=1 << 19)
        return seconds

    def _join(self, kind: InstanceKind, name: str) -> None:
        wobble = 1 + self._random.uniform(-NOISE, NOISE)
        base = self._random.choice(PROFILES)
        speeds = replace(
            base.slowed_prefill(wobble).slowed_decode(wobble), load_bytes_per_s=base.load_bytes_per_s * wobble
        )
        shape = None if kind is InstanceKind.KVSTORE else SHAPE
        self.cluster.join(InstanceFacts(name, 1, kind, 1 << 20, shape, speeds, max_num_batched_tokens=2048), 0.0)
        self.cluster.keys_changed(KeysChanged(name, 0, (), (), snapshot_begin=True, snapshot_end=True))
        self._sequences[name] = 1
        if kind is InstanceKind.PREFILL:
            self._report(name, drain_s=self._random.uniform(0.0, 2.0))
        elif kind is InstanceKind.DECODE:
            running = self._random.randrange(60)
            self._report(name, running=running, context_tokens=8000 * running, free_blocks=1 << 19)

    def _holders(self, number: int) -> Iterator[tuple[str, int]]:
        """Which instance holds how many leading blocks of a chain."""
        yield self._stores[number % STORES], CHAIN_BLOCKS
        for name in self._random.sample(self._prefills, min(COPIES, len(self._prefills))):
            yield name, self._random.randrange(1, CHAIN_BLOCKS + 1)
        yield self._random.choice(self._decodes), self._random.randrange(1, CHAIN_BLOCKS + 1)

    def _report(self, name: str, **load: float) -> None:
        self.cluster.report(name, LoadFacts(**load), self._now)  # type: ignore[arg-type]


WANTED_DECISIONS, WANTED_EVENTS = 2000.0, 200_000.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run: reporting, seconds for decisions on chains asked for the first time and again, seconds for hashing."""

    told: Told
    first: list[float]
    again: list[float]
    hashing: float


def one_run(size: Size, decisions: int, policy: str) -> Run:
    """Build a world and place that many requests."""
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
        run = partial(one_run, size, options.decisions, options.policy)
        for _ in range(options.runs):
            done = processes.submit(run).result()
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
