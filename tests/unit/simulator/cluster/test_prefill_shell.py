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

from moonpool.cost import Speeds
from moonpool.drive.journal import JournalWriter
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.incoming import IncomingRequest
from moonpool.kv.keys import BlockKey, pack_keys
from moonpool.sampling import SamplingParams
from moonpool.sched.lending import LendBlocks, Lent, TakeBack
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import LayerDone, Step, StepResult
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.prefill.core import actions, events
from services.prefill.core.core import PrefillCore
from services.prefill.loading import BlockRead
from services.prefill.requests import Request
from services.prefill.shell import Shell
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import keys_of
from simulator.cluster.settings import core_settings
from simulator.kernel.clock import ps
from simulator.traces.mooncake import TraceRequest
from tests.unit.fakes.engine import FakeEngine
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.scripts import (
    BT,
    SEED,
    Noted,
    assert_same,
    decided,
    ends,
    journalled,
    requests,
    simulated,
)
from tests.unit.simulator.cluster.virtual_loop import run_virtually
from tests.unit.streams.fakes import ROOT

Outer = events.Arrive | events.CopyIn | events.Leave | LendBlocks | TakeBack
"""What others tell an instance."""
KINDS = kv_pb2.INSTANCE_KIND_KVSTORE, kv_pb2.INSTANCE_KIND_DECODE
SPEEDS = replace(PROFILE.speeds, load_bytes_per_s=1.37e6, transfer_bytes_per_s=0.93e6)
"""So that a load and the sending of what came take different times: what ends at one time has no order here."""


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
        number, seconds = step.step_id, step_seconds(self._speeds, step, decode=False)
        for layer in range(self._layers):
            while number not in self._aborted and step.gated and self._opened.get(number, -1) < layer:
                self._news.clear()
                await self._news.wait()
            if number not in self._aborted:
                await asyncio.sleep(seconds / self._layers)
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
    """Stores and decode instances: I/O ends as it did in the simulator. Stands for loading, sending and write-back."""

    def __init__(self, script: list[Noted]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = ends(script)
        self._layers: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._of: dict[tuple[str, int], deque[int]] = defaultdict(deque)
        for noted in script:
            if isinstance(noted.event, events.LayerLoaded):
                self._layers[noted.event.io].append((noted.now, noted.event.layer))
            for action in noted.actions:
                if isinstance(action, actions.OpenTransfer | actions.SendSlices | actions.AwaitVerdict):
                    self._of[type(action).__name__, action.job].append(action.io)
                elif isinstance(action, actions.PutBlocks):
                    self._of["PutBlocks", 0].append(action.io)
                elif isinstance(action, actions.LoadBlocks | actions.CopyBlocks):
                    self._of["load", 0].append(action.io)

    async def load(self, read: BlockRead, on_layer: Callable[[int], None]) -> Any:
        io = self._of["load", 0].popleft()
        for when, layer in self._layers[io]:
            await self._until(when)
            on_layer(layer)
        return await self._end(io)

    async def open(self, request: Request) -> Any:
        return await self._end(self._next("OpenTransfer", request))

    async def send(self, request: Request, pieces: Sequence[actions.Piece]) -> Any:
        return await self._end(self._next("SendSlices", request))

    async def verdict(self, request: Request, timeout_s: float) -> Any:
        return await self._end(self._next("AwaitVerdict", request))

    def close(self, number: int, *, aborted: bool) -> None:
        """Decode hears of it; nobody else does."""

    def room(self, store: kv_pb2.Instance, blocks: int) -> int:
        return blocks

    def submit(
        self, store: kv_pb2.Instance, keys: Sequence[BlockKey], parents: Sequence[BlockKey], tenant: str,
        blocks: Sequence[int], over: Callable[[bool], None],
    ) -> None:  # fmt: skip
        assert len(keys) == len(parents) == len(blocks)
        when, _ = self._ends[self._of["PutBlocks", 0].popleft()]
        self._loop.call_at(when, over, True)

    def _next(self, kind: str, request: Request) -> int:
        return self._of[kind, request.number].popleft()

    async def _end(self, io: int) -> Any:
        when, result = self._ends[io]
        await self._until(when)
        return result

    async def _until(self, when: float) -> None:
        await asyncio.sleep(when - self._loop.time())


async def play(config: ClusterConfig, script: list[Noted], journal: Path) -> None:
    """Tells the shell what comes from outside; the rest happens by itself."""
    loop = asyncio.get_running_loop()
    engine = TimedEngine(config.blocks, config.profile.speeds, config.profile.layers)
    outside: Any = Outside(script)
    core = PrefillCore(core_settings(config), config.profile.speeds)
    shell = Shell(
        core, engine, outside, outside, outside, Recorder("prefill-0", None), lambda: None,
        JournalWriter(journal, "prefill-0", 1 << 30), loop.time,
    )  # fmt: skip
    work = asyncio.create_task(shell.run())
    await asyncio.sleep(0)
    for noted in script:
        if isinstance(noted.event, Outer):
            await asyncio.sleep(noted.now - loop.time())
            tell(shell, noted.event)
    await shell.empty.wait()
    await asyncio.sleep(max(when for when, _ in ends(script).values()) + 1.0 - loop.time())
    shell.close()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    engine.pool.close()


def tell(shell: Shell, event: Outer) -> None:
    """Lets something happen that comes from outside."""
    match event:
        case events.Arrive():
            shell.submit(request_of(event))
        case events.CopyIn(_, keys, source):
            order = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=instance(source), tenant=event.tenant)
            shell.copying.order(order)
        case LendBlocks():
            shell.pool.lend(event)
        case TakeBack():
            shell.pool.take_back(event)
        case events.Leave():
            shell.post(event)


def instance(source: events.Source) -> kv_pb2.Instance:
    """Where blocks are."""
    return kv_pb2.Instance(id=source.name, kind=KINDS[source.peer], address=f"{source.name}:1")


def request_of(event: events.Arrive) -> Request:
    """The request of an arrival, as the contract has it."""
    sampling = SequenceSampling.of(SamplingParams(max_tokens=1), event.num_tokens, ())
    tokens = array("i", [event.job] * event.num_tokens)
    incoming = IncomingRequest(f"r{event.job}", tokens, event.keys, BlockKey(ROOT), event.tenant, sampling)
    target = None if event.held_blocks is None else kv_pb2.TransferTarget(held_blocks=event.held_blocks)
    sources = [prefill_pb2.PrefixSource(instance=instance(it), blocks=it.blocks) for it in event.sources]
    copies = [kv_pb2.Instance(id=copy.store) for copy in event.copies]
    held = [copy.held for copy in event.copies]
    return Request(event.job, incoming, incoming.history(), target, sources, copies, held, event.max_queue_s)


@pytest.mark.parametrize(("blocks", "deadline_s", "seed"), [(16, 0.0, SEED), (16, 1.5, SEED + 1), (400, 0.0, SEED + 2)])
def test_decides_as_the_simulator_does(blocks: int, deadline_s: float, seed: int, tmp_path: Path) -> None:
    """In a pool for all, in one for a few, whose prefixes are loaded, and where prompts are given up.

    By these seeds no two prompts of a step send as much as each other: what ends at one time has no order.
    """
    config = ClusterConfig(
        profile=replace(PROFILE, speeds=SPEEDS), prefill=1, decode=1, kvstore=1, block_tokens=BT, step_tokens=2 * BT,
        pool_blocks=blocks, deadline_s=deadline_s, seed=SEED, copy_share=0.0,
    )  # fmt: skip
    expected = simulated(config, requests(40, random.Random(seed), blocks=10, shared=9), "p0")
    run_virtually(play(config, expected, tmp_path))
    assert_same(decided(journalled(tmp_path)), decided(expected))
    told = [action for one in expected for action in one.actions]
    loads = sum(isinstance(action, actions.LoadBlocks) for action in told)
    assert (loads >= 2) == (blocks == 16)
    assert any(isinstance(one.event, events.Leave) and one.actions for one in expected) == (deadline_s > 0)
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


def test_tenants_and_blocks_of_others_as_in_the_simulator(tmp_path: Path) -> None:
    """Tenants take turns; prefixes are read from another instance, others are copied as ordered, and some read here.

    The orders are the test's, as the conductor's core gives none to a cluster of two. By this seed nothing ends at one
    time, which has no order; by most others something does (docs/adr/0011-the-simulator-drives-the-cores.md).
    """
    config = ClusterConfig(
        profile=replace(PROFILE, speeds=SPEEDS), prefill=2, decode=2, kvstore=1, block_tokens=BT, step_tokens=2 * BT,
        pool_blocks=40, seed=SEED, copy_share=0.0,
    )  # fmt: skip
    trace = documents(90, random.Random(2))

    def order(cluster: Cluster) -> None:
        for number, one in enumerate(trace[::2]):
            source, to = (("p1", 0), ("s0", 0), ("p0", 1))[number % 3]
            keys = keys_of(one, BT)
            copy = partial(cluster.prefills[to].replicate, keys, events.Source(source, len(keys), source != "s0"))
            cluster.world.at(ps(one.timestamp / 1000 + 0.4), lambda copy: copy(), copy)

    expected = simulated(config, trace, "p0", also=order)
    run_virtually(play(config, expected, tmp_path))
    assert_same(decided(journalled(tmp_path)), decided(expected))
    told = [action for one in expected for action in one.actions]
    copied, lent = [sum(isinstance(it, kind) and bool(it.blocks) for it in told) for kind in (actions.EndCopy, Lent)]
    peers = {
        one.event.job: [it.peer for it in one.event.sources] for one in expected if isinstance(one.event, events.Arrive)
    }
    loads = {peers[it.job][it.source] for it in told if isinstance(it, actions.LoadBlocks)}
    assert min(copied, lent) > 2
    assert loads == {True, False}
    assert {one.event.tenant for one in expected if isinstance(one.event, events.Arrive)} == {"t0", "t1"}
