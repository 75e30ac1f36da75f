"""Runs a prefill or decode instance: starts engine and server, joins the conductors, serves, drains. Torch-free."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from moonpool.base import world
from moonpool.base.cluster import ChangeBell, ClusterMembership, HeldKeys, InstanceReport, Notify
from moonpool.base.cluster.join import keep_role
from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.errors import Unavailable
from moonpool.base.kv import native_library
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.write_back import WriteBack
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import EXIT_ROLE, ProcessContext
from moonpool.base.rpc.server import RunningServer, Service, serving
from moonpool.base.rpc.tls import Security
from moonpool.base.runtime.journal import JournalWriter
from moonpool.base.sampling_params import LORA
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.client_stream import CONNECT_TIMEOUT_S
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import DIALER_METRICS, TransportDialer
from moonpool.base.transport.flow_control import EgressLink
from moonpool.base.transport.listener import LISTENER_METRICS, TransportListener
from moonpool.base.transport.regions import SharedRegion
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.engine.config import EngineConfig
from moonpool.engine.emulated.engine import EMULATED_METRICS, EmulatedEngine
from moonpool.engine.interface import Engine
from moonpool.engine.setup import EngineSetup, engine_setup
from moonpool.engine.start_engine import start_engine
from moonpool.v1 import conductor_pb2, kv_pb2

WRITE_BACK_GRACE_S = 3.0
"""Seconds that a draining instance waits for what is being written back."""
BESIDE_THREADS = 2
"""So that a long prompt that is read does not keep KV from landing."""
DRAIN_SHARE = 0.8
"""Share of `drain_s` in which running requests may finish."""
StartEngine = Callable[..., AbstractAsyncContextManager[Engine]]
"""Starts an engine, as `start_engine` does."""
log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceContext:
    """What a service is built from.

    Attributes:
        setup: what is served.
        engine: runs the steps.
        channels: to other instances.
        link: limits the rate of KV that leaves this process.
        instance: this instance; the address is filled in once the server listens.
        spans: where spans are recorded.
        notify: call after keys or load have changed, to report to the conductor soon.
        dialer: opens transports to other instances.
        listener: offers transports to them.
        beside: threads for what would keep the event loop from dispatching steps.
    """

    setup: EngineSetup
    engine: Engine
    channels: Channels
    link: EgressLink
    instance: kv_pb2.Instance
    spans: Recorder
    notify: Notify
    dialer: TransportDialer
    listener: TransportListener
    beside: ThreadOffload

    def hello(self) -> kv_pb2.StreamHello:
        """First message of the KV streams that this instance opens."""
        return kv_pb2.StreamHello(
            sender=self.instance, namespace=self.setup.namespace, layout=self.setup.layout.to_proto()
        )

    def endpoint(self, address: str, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> KVEndpoint:
        """Return the instance at an address, for KV streams that connect within `connect_timeout_s` seconds."""
        settings = StreamSettings(self.dialer, self.link, connect_timeout_s)
        return KVEndpoint(self.channels, address, self.hello(), self.setup.layout, settings)

    def metrics(self) -> MetricSet:
        """Return what prefill and decode instances both report."""
        metrics = MetricSet().add(PROCESS_METRICS, None).add(INSTANCE_METRICS, self)
        metrics.add(DIALER_METRICS, self.dialer).add(LISTENER_METRICS, self.listener)
        return metrics.add(EMULATED_METRICS, self.engine) if isinstance(self.engine, EmulatedEngine) else metrics


INSTANCE_METRICS: tuple[Metric[InstanceContext], ...] = (
    Metric("emulated", "1 if compute is emulated, else 0.", lambda instance: bool(instance.setup.model.emulated)),
    Metric(
        "link_waiting", "Sends that wait for their turn on the network link.", lambda instance: instance.link.waiting, 0
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorParts:
    """Parts that a prefill or decode executor works with, besides the scheduler.

    Attributes:
        engine: runs the steps.
        write_back: writes full blocks to kvstores.
        spans: where spans are recorded.
        notify: called when load or keys have changed.
        journal: records the scheduler's events; None = no journal.
        clock: seconds; never goes back.
    """

    engine: Engine
    write_back: WriteBack
    spans: Recorder
    notify: Notify
    journal: JournalWriter | None = None
    clock: Callable[[], float] = world.monotonic


class EngineService(Protocol):
    """A prefill or decode service's interface for the process that runs the service."""

    @property
    def manager(self) -> BlockManager:
        """The pool's blocks; keys and events are reported to the conductor."""
        ...

    async def run(self) -> None:
        """Run until cancelled, or raise if the service cannot continue."""
        ...

    def load(self) -> conductor_pb2.LoadReport:
        """Return the load now."""
        ...

    def gauges(self) -> MetricSet:
        """Everything the instance reports."""
        ...

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """The conductor wants blocks to be copied into the pool."""
        ...

    def drain(self) -> None:
        """Refuse new requests from now on, and notify; may be called again."""
        ...

    async def drained(self) -> None:
        """Wait until no request is left. The caller bounds the wait."""
        ...


async def run_instance(
    context: ProcessContext,
    config: EngineConfig,
    kind: kv_pb2.InstanceKind.ValueType,
    build: Callable[[InstanceContext], tuple[EngineService, Service]],
    *,
    stages: int = 1,
    max_num_batched_tokens: Callable[[Engine], int] = lambda engine: 0,
    start: StartEngine = start_engine,
) -> None:
    """Run one engine instance until stopped; `start` starts the engine.

    The conductor gets `stages`, and the engine's `max_num_batched_tokens`: most tokens in one prefill step (0 = no
    limit).

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be served.
        Mismatch: the conductor serves something else.
        Unavailable: the engine died.
    """
    decode = kind == kv_pb2.INSTANCE_KIND_DECODE
    context.starting("reading the checkpoint")
    setup = await asyncio.to_thread(engine_setup, config, stages=stages, decode=decode)
    await asyncio.to_thread(native_library.build_ahead, context.starting)
    await asyncio.to_thread(copy_verified.prepare)
    await asyncio.to_thread(native_library.prepare)
    log.info(
        "starting engine",
        model=setup.model.name,
        dtype=setup.spec.dtype,
        blocks=setup.spec.blocks or "auto",
        stages=stages,
    )
    if setup.spec.emulated is not None:
        context.spans.instant("engine.emulated", **setup.spec.emulated.describe())
    async with contextlib.AsyncExitStack() as stack:
        security = Security.of(config)
        channels = await stack.enter_async_context(Channels(Security.tls_of(security)))
        started = start(setup.spec, start_timeout_s=config.start_timeout_s, listener=context)
        engine = await stack.enter_async_context(started)
        bell = ChangeBell()
        instance = context.instance(kind, config.id, "")
        link = EgressLink(setup.link_rate)
        dialer, listener = open_dialer_and_listener(config, engine, instance)
        beside = ThreadOffload(stack.enter_context(world.thread_pool(BESIDE_THREADS, "beside")))
        kv = link, instance, context.spans, bell.ring, dialer, listener
        shared = InstanceContext(setup, engine, channels, *kv, beside)
        service, contract = build(shared)
        metrics = PrometheusMetrics(config.service())
        metrics.watch(service.gauges())
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        await stack.enter_async_context(listener.running(config))
        server = await stack.enter_async_context(serving(config.listen, [contract], security=security))
        metrics.ready = server.lacking
        instance.address = config.advertised(server.port)
        report = InstanceReport(
            conductor_pb2.JoinHello(
                instance=instance,
                model=setup.model,
                total_blocks=engine.blocks,
                speed=speeds_to_proto(engine.speeds),
                stages=stages,
                max_num_batched_tokens=max_num_batched_tokens(engine),
                either_role=config.either_role,
                process=world.this_process(),
                unsupported=[] if setup.spec.max_loras else [LORA],
            ),
            service.load,
            HeldKeys(1, lambda _: service.manager.keys()),
            service.manager.take_events,
            service.drain,
            service.replicate,
            (lambda wanted: _change_role(context, kind, wanted)) if config.either_role else keep_role,
        )
        agent = ClusterMembership(channels, config.conductor, report, bell=bell)
        lifecycle = _Lifecycle(service, agent, engine, server, config.drain_s)
        await lifecycle.run(context.stopping, lambda: context.announce(instance.address))


def _change_role(
    context: ProcessContext, kind: kv_pb2.InstanceKind.ValueType, wanted: kv_pb2.InstanceKind.ValueType
) -> None:
    """Drain, and end so that whoever has started this process starts the other one."""
    if wanted != kind and not context.stopping.is_set():
        log.info("changing its role", to=kv_pb2.InstanceKind.Name(wanted))
        context.exit_code = EXIT_ROLE
        context.stopping.set()


def open_dialer_and_listener(
    config: TransportConfig, engine: Engine, instance: kv_pb2.Instance
) -> tuple[TransportDialer, TransportListener]:
    """Both ends of an instance's transports; peers may read the instance's pool.

    Raises:
        ConfigError: a setting cannot be used.
    """
    transports = open_transports(config)

    def shared() -> list[SharedRegion]:
        return [SharedRegion(fd, data) for fd, data in engine.pool.shared()]

    return TransportDialer(transports, shared), TransportListener(transports, instance.epoch)


@dataclasses.dataclass(frozen=True, slots=True)
class _Lifecycle:
    """Serves, then drains; ends at once when the engine dies."""

    service: EngineService
    agent: ClusterMembership
    engine: Engine
    server: RunningServer
    drain_s: float

    async def run(self, stopping: asyncio.Event, announce: Callable[[], None]) -> None:
        """Return after a drain; raise what made the instance unable to go on."""
        left = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(self.service.run())
                watcher = group.create_task(self._watch_engine())
                # While draining, the instance stays joined: that is how the conductor hears about the drain.
                joined = group.create_task(self.agent.run(left))
                announce()
                await stopping.wait()
                await self._drain()
                left.set()
                await joined
                worker.cancel()
                watcher.cancel()
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from errors

    async def _watch_engine(self) -> None:
        # The future belongs to the engine: a cancelled watcher must not cancel the future.
        reason = await asyncio.shield(self.engine.failed)
        self.server.set_serving(False)
        raise Unavailable(f"the engine died: {reason}")

    async def _drain(self) -> None:
        # The process cancels this after `drain_s`; the rest of that time is for an orderly end.
        grace_s = self.drain_s * DRAIN_SHARE
        log.info("draining", grace_s=grace_s)
        self.server.set_serving(False)
        self.service.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self.service.drained()
        except TimeoutError:
            log.warning("grace period ended with requests still running")


async def run_together(*work: Coroutine[Any, Any, object]) -> None:
    """Run all until the first one fails, and cancel the others then. Raise the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from errors


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return a group's first error, reported as the reason of an end."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
