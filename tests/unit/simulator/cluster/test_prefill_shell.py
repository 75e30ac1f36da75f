"""Prefill's shell, on an event loop in virtual time with an emulated engine, decides as the simulator does.

The simulator serves a small seeded trace and notes what its prefill core was told and what it answered. The service's
own shell, driver and journal get the same prompts and cancels at the same times; loads, transfers and writes take as
long as they took there. Steps, their layers and gates are the engine's own. Every decision is the same at the same
time.
"""

import asyncio
import random
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.request import IncomingRequest
from moonpool.kv.keys import BlockKey, pack_keys
from moonpool.runtime.journal import JournalWriter
from moonpool.sampling_params import SamplingParams
from moonpool.scheduling.block_manager import BlocksLent, LendBlocks, ReturnBlocks
from moonpool.scheduling.latency import Speeds
from moonpool.scheduling.state_machine import IoEnded
from moonpool.scheduling.steps import LayerDone, SequenceSampling, Step, StepResult
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.prefill.core import actions, events
from services.prefill.core.scheduler import PrefillScheduler
from services.prefill.executor import PrefillExecutor
from services.prefill.kv_io import BlockRead
from services.prefill.live_requests import LivePrefill
from simulator.clock import ps
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig, prefill_core_settings
from simulator.cluster.requests import keys_of
from simulator.traces.mooncake import TraceRequest
from tests.unit.fakes.engine import FakeEngine
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.scripts import (
    BT,
    SEED,
    Noted,
    assert_same,
    decided,
    journalled,
    requests,
    simulated,
    some_seeds,
)
from tests.unit.simulator.cluster.virtual_loop import run_virtually, virtual_loop
from tests.unit.transport.fakes import ROOT

Outer = events.SubmitJob | events.ReplicateBlocks | events.CancelJob | LendBlocks | ReturnBlocks
"""What others tell an instance."""
KINDS = kv_pb2.INSTANCE_KIND_KVSTORE, kv_pb2.INSTANCE_KIND_DECODE
SPEEDS = replace(PROFILE.speeds, load_bytes_per_s=1.37e6, transfer_bytes_per_s=0.93e6)
"""Loads and sends take times of their own."""


class TimedEngine(FakeEngine):
    """Layers take the time that an emulated engine's do, each when its gate is open; tokens are zeros."""

    def __init__(self, blocks: int, speeds: Speeds, layers: int) -> None:
        super().__init__(blocks)
        self._speeds, self._layers = speeds, layers
        self._opened: dict[int, int] = {}
        self._aborted: set[int] = set()
        self._news = asyncio.Event()

    async def run(
        self, step: Step, *, on_layer: Callable[[LayerDone], None] | None = None, on_step: object = None
    ) -> StepResult:
        assert on_layer is not None
        loop, number, seconds = virtual_loop(), step.step_id, step_seconds(self._speeds, step, decode=False)
        for layer in range(self._layers):
            while number not in self._aborted and step.gated and self._opened.get(number, -1) < layer:
                self._news.clear()
                await self._news.wait()
            if number not in self._aborted:
                await loop.until(loop.now + ps(seconds) // self._layers)
            if number in self._aborted:
                break
            on_layer(LayerDone(number, layer, 0, 0))
        tokens = tuple(None if sequence.sample is None else 0 for sequence in step.sequences)
        return StepResult(tokens, number in self._aborted, 0, round(seconds * 1e9))

    def open_gate(self, step_id: int, layer: int) -> None:
        self._opened[step_id] = max(self._opened.get(step_id, -1), layer)
        self._news.set()

    def abort(self, step_id: int) -> None:
        self._aborted.add(step_id)
        self._news.set()


class Outside:
    """Stores and decode instances. Stands for loading, sending and write-back.

    I/O ends as it did in the simulator, and what ends at one time in the same order: which it is, is theirs to say.
    """

    def __init__(self, script: list[Noted]) -> None:
        self._loop = virtual_loop()
        self._of: dict[tuple[str, int], deque[int]] = defaultdict(deque)
        self._over: dict[int, asyncio.Future[Any]] = {}
        self._loading: dict[int, Callable[[int], None]] = {}
        for action in (action for noted in script for action in noted.actions):
            match action:
                case actions.OpenTransfer() | actions.SendSlices() | actions.AwaitVerdict():
                    self._begins((type(action).__name__, action.job), action.io)
                case actions.WriteBackBlocks():
                    self._begins(("PutBlocks", 0), action.io)
                case actions.LoadBlocks() | actions.ReadReplica():
                    self._begins(("load", 0), action.io)

    def tell(self, event: events.LayerLoaded | IoEnded[Any]) -> None:
        """Something of I/O is over; that of steps is the engine's."""
        if isinstance(event, events.LayerLoaded):
            self._loading[event.io](event.layer)
        elif event.io in self._over and not self._over[event.io].done():
            self._over[event.io].set_result(event.result)

    async def load(self, read: BlockRead, on_layer: Callable[[int], None]) -> Any:
        io = self._of["load", 0].popleft()
        self._loading[io] = on_layer
        return await self._over[io]

    async def open(self, request: LivePrefill) -> Any:
        return await self._next("OpenTransfer", request)

    async def send(self, request: LivePrefill, pieces: Sequence[actions.LayerBlocks]) -> Any:
        return await self._next("SendSlices", request)

    async def verdict(self, request: LivePrefill, timeout_s: float) -> Any:
        return await self._next("AwaitVerdict", request)

    def close(self, number: int, *, aborted: bool) -> None:
        """Decode hears of it; nobody else does."""

    def room(self, store: kv_pb2.Instance, blocks: int) -> int:
        return blocks

    def submit(
        self, store: kv_pb2.Instance, keys: Sequence[BlockKey], parents: Sequence[BlockKey], tenant: str,
        blocks: Sequence[int], over: Callable[[bool], None],
    ) -> None:  # fmt: skip
        assert len(keys) == len(parents) == len(blocks)
        self._over[self._of["PutBlocks", 0].popleft()].add_done_callback(lambda _: over(True))

    def _begins(self, key: tuple[str, int], io: int) -> None:
        self._of[key].append(io)
        self._over[io] = self._loop.create_future()

    def _next(self, kind: str, request: LivePrefill) -> "asyncio.Future[Any]":
        return self._over[self._of[kind, request.number].popleft()]


async def play(config: ClusterConfig, script: list[Noted], journal: Path) -> None:
    """Tells the shell what comes from outside, what comes at one time in its order; the rest happens by itself.

    What the engine does at that time comes before, as in the simulator.
    """
    loop = virtual_loop()
    engine = TimedEngine(config.blocks, config.profile.speeds, config.profile.layers)
    outside: Any = Outside(script)
    core = PrefillScheduler(prefill_core_settings(config), config.profile.speeds)
    executor = PrefillExecutor(
        core,
        ExecutorParts(
            engine,
            outside,
            Recorder("prefill-0", None),
            lambda *, soon=False: None,
            JournalWriter(journal, "prefill-0", 1 << 30),
            loop.time,
        ),
        outside,
        outside,
    )
    work = asyncio.create_task(executor.run())
    await asyncio.sleep(0)
    for noted in script:
        if isinstance(noted.event, Outer | events.LayerLoaded | IoEnded):
            await loop.until(ps(noted.now))
            await loop.settled()
            if isinstance(noted.event, Outer):
                tell(executor, noted.event)
            else:
                outside.tell(noted.event)
            await loop.settled()
    await executor.empty.wait()
    executor.close()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    engine.pool.close()


def tell(executor: PrefillExecutor, event: Outer) -> None:
    """Lets something happen that comes from outside."""
    match event:
        case events.SubmitJob():
            executor.submit(request_of(event))
        case events.ReplicateBlocks(_, keys, source):
            order = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=instance(source), tenant=event.tenant)
            executor.copying.order(order)
        case LendBlocks():
            executor.pool.lend(event)
        case ReturnBlocks():
            executor.pool.take_back(event)
        case events.CancelJob():
            executor.post(event)


def instance(source: events.KVSource) -> kv_pb2.Instance:
    """Where blocks are."""
    return kv_pb2.Instance(id=source.name, kind=KINDS[source.peer], address=f"{source.name}:1")


def request_of(event: events.SubmitJob) -> LivePrefill:
    """The request of an arrival, as the contract has it."""
    sampling = SequenceSampling.of(SamplingParams(max_tokens=1), event.request.tokens, ())
    tokens = array("i", [event.job] * event.request.tokens)
    incoming = IncomingRequest(f"r{event.job}", tokens, BlockKey(ROOT), sampling, event.request)
    target = None if event.held_blocks is None else kv_pb2.TransferTarget(held_blocks=event.held_blocks)
    sources = [prefill_pb2.PrefixSource(instance=instance(it), blocks=it.blocks) for it in event.sources]
    copies = [kv_pb2.Instance(id=copy.store) for copy in event.copies]
    held = [copy.held for copy in event.copies]
    return LivePrefill(event.job, incoming, incoming.history(), target, sources, copies, held, event.max_queue_s)


@pytest.mark.parametrize("seed", [SEED + 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize(("blocks", "deadline_s"), [(16, 0.0), (16, 1.5), (400, 0.0)])
def test_decides_as_the_simulator_does(blocks: int, deadline_s: float, seed: int, tmp_path: Path) -> None:
    """In a pool for all, in one for a few, whose prefixes are loaded, and where prompts are given up."""
    config = ClusterConfig(
        profile=replace(PROFILE, speeds=SPEEDS), prefill=1, decode=1, kvstore=1, block_tokens=BT, step_tokens=2 * BT,
        pool_blocks=blocks, deadline_s=deadline_s, seed=SEED, copy_share=0.0,
    )  # fmt: skip
    expected = simulated(config, requests(40, random.Random(seed), blocks=10, shared=9), "p0")
    run_virtually(play(config, expected, tmp_path))
    assert_same(decided(journalled(tmp_path)), decided(expected))
    told = [action for one in expected for action in one.actions]
    loads = sum(isinstance(action, actions.LoadBlocks) for action in told)
    assert (loads >= 2) == (blocks == 16) or (deadline_s and seed < SEED)  # by others fewer are left to load
    assert any(isinstance(one.event, events.CancelJob) and one.actions for one in expected) == (deadline_s > 0)
    assert sum(isinstance(action, actions.EndJob) for action in told) > 10


def documents(count: int, rng: random.Random) -> list[TraceRequest]:
    """Prompts of two tenants, that begin with parts of their two documents each."""
    found, at, next_id = [], 0.0, 1000
    for _ in range(count):
        at += rng.expovariate(30.0) * 1000
        document, common, own = rng.randrange(4), rng.randint(4, 9), rng.randint(0, 4)
        ids = (*range(10 * document, 10 * document + common), *range(next_id, next_id + own))
        next_id += own
        tokens = len(ids) * BT - rng.randint(0, BT - 1)
        found.append(TraceRequest(at, tokens, rng.randint(1, 2 * BT), ids, tenant=f"t{document % 2}"))
    return found


@pytest.mark.parametrize("seed", some_seeds(12))
def test_tenants_and_blocks_of_others_as_in_the_simulator(seed: int, tmp_path: Path) -> None:
    """Tenants take turns; prefixes are read from another instance, others are copied as ordered, and some read here.

    The orders are the test's, as the conductor's core gives none to a cluster of two.
    """
    config = ClusterConfig(
        profile=replace(PROFILE, speeds=SPEEDS), prefill=2, decode=2, kvstore=1, block_tokens=BT, step_tokens=2 * BT,
        pool_blocks=40, seed=SEED, copy_share=0.0,
    )  # fmt: skip
    trace = documents(90, random.Random(seed))

    def order(cluster: Cluster) -> None:
        for number, one in enumerate(trace[::2]):
            source, to = (("p1", 0), ("s0", 0), ("p0", 1))[number % 3]
            keys = keys_of(one, BT)
            copy = partial(cluster.prefills[to].replicate, keys, events.KVSource(source, len(keys), source != "s0"))
            cluster.world.at(ps(one.timestamp / 1000 + 0.4), lambda copy: copy(), copy)

    expected = simulated(config, trace, "p0", also=order)
    run_virtually(play(config, expected, tmp_path))
    assert_same(decided(journalled(tmp_path)), decided(expected))
    told = [action for one in expected for action in one.actions]
    copied, lent = [
        sum(isinstance(it, kind) and bool(it.blocks) for it in told) for kind in (actions.EndReplication, BlocksLent)
    ]
    peers = {
        one.event.job: [it.peer for it in one.event.sources]
        for one in expected
        if isinstance(one.event, events.SubmitJob)
    }
    loads = {peers[it.job][it.source] for it in told if isinstance(it, actions.LoadBlocks)}
    assert min(copied, lent) > 0
    assert loads == {True, False} or seed > 2  # later seeds: with some, no prompt reads another instance
    assert {one.event.request.tenant for one in expected if isinstance(one.event, events.SubmitJob)} == {"t0", "t1"}
