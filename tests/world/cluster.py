"""A cluster of the real services in one process: each begun by its own `serve`, with its own flags, on virtual time.

A run may leave tasks of killed nodes behind, which never end. So a program that has run a cluster ends with `leave`.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio

from moonpool.base import world
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.telemetry.spans import Recorder
from moonpool.cli.check import GaugeReading, describe
from moonpool.conductor import service as conductor
from moonpool.conductor.config import ConductorConfig
from moonpool.engine.emulated.kv import continuation, token_seed
from moonpool.engine.remote import process as remote_stage
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.roles import process as engines
from moonpool.kvstore import service as kvstore
from moonpool.kvstore.config import KVStoreConfig
from moonpool.v1 import (
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.world.disk import Disk
from tests.world.loop import EPOCH_S, NODE, InlineExecutor, Node, VirtualLoop, VirtualTime, draws
from tests.world.network import JITTER_S, MessageLog, Network

if TYPE_CHECKING:
    from tests.world.engine import Rank

MODEL = str(model_dir())
_CONFIG = load_config(model_dir())
PROFILE = "llama-70b-a800"
CONDUCTOR_PORT, STORE_PORT, STAGES_PORT = 10_001, 10_002, 10_003
"""The same in each life of a process; engines have another port in each."""
SETTLE_S = 2.0
"""From the start of the last service until requests come."""
ASK_S = 5.0
"""Longest wait for an answer about gauges."""
REST_S = 45.0
"""After the last request all gauges must be at rest within so long."""
LOOK_S = 0.005
"""Between two looks at something that a test waits for."""
WAIT_S = 60.0

Serve = Callable[..., Awaitable[None]]
KINDS: dict[str, tuple[Serve, Any]] = {
    "conductor": (conductor.serve, ConductorConfig),
    "kvstore": (kvstore.serve, KVStoreConfig),
    "prefill": (engines.serve, engines.PrefillProcessConfig),
    "decode": (engines.serve, engines.DecodeProcessConfig),
    "stage": (remote_stage.serve, StageConfig),
}


STATS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "conductor": lambda channel: conductor_pb2_grpc.ConductorServiceStub(channel).ConductorStats(
        conductor_pb2.ConductorStatsRequest(), timeout=ASK_S
    ),
    "kvstore": lambda channel: kvstore_pb2_grpc.KVStoreServiceStub(channel).KVStoreStats(
        kvstore_pb2.KVStoreStatsRequest(), timeout=ASK_S
    ),
    "prefill": lambda channel: prefill_pb2_grpc.PrefillServiceStub(channel).PrefillStats(
        prefill_pb2.PrefillStatsRequest(), timeout=ASK_S
    ),
    "decode": lambda channel: decode_pb2_grpc.DecodeServiceStub(channel).DecodeStats(
        decode_pb2.DecodeStatsRequest(), timeout=ASK_S
    ),
}
USAGE = world.MachineUse(lambda: 0.0, lambda: 0.0)
"""Nodes share one real process, whose memory and files say nothing of a node."""


class Simulation:
    """Time, the network, and the worlds of its nodes, all of them from one seed."""

    def __init__(self, seed: int = 1, log: str | None = None, jitter_s: float = JITTER_S) -> None:
        self.seed = seed
        self.time = VirtualTime()
        self.log = MessageLog(log)
        self.network = Network(self.time, seed, self.log, jitter_s)
        self.loop = VirtualLoop(self.time)
        self.waits: dict[str, float] = {}
        """Seconds for which a process had no processor, by its name."""
        self.waiting_since: dict[str, float] = {}
        """Processes that have none now."""

    def waited_s(self, name: str) -> float:
        """As the kernel counts it."""
        since = self.waiting_since.get(name)
        return self.waits.get(name, 0.0) + (0.0 if since is None else self.time.now - since)

    def enter(self, node: Node) -> None:
        """From here on the running context is a node's."""
        numbers = draws(f"{self.seed} {node}")
        clock = world.Clock(
            self.time.monotonic, self.time.monotonic_ns, lambda: EPOCH_S + self.time.now + node.skew_s, lambda: 0.0
        )
        NODE.set(node)
        world.CURRENT.set(
            world.World(
                clock,
                world.Draws(numbers.getrandbits, numbers.randbytes),
                self.network,
                InlineExecutor,
                USAGE,
                world.Processes(lambda: node.name, self.waited_s),
            )
        )

    def run_again(self, name: str) -> None:
        """A process has a processor from now on."""
        self.waits[name] = self.waited_s(name)
        self.waiting_since.pop(name, None)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` as a client's code until it ends."""
        asyncio.set_event_loop(self.loop)
        context = copy_context()
        context.run(self.enter, Node("client"))
        return self.loop.run_until_complete(context.run(self.loop.create_task, main))


class _Process(ProcessContext):
    """What `serve` gets; `ready` has the address as soon as the service announces its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Recorder(name, None), io.StringIO())
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def announce(self, address: str) -> None:
        self.announced = True
        self.ready.set_result(address)


class Service:
    """One service, which may have several lives.

    Attributes:
        disk: of a kvstore; None: the kvstore has DRAM alone.
        stages: processes of the engine in this life, if a checkpoint's own engine computes; those on this host.
        leader: of a stage on a host of its own the instance with the first stages; "" of other services.
        kind_now: role of an engine that has changed roles; a test that changes them says so.
        journals: folder in which each life's core keeps a journal; None: none is kept.
    """

    def __init__(
        self, simulation: Simulation, name: str, flags: Sequence[str], *, computes: bool = False, leader: str = ""
    ) -> None:
        """`computes`: whether the checkpoint's own engine computes."""
        self.name, self.leader = name, leader
        self._simulation = simulation
        self._flags = [*flags, "--id", name]
        self._computes = computes
        self.skew_s = 0.0
        self._life = 0
        self.kind_now = self.kind
        self.disk: Disk | None = None
        self.stages: Sequence[Rank] = ()
        self.journals: Path | None = None
        self.node: Node
        self.task: asyncio.Task[None]
        self._process: _Process

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def address(self) -> str:
        """Where this life serves; it must have been ready."""
        return self._process.ready.result()

    async def start(self) -> str:
        """Begin a life; returns the address when the service is ready."""
        self.begin()
        if not await self.is_ready():
            self.task.result()
        return self.address

    async def is_ready(self) -> bool:
        """Waits until the service serves; False if it could not start because its disk fails."""
        ready = self._process.ready
        both: list[asyncio.Future[Any]] = [self.task, ready]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self.task.done():
            return True
        if self.disk is None or not isinstance(self.task.exception(), ConfigError):
            self.task.result()
        return False

    def begin(self) -> None:
        """Begin a life, without waiting for it."""
        self._life += 1
        self.kind_now = self.kind
        self.node = Node(self.name, self._life, self.skew_s)
        copy_context().run(self._begin)

    def _begin(self) -> None:
        self._simulation.enter(self.node)
        serve, config = KINDS[self.kind]
        self._process, self.stages = _Process(self.name), ()
        flags, parts = list(self._flags), dict[str, Any]()
        if self.disk is not None:
            layer = self.disk.files
            flags += ["--data-dir", str(self.disk.path)]
            parts["files"] = lambda _: layer
        if self.leader:
            from tests.world.engine import HostedStages

            parts["processes"] = HostedStages(decode=self.leader.startswith("decode"), begun=self._engine_begun)
        elif self._computes:
            from tests.world.engine import start_stages  # torch takes seconds to import

            parts["start"] = partial(start_stages, decode=self.kind == "decode", begun=self._engine_begun)
        if self.journals is not None:
            flags += ["--set", f"journal_dir={self.journals / str(self.node)}"]
        serving = serve(self._process, config.load(flags), **parts)
        self.task = self._simulation.loop.create_task(_awaited(serving), name=str(self.node))

    def _engine_begun(self, stages: Sequence[Rank]) -> None:
        self.stages = stages

    def kill(self, *, power: bool = False) -> None:
        """As `kill -9`: no code of the node runs any more. With `power` its disk loses what was not synced."""
        GRAVEYARD.append((self.task, self._process))
        self.node.dead = True
        self._simulation.network.kill(self.node)
        if self.disk is not None:
            self.disk.new_life(power=power)

    def stop(self) -> None:
        """As SIGSTOP."""
        self.node.held = []

    def starve(self) -> None:
        """It is ready to run, and gets no processor."""
        self._simulation.waiting_since[self.name] = self._simulation.time.now
        self.node.held = []

    def resume(self) -> None:
        """As SIGCONT; or it gets a processor again."""
        self._simulation.run_again(self.name)
        self._simulation.loop.resume(self.node)

    def signal(self, number: int) -> None:
        """Send a signal for which the service has a handler."""
        self._simulation.loop.signal(self.node, number)

    async def drain(self) -> None:
        """As SIGTERM; returns when the service has ended."""
        self._process.stopping.set()
        await self.task


GRAVEYARD: list[Any] = []
"""What the dead had, so that nothing of it is destroyed: that would run code of theirs."""


async def _awaited(service: Awaitable[None]) -> None:
    await service


class Cluster:
    """Services by name: "conductor-0", "kvstore-0", "prefill-0", "decode-0", ... Each is on a host of its own.

    A "stage-0" is a pipeline stage of one of the others.
    """

    def __init__(
        self,
        simulation: Simulation,
        counts: Mapping[str, int],
        flags: Mapping[str, Sequence[str]],
        profile: str = PROFILE,
        checkpoint: Path | None = None,
        hosts: Mapping[str, int] | None = None,
    ) -> None:
        """Take how many of each kind, a kind's flags beside the usual ones, and the profile of all engines.

        With a `checkpoint` its own engine computes, in place of the profile's. Of the instances in `hosts` so many
        stages are on hosts of their own; these instances have one stage more.
        """
        hosts = hosts or {}
        self.addresses = [f"10.0.0.{1 + number}:{CONDUCTOR_PORT}" for number in range(counts.get("conductor", 1))]
        model = MODEL if checkpoint is None else str(checkpoint)
        computed = ["--dtype", "float32", "--set", "threads=1", "--set", "core_share=0"]
        compute = ["--engine", f"emulated:{profile}"] if checkpoint is None else computed
        engine = ["--model", model, *compute, "--kv-transports", "grpc"]
        usual = {
            "conductor": ["--model", model],
            "kvstore": ["--kv-transports", "grpc"],
            "prefill": engine,
            "decode": engine,
        }
        self.services: dict[str, Service] = {}
        joins = list[tuple[str, str, int]]()
        for kind in usual:
            for number in range(counts.get(kind, 1)):
                if kind == "conductor":
                    own = ["--listen", self.addresses[number]]
                else:
                    port = STORE_PORT if kind == "kvstore" else 0
                    own = ["--listen", f"10.0.0.{1 + len(self.services)}:{port}"]
                    own += ["--conductor", ",".join(self.addresses)]
                name = f"{kind}-{number}"
                computes = checkpoint is not None and kind in ("prefill", "decode")
                parts = [*usual[kind], *own, *flags.get(kind, ())]
                if remote := hosts.get(name, 0):
                    listen = f"10.0.0.{1 + len(self.services)}:{STAGES_PORT}"
                    settings = (
                        f"nnodes={remote + 1}",
                        f"pipeline_parallel_size={remote + 1}",
                        f"stages_listen={listen}",
                    )
                    parts += [part for setting in settings for part in ("--set", setting)]
                    joins += [(name, listen, rank) for rank in range(1, remote + 1)]
                self.services[name] = Service(simulation, name, parts, computes=computes)
        for number, (leader, address, rank) in enumerate(joins):
            parts = ["--model", model, "--leader", address, "--node-rank", str(rank), "--threads", "1"]
            parts += ["--listen", f"10.0.0.{1 + len(self.services)}:0"]
            self.services[f"stage-{number}"] = Service(simulation, f"stage-{number}", parts, leader=leader)

    async def start(self) -> None:
        """Start all services, conductors first, and let them join."""
        stages = [service for service in self.services.values() if service.leader]
        for stage in stages:  # which wait for their leaders
            stage.begin()
        for service in self.services.values():
            if service not in stages:
                await service.start()
        await asyncio.sleep(SETTLE_S)

    async def gauges(self, *names: str) -> list[GaugeReading]:
        """Gauges of some services, asked one after the other; of all without names.

        Raises:
            MoonpoolError: a service does not answer.
        """
        found: list[GaugeReading] = []
        for name in names or [name for name, service in self.services.items() if not service.leader]:
            service = self.services[name]
            channel = world.CURRENT.get().network.channel(service.address, ())
            for gauge in (await rpc(STATS[service.kind_now](channel))).gauges:
                rest = gauge.at_rest if gauge.HasField("at_rest") else None
                found.append(GaugeReading(name, gauge.name, gauge.value, rest))
        return found

    async def gauge(self, instance: str, name: str) -> float:
        """One gauge of a service."""
        [value] = [gauge.value for gauge in await self.gauges(instance) if gauge.name == name]
        return value

    async def rest(self) -> None:
        """Wait until all gauges of all services are at rest.

        Raises:
            AssertionError: some are not after `REST_S`; names them.
        """
        trouble = ""
        for _ in range(int(REST_S)):
            try:
                held = [gauge for gauge in await self.gauges() if not gauge.resting]
            except MoonpoolError as error:
                trouble = repr(error)
            else:
                if not held:
                    return
                trouble = "; ".join(map(describe, held))
            await asyncio.sleep(1.0)
        raise AssertionError(f"not at rest: {trouble}")

    async def drain(self) -> None:
        """End all services in order, conductors last; raises what one of them raises."""
        services = list(self.services.values())[::-1]
        workers = [service for service in services if not service.name.startswith("conductor")]
        await asyncio.gather(*(service.drain() for service in workers))
        await asyncio.gather(*(service.drain() for service in services if service not in workers))


async def rpc(call: Awaitable[Any]) -> Any:
    """The answer of a call.

    Raises:
        MoonpoolError: the call failed.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until something holds; `what` is that in words."""
    looks = int(WAIT_S / LOOK_S)
    for _ in range(looks):
        if await holds():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError(f"not after {WAIT_S:g} s: {what}")


def prompt(count: int, what: object) -> list[int]:
    """Ordinary token ids, the same for the same `what`."""
    numbers = draws(what)
    return [numbers.randrange(8, 200) for _ in range(count)]


def answer(prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """What an emulated engine answers; without `seed` greedily."""
    state = 0 if seed is None else token_seed(seed)
    return continuation(prompt, count, _CONFIG.vocab_size, _CONFIG.eos_token_ids, seed=state)


def leave(code: int) -> NoReturn:
    """End the process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
