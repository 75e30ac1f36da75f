"""Faults of a storm on virtual time: of processes, engines, links, disks, clocks and memory, drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moonpool.base.errors import MoonpoolError
from tests.faults.disturbances import Disturbances
from tests.world.asks import FLOODS, Flood
from tests.world.cluster import Cluster, Service, Simulation
from tests.world.disk import DiskFault
from tests.world.gateway import Gateway

FaultKind = Literal[
    "kill", "lose power", "stop", "starve", "drain", "engine", "gateway", "reset", "partition", "one way", "slow",
    "lossy", "clock", "full disk", "broken disk", "no memory", "damaged disk", "stage stop", "slow stage",
    "gateway stop", "flood of answers", "flood of prompts", "flood of bodies",
]  # fmt: skip
WEIGHTS: Mapping[FaultKind, int] = {
    "kill": 5, "lose power": 2, "stop": 4, "starve": 1, "drain": 2, "engine": 1, "gateway": 1, "reset": 4,
    "partition": 3, "one way": 2, "slow": 2, "lossy": 2, "clock": 2, "full disk": 1, "broken disk": 1,
    "no memory": 1, "damaged disk": 2, "stage stop": 1, "slow stage": 1, "gateway stop": 1, "flood of answers": 1,
    "flood of prompts": 1, "flood of bodies": 1,
}  # fmt: skip
HARMLESS: tuple[FaultKind, ...] = (
    "starve", "clock", "full disk", "broken disk", "no memory", "damaged disk", "stage stop", "slow stage",
    "gateway stop", "flood of answers", "flood of prompts", "flood of bodies",
)  # fmt: skip
"""Faults for which no request may fail."""
OF_STAGES: tuple[FaultKind, ...] = ("engine", "stage stop", "slow stage")
SLOWER = 4.0, 20.0
"""So many times as long a step of a slow stage takes."""
OF_STORES: tuple[FaultKind, ...] = ("lose power", "full disk", "broken disk", "no memory", "damaged disk")
DISK_FAULTS: Mapping[FaultKind, DiskFault] = {"full disk": "full", "broken disk": "broken", "no memory": "no memory"}
OF_LINKS: tuple[FaultKind, ...] = ("reset", "partition", "one way", "slow", "lossy")
OF_HOSTS: tuple[FaultKind, ...] = ("starve", "stage stop")
"""Faults for which an instance is lost if a stage is on a host of its own."""
FORMING_S = 5.0
"""A group that has lost a stage has formed again so long after the fault: the loss is noticed, and the leader begun."""
LOOK_S = 0.25
RECOVERY_S = 6.0
"""After a fault's end a service is as before within so long: it has joined all conductors, and is known to be well."""
LONGEST_S, SKEW_S, JUMP_S = 4.0, 5.0, 600.0
"""Of a fault; of wall clocks that are apart; of a clock that is set anew, as after a while without its time server."""
START_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How a storm's faults are drawn.

    Attributes:
        gap_s: mean seconds between two faults.
        kinds: faults that may happen, of `WEIGHTS`.
    """

    gap_s: float = 2.5
    kinds: Sequence[FaultKind] = tuple(WEIGHTS)


class Faults:
    """Injects faults until a time, and brings back what it has hurt.

    Attributes:
        told: a line for each fault.
        counts: how often each kind was injected.
        disturbances: who was disturbed when.
    """

    def __init__(
        self,
        simulation: Simulation,
        cluster: Cluster,
        gateway: Gateway,
        plan: FaultPlan,
        flood: Callable[[Flood], Awaitable[None]],
    ) -> None:
        """`flood` sends requests that want more memory than there is."""
        self._simulation, self._cluster, self._gateway, self._plan = simulation, cluster, gateway, plan
        self._flood = flood
        self._drawn = random.Random(f"faults {simulation.seed}")
        self._side: list[asyncio.Task[None]] = []
        self._leaders = sorted({service.leader for service in cluster.services.values()} - {""})
        self._busy: set[str] = set()
        """Services that have not been brought back."""
        self.told: list[str] = []
        self.counts: dict[str, int] = {}
        self.disturbances = Disturbances([*cluster.services, gateway.name])

    async def run(self, now: Callable[[], float], until: float) -> None:
        """Inject faults until a time; returns when all services run again."""
        drawn = self._drawn
        supervising = self._simulation.loop.create_task(self._supervise())
        while True:
            await asyncio.sleep(min(drawn.expovariate(1 / self._plan.gap_s), max(0.0, until - now())))
            if now() >= until:
                break
            [kind] = drawn.choices(self._plan.kinds, [WEIGHTS[each] for each in self._plan.kinds])
            seconds = drawn.uniform(0.3, LONGEST_S)
            names = self._hit(kind, seconds)
            if not names:
                continue
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.told.append(f"{now():.6f} {kind} {' '.join(names)} for {seconds:.2f} s")
            if kind not in HARMLESS or self._sends_clients_away(kind, names) or self._loses_a_stage(kind, names):
                hurt = self._hurt_by_link(*names) if kind in OF_LINKS else list(map(self._leader_of, names))
                forming_s = FORMING_S if self._leads(hurt) else 0.0
                self.disturbances.add(hurt, now(), now() + seconds + RECOVERY_S + forming_s)
        while self._side:
            await asyncio.gather(*self._side)
            self._side = [task for task in self._side if not task.done()]
        self._simulation.network.heal()
        if self._leaders:
            await asyncio.sleep(FORMING_S)
            for leader in self._leaders:
                await self._cluster.services[leader].is_ready()
            supervising.cancel()

    async def _supervise(self) -> None:
        """Begin anew each instance that has lost a stage of another host, as a supervisor does."""
        while self._leaders:
            await asyncio.sleep(LOOK_S)
            for name in self._leaders:
                service = self._cluster.services[name]
                if service.task.done() and name not in self._busy:
                    self._back(service, START_AGAIN_S, service.begin)

    def _leader_of(self, name: str) -> str:
        """The instance that a stage is of; others are their own."""
        found = self._cluster.services.get(name)
        return name if found is None or not found.leader else found.leader

    def _leads(self, names: Sequence[str]) -> bool:
        return any(name in self._leaders for name in names)

    def _loses_a_stage(self, kind: FaultKind, names: Sequence[str]) -> bool:
        """Whether a fault that is harmless elsewhere ends an instance with stages of other hosts."""
        if kind == "stage stop":  # on the leader's host nobody looks
            return self._leader_of(names[0]) != names[0]
        return kind in OF_HOSTS and self._leads([self._leader_of(names[0])])

    def _hurt_by_link(self, text: str, other: str) -> list[str]:
        """Of two services that do not reach each other those without which requests that need both must do."""
        if "stage" in (text.partition("-")[0], other.partition("-")[0]):
            leaders = {self._leader_of(text), self._leader_of(other)}
            return list(leaders) if len(leaders) == 1 else []
        return _hurt_by_link(text, other)

    def _sends_clients_away(self, kind: FaultKind, names: Sequence[str]) -> bool:
        """Whether clients leave a starving conductor for another conductor, which may be disturbed itself."""
        conductors = [name for name in self._cluster.services if name.startswith("conductor-")]
        return kind == "starve" and names[0] in conductors and len(conductors) > 1

    def _hit(self, kind: FaultKind, seconds: float) -> list[str]:
        """Inject a fault; returns whom it hits, or nobody if it finds none."""
        drawn = self._drawn
        if kind in OF_LINKS:
            return self._hit_link(kind, seconds)
        if kind.startswith("flood of "):
            flood = next(each for each in FLOODS if each == kind.removeprefix("flood of "))
            self._beside(self._flooded(flood))
            return [flood]
        if kind in ("gateway", "gateway stop"):
            if self._gateway.name in self._busy:
                return []
            self._gateway.kill() if kind == "gateway" else self._gateway.stop()
            self._back(self._gateway, seconds, self._gateway.begin if kind == "gateway" else self._gateway.resume)
            return [self._gateway.name]
        services = [each for each in self._cluster.services.values() if each.name not in self._busy]
        if kind in OF_STORES:
            services = [each for each in services if each.disk is not None]
        if kind in OF_STAGES:
            services = [each for each in services if each.stages]
        if not services:
            return []
        service = drawn.choice(services)
        return [service.name] if self._hit_service(kind, service, seconds) else []

    def _hit_link(self, kind: FaultKind, seconds: float) -> list[str]:
        drawn, network = self._drawn, self._simulation.network
        names = [*self._cluster.services, self._gateway.name, "client"]
        value, other = drawn.sample(names, 2)
        match kind:
            case "reset":
                network.reset(value, other)
            case "partition":
                network.partition(value, other, seconds)
            case "one way":
                network.disturb(value, other, seconds)
            case "slow":
                for link in ((value, other), (other, value)):
                    network.disturb(*link, seconds, drawn.uniform(0.02, 0.3))
            case "lossy":
                for link in ((value, other), (other, value)):
                    network.disturb(*link, seconds, 0.0, drawn.uniform(0.05, 0.4))
        return [value, other]

    def _hit_service(self, kind: FaultKind, service: Service, seconds: float) -> bool:
        drawn, disk = self._drawn, service.disk
        match kind:
            case "kill" | "lose power":
                service.kill(power=kind == "lose power")
                self._back(service, seconds, service.begin)
            case "stop" | "starve":
                service.stop() if kind == "stop" else service.starve()
                self._back(service, seconds, service.resume)
            case "drain":
                self._back(service, 0.0, lambda: None, self._drained(service))
            case "engine":
                drawn.choice(service.stages).kill()
                if not service.leader:  # a host of a stage stays
                    self._back(service, 0.0, lambda: None, self._restarted(service))
            case "stage stop":
                stage = drawn.choice(service.stages)
                stage.stop()
                self._back(service, seconds, stage.resume)
            case "slow stage":
                stage = drawn.choice(service.stages)
                stage.slowdown = drawn.uniform(*SLOWER)
                self._back(service, seconds, stage.quicken)
            case "clock":
                jump = drawn.uniform(-1.0, 1.0)
                service.node.skew_s += jump * (JUMP_S if abs(jump) > 0.5 else SKEW_S)
            case "full disk" | "broken disk" | "no memory":
                assert disk is not None
                disk.files.fault = DISK_FAULTS[kind]
                self._beside(self._later(seconds, lambda: setattr(disk.files, "fault", None)))
            case "damaged disk":
                assert disk is not None
                return disk.damage()
        return True

    def _back(
        self, service: Service | Gateway, seconds: float, back: Callable[[], None], first: Awaitable[None] | None = None
    ) -> None:
        """Bring a service back; nothing else happens to it meanwhile."""
        self._busy.add(service.name)

        async def work() -> None:
            if first is not None:
                await first
            await asyncio.sleep(seconds)
            back()
            if isinstance(service, Service) and service.disk is not None:
                await self._started(service)
            self._busy.discard(service.name)

        self._beside(work())

    async def _started(self, service: Service) -> None:
        """A store ends with the reason if its disk fails as it starts; it is started again until the disk is well."""
        while not await service.is_ready():
            await asyncio.sleep(START_AGAIN_S)
            service.begin()

    async def _drained(self, service: Service) -> None:
        try:
            await service.drain()
        except MoonpoolError:
            if service.name not in self._leaders:
                raise
        service.begin()

    async def _restarted(self, service: Service) -> None:
        """A process whose engine has died ends with the reason, and is started again."""
        await asyncio.wait([service.task])
        service.begin()

    async def _flooded(self, kind: Flood) -> None:
        await self._flood(kind)

    async def _later(self, seconds: float, work: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        work()

    def _beside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._side.append(self._simulation.loop.create_task(coroutine))


def _hurt_by_link(text: str, other: str) -> list[str]:
    """Of two services that do not reach each other those without which requests that need both must do."""
    kinds = {name.partition("-")[0]: name for name in (text, other)}
    if len(kinds) == 1 or "kvstore" in kinds:
        return []
    if "conductor" in kinds and not kinds.keys() & {"client", "gateway"}:
        del kinds["conductor"]
    elif "conductor" in kinds:
        return [kinds["conductor"]]
    return [name for kind, name in kinds.items() if kind in ("prefill", "decode")]
