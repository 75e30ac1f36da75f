"""What prefill and decode instances have in common: from flags to a running, joined, drained service.

Owns the life of the process: engine up, server up, joined to the conductor, drained. What is served follows from the
flags in `moonpool.engine.plan`. Must not know what the service does with its engine, and must not import torch.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

from moonpool.cluster import HeldKeys, JoinAgent
from moonpool.engine.emulated.engine import EmulatedEngine
from moonpool.engine.handle import Engine
from moonpool.engine.plan import EngineConfig, EnginePlan, plan_engine
from moonpool.engine.start import start_engine
from moonpool.errors import Unavailable
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import RunningServer, Service, serving
from moonpool.sched.block_manager import BlockManager
from moonpool.streams.link import Link
from moonpool.telemetry.gauges import Entry, Gauges
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2

WRITE_BACK_GRACE_S = 3.0
"""Seconds that a draining instance waits for what is being written back."""
DRAIN_SHARE = 0.8
"""Share of `drain_s` in which running requests may finish."""

__all__ = ["EngineConfig", "EnginePlan", "EngineService", "Parts", "plan_engine", "run_instance"]
log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a service is built from.

    Attributes:
        plan: what is served.
        engine: runs the steps.
        channels: to other instances.
        link: paces what leaves this process.
        instance: who we are; its address is filled in once the server listens.
        spans: where spans are recorded.
        poke: says that keys or load have changed, so that the conductor hears of it soon.
    """

    plan: EnginePlan
    engine: Engine
    channels: Channels
    link: Link
    instance: kv_pb2.Instance
    spans: Recorder
    poke: Callable[[], None]

    def hello(self) -> kv_pb2.StreamHello:
        """First message of the KV streams we open."""
        return kv_pb2.StreamHello(
            sender=self.instance, namespace=self.plan.namespace, layout=self.plan.layout.to_proto()
        )

    def engine_gauges(self) -> list[Entry]:
        """Whether compute is emulated, and if so, how late its steps are."""
        own = self.engine.gauges() if isinstance(self.engine, EmulatedEngine) else []
        return [("emulated", lambda: float(bool(self.plan.model.emulated)), None), *own]


class EngineService(Protocol):
    """What a prefill or decode service offers to the process that runs it."""

    @property
    def manager(self) -> BlockManager:
        """The pool's blocks; its keys and events are reported to the conductor."""
        ...

    async def run(self) -> None:
        """Works until cancelled, or raises when it cannot go on."""
        ...

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        ...

    def gauges(self) -> Gauges:
        """Everything the instance holds."""
        ...

    def drain(self) -> None:
        """Take no new requests; may be called again."""
        ...

    async def drained(self) -> None:
        """Waits until no request is left. The caller bounds the wait."""
        ...


async def run_instance(
    context: ProcessContext,
    config: EngineConfig,
    kind: kv_pb2.InstanceKind.ValueType,
    build: Callable[[Parts], tuple[EngineService, Service]],
    *,
    stages: int = 1,
) -> None:
    """Runs one engine instance until it is told to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be served.
        Mismatch: the conductor serves something else.
        Unavailable: the engine died.
    """
    decode = kind == kv_pb2.INSTANCE_KIND_DECODE
    plan = await asyncio.to_thread(plan_engine, config, stages=stages, decode=decode)
    log.info("engine starts", model=plan.model.name, dtype=plan.spec.dtype, blocks=plan.spec.blocks, stages=stages)
    if plan.spec.emulated is not None:
        context.spans.instant("engine.emulated", **plan.spec.emulated.describe())
    async with contextlib.AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        engine = await stack.enter_async_context(start_engine(plan.spec, start_timeout_s=config.start_timeout_s))
        poke = _Poke()
        instance = context.instance(kind, config.id, "")
        parts = Parts(plan, engine, channels, Link(plan.link_rate), instance, context.spans, poke)
        service, contract = build(parts)
        metrics = Metrics(config.service())
        metrics.watch(service.gauges())
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        server = await stack.enter_async_context(serving(config.listen, [contract]))
        instance.address = config.advertised(server.port)
        agent = JoinAgent(
            channels,
            config.conductor,
            conductor_pb2.JoinHello(
                instance=instance,
                model=plan.model,
                total_blocks=plan.spec.blocks,
                speed=engine.speeds.to_proto(),
            ),
            service.load,
            lambda: _events(service.manager),
            HeldKeys(1, lambda _: service.manager.keys()),
            service.drain,
        )
        poke.target = agent.poke
        life = _Life(service, agent, engine, server, config.drain_s)
        await life.run(context.stopping, lambda: context.announce(instance.address))


class _Poke:
    """The agent's `poke`, before there is an agent."""

    def __init__(self) -> None:
        self.target: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target()


def _events(manager: BlockManager) -> tuple[list[bytes], list[bytes]]:
    events = manager.take_events()
    return list(events.stored), list(events.removed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Life:
    """Serving, then draining; or dying with the engine."""

    service: EngineService
    agent: JoinAgent
    engine: Engine
    server: RunningServer
    drain_s: float

    async def run(self, stopping: asyncio.Event, announce: Callable[[], None]) -> None:
        """Returns after a drain; raises what made the instance unable to go on."""
        left = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(self.service.run())
                watcher = group.create_task(self._watch_engine())
                # While it drains the instance stays joined: that is how the conductor hears of it.
                joined = group.create_task(self.agent.run(left))
                announce()
                await stopping.wait()
                await self._drain()
                left.set()
                await joined
                worker.cancel()
                watcher.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _watch_engine(self) -> None:
        # The future belongs to the engine: a cancelled watcher must not cancel it.
        reason = await asyncio.shield(self.engine.failed)
        self.server.set_serving(False)
        raise Unavailable(f"the engine died: {reason}")

    async def _drain(self) -> None:
        # The process cancels us after `drain_s`; what is left of it is for leaving in order.
        grace_s = self.drain_s * DRAIN_SHARE
        log.info("draining", grace_s=grace_s)
        self.server.set_serving(False)
        self.service.drain()
        self.agent.poke()
        try:
            async with asyncio.timeout(grace_s):
                await self.service.drained()
        except TimeoutError:
            log.warning("requests were still running when the grace period ended")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group: what is reported as the reason of an end."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
