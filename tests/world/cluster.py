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
from typing import Any, NoReturn

from moonpool import world
from moonpool.bundled import model_dir
from moonpool.rpc.process import ProcessContext
from moonpool.telemetry.spans import Recorder
from services.conductor import service as conductor
from services.conductor.config import ConductorConfig
from services.decode import service as decode
from services.decode.config import DecodeConfig
from services.kvstore import service as kvstore
from services.kvstore.config import KVStoreConfig
from services.prefill import service as prefill
from services.prefill.config import PrefillConfig
from tests.world.loop import EPOCH_S, NODE, InlineExecutor, Node, VirtualLoop, VirtualTime, draws
from tests.world.network import MessageLog, Network

MODEL = str(model_dir())
PROFILE = "llama-70b-a800"
SETTLE_S = 2.0
"""From the start of the last service until requests come."""

Serve = Callable[[ProcessContext, Any], Awaitable[None]]
KINDS: dict[str, tuple[Serve, Any]] = {
    "conductor": (conductor.serve, ConductorConfig),
    "kvstore": (kvstore.serve, KVStoreConfig),
    "prefill": (prefill.serve, PrefillConfig),
    "decode": (decode.serve, DecodeConfig),
}


class Simulation:
    """Time, the network, and the worlds of its nodes, all of them from one seed."""

    def __init__(self, seed: int = 1, log: str | None = None) -> None:
        self.seed = seed
        self.time = VirtualTime()
        self.log = MessageLog(log)
        self.network = Network(self.time, seed, self.log)
        self.loop = VirtualLoop(self.time)

    def enter(self, node: Node) -> None:
        """From here on the running context is a node's."""
        numbers = draws(f"{self.seed} {node}")
        clock = world.Clock(self.time.monotonic, self.time.monotonic_ns, lambda: EPOCH_S + self.time.now + node.skew_s)
        NODE.set(node)
        world.CURRENT.set(
            world.World(clock, world.Draws(numbers.getrandbits, numbers.randbytes), self.network, InlineExecutor)
        )

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
        self.ready.set_result(address)


class Service:
    """One service, which may have several lives."""

    def __init__(self, simulation: Simulation, name: str, flags: Sequence[str], skew_s: float = 0.0) -> None:
        self.name = name
        self._simulation = simulation
        self._flags = [*flags, "--id", name]
        self.skew_s = skew_s
        self._life = 0
        self.node: Node
        self.task: asyncio.Task[None]
        self._process: _Process

    async def start(self) -> str:
        """Begin a life; returns the address when the service is ready."""
        self.begin()
        ready = self._process.ready
        both: list[asyncio.Future[Any]] = [self.task, ready]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        return ready.result()

    def begin(self) -> None:
        """Begin a life, without waiting for it."""
        self._life += 1
        self.node = Node(self.name, self._life, self.skew_s)
        copy_context().run(self._begin)

    def _begin(self) -> None:
        self._simulation.enter(self.node)
        serve, config = KINDS[self.name.partition("-")[0]]
        self._process = _Process(self.name)
        self.task = self._simulation.loop.create_task(
            _awaited(serve(self._process, config.load(self._flags))), name=str(self.node)
        )

    def kill(self) -> None:
        """As `kill -9`: no code of the node runs any more."""
        GRAVEYARD.append((self.task, self._process))
        self.node.dead = True
        self._simulation.network.kill(self.node)

    def stop(self) -> None:
        """As SIGSTOP."""
        self.node.held = []

    def resume(self) -> None:
        """As SIGCONT."""
        self._simulation.loop.resume(self.node)

    async def drain(self) -> None:
        """As SIGTERM; returns when the service has ended."""
        self._process.stopping.set()
        await self.task


GRAVEYARD: list[Any] = []
"""What the dead had, so that nothing of it is destroyed: that would run code of theirs."""


async def _awaited(service: Awaitable[None]) -> None:
    await service


class Cluster:
    """Services by name: "conductor-0", "kvstore-0", "prefill-0", "decode-0", ..."""

    def __init__(self, simulation: Simulation, counts: Mapping[str, int], flags: Mapping[str, Sequence[str]]) -> None:
        """Take how many of each kind, and a kind's flags beside the usual ones."""
        self.addresses = [f"127.0.0.1:{10_001 + number}" for number in range(counts["conductor"])]
        engine = ["--model", MODEL, "--engine", f"emulated:{PROFILE}", "--kv-lanes", "grpc"]
        usual = {
            "conductor": ["--model", MODEL],
            "kvstore": ["--kv-lanes", "grpc"],
            "prefill": engine,
            "decode": engine,
        }
        self.services: dict[str, Service] = {}
        for kind in KINDS:
            for number in range(counts[kind]):
                place = self.addresses[number] if kind == "conductor" else ",".join(self.addresses)
                own = ["--listen" if kind == "conductor" else "--conductor", place]
                name = f"{kind}-{number}"
                self.services[name] = Service(simulation, name, [*usual[kind], *own, *flags.get(kind, ())])

    async def start(self) -> None:
        """Start all services, conductors first, and let them join."""
        for service in self.services.values():
            await service.start()
        await asyncio.sleep(SETTLE_S)

    async def drain(self) -> None:
        """End all services in order, conductors last; raises what one of them raises."""
        services = list(self.services.values())[::-1]
        workers = [service for service in services if not service.name.startswith("conductor")]
        await asyncio.gather(*(service.drain() for service in workers))
        await asyncio.gather(*(service.drain() for service in services if service not in workers))


def leave(code: int) -> NoReturn:
    """End the process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
