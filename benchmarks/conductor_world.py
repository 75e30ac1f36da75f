"""A large cluster as a conductor knows it: told by reports and events as they come over the wire, asked by requests."""

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.processes import own_resident_bytes
from moonpool.base.kv.keys import BlockKey, block_keys, unpack_keys
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
        """Reports all instances' blocks, as event messages."""
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
        """Places a request for a chain and a bit more; returns the seconds of plan and claims.

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
