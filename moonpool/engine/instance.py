"""Runs an engine instance in its roles: starts engine and server, joins the conductors, serves, drains. Torch-free.

By a conductor's order an instance that may have either role leaves the conductors when drained, hands pool and engine
to the other role's service, and joins again. Process, engine processes, weights, pool and address stay.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from moonpool.base import world
from moonpool.base.cluster import ChangeBell, ClusterMembership, HeldKeys, InstanceReport, Notify
from moonpool.base.cluster.join import keep_role
from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.kv import native_library
from moonpool.base.kv.delete_kv import DeletionLog
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.write_back import WriteBack
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import RunningServer, serving
from moonpool.base.rpc.tls import Security
from moonpool.base.runtime.journal import JournalWriter
from moonpool.base.sampling_params import LORA
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.latency import Speeds
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
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.interface import Engine
from moonpool.engine.loras import InstanceLoras
from moonpool.engine.role_engine import RoleEngine
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
class Handover:
    """What an instance's former role leaves to the next one.

    Attributes:
        blocks: the pool's keys and cached blocks; no block is referenced.
        deletions: deletions carried out here.
        loras: LoRA adapters in the engine.
        speeds: as measured.
    """

    blocks: BlockManager
    deletions: DeletionLog
    loras: InstanceLoras
    speeds: Speeds


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
        histograms: of steps, loads and sends, under the role's name.
        handover: what the former role has left; None in the first role.
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
    histograms: EngineHistograms
    handover: Handover | None = None

    @property
    def speeds(self) -> Speeds:
        """The engine's speeds, as far as they are known."""
        return self.engine.speeds if self.handover is None else self.handover.speeds

    @property
    def emulated(self) -> EmulatedEngine | None:
        """The engine, if compute is emulated."""
        engine = self.engine.engine if isinstance(self.engine, RoleEngine) else self.engine
        return engine if isinstance(engine, EmulatedEngine) else None

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
        return metrics if self.emulated is None else metrics.add(EMULATED_METRICS, self.emulated)


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
        histograms: of steps, loads and sends.
        notify: called when load or keys have changed.
        journal: records the scheduler's events; None = no journal.
        clock: seconds; never goes back.
    """

    engine: Engine
    write_back: WriteBack
    spans: Recorder
    histograms: EngineHistograms
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
        """Wait until no request is left, and nobody reads or writes blocks. The caller bounds the wait."""
        ...

    def hand_over(self) -> Handover:
        """What the engine's next role goes on with, once `run` has ended and the engine runs no step.

        Raises:
            Internal: blocks are still referenced.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRole:
    """A role that an instance may have.

    Attributes:
        kind: of the instance in this role.
        service: the role's RPC service.
        build: makes the service and the servicer of its RPCs.
        max_num_batched_tokens: most tokens in one prefill step, told to the conductor; 0 = no limit.
        computes_prompts: decode also computes whole prompts.
    """

    kind: kv_pb2.InstanceKind.ValueType
    service: ServiceDescriptor
    build: Callable[[InstanceContext], tuple[EngineService, object]]
    max_num_batched_tokens: Callable[[Engine], int] = lambda engine: 0
    computes_prompts: bool = False

    @property
    def name(self) -> str:
        """The role's name, for example "prefill"."""
        return kv_pb2.InstanceKind.Name(self.kind).removeprefix("INSTANCE_KIND_").lower()


async def run_instance(
    context: ProcessContext,
    config: EngineConfig,
    roles: Sequence[EngineRole],
    *,
    stages: int = 1,
    start: StartEngine = start_engine,
) -> None:
    """Run one engine instance until stopped, in the first of its roles at first; `start` starts the engine.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be served.
        Mismatch: the conductor serves something else.
        Unavailable: the engine died.
        Internal: a role leaves blocks behind that are referenced.
    """
    context.starting("reading the checkpoint")
    decode = roles[0].kind == kv_pb2.INSTANCE_KIND_DECODE
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
        _check_steps(config, engine)
        beside = ThreadOffload(stack.enter_context(world.thread_pool(BESIDE_THREADS, "beside")))
        metrics = PrometheusMetrics.of(config)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        servicers = [_RoleServicer(config.id, role) for role in roles]
        services = [(servicer.role.service, servicer) for servicer in servicers]
        server = await stack.enter_async_context(serving(config.listen, services, security=security))
        metrics.ready = server.lacking
        histograms = {name: EngineHistograms(metrics, name) for name in (servicer.role.name for servicer in servicers)}
        instance = _Instance(context, config, setup, engine, channels, beside, metrics, histograms, servicers, server)
        await instance.run()


def _check_steps(config: EngineConfig, engine: Engine) -> None:
    """Raise ConfigError if the engine's largest step is less than a role's, where the device decides."""
    if config.least_step_tokens > engine.max_num_batched_tokens:
        raise ConfigError(
            "max_num_batched_tokens",
            f"steps of decode have up to {config.least_step_tokens} tokens (max_num_seqs and chunked_prefill_size), "
            f"and this engine takes {engine.max_num_batched_tokens}: say how many",
        )


class _RoleServicer:
    """The RPCs of one role, answered by the role's service while the instance has the role, and refused otherwise."""

    def __init__(self, instance_id: str, role: EngineRole) -> None:
        self.role = role
        self._refusal = f"{instance_id} is no {role.name} instance now"
        self._servicer: object | None = None

    @contextmanager
    def held(self, servicer: object) -> Iterator[None]:
        """Answer calls by `servicer` while the body runs."""
        self._servicer = servicer
        try:
            yield
        finally:
            self._servicer = None

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: Any) -> Any:
            if self._servicer is None:
                raise Unavailable(self._refusal)
            return getattr(self._servicer, method)(request, context)

        return call


@dataclasses.dataclass(frozen=True, slots=True)
class _Instance:
    """What stays through all roles of an instance."""

    context: ProcessContext
    config: EngineConfig
    setup: EngineSetup
    engine: Engine
    channels: Channels
    beside: ThreadOffload
    metrics: PrometheusMetrics
    histograms: Mapping[str, EngineHistograms]
    servicers: Sequence[_RoleServicer]
    server: RunningServer

    async def run(self) -> None:
        """Serve in one role after the other, until stopped."""
        servicer, steps, handover = self.servicers[0], 0, None
        while True:
            engine = RoleEngine(self.engine, steps) if len(self.servicers) > 1 else self.engine
            service, wanted = await self._serve(servicer, engine, handover)
            if wanted is None:
                return
            assert isinstance(engine, RoleEngine), "an instance with one role is never asked for another"
            await engine.end()
            steps, handover = engine.steps, service.hand_over()
            servicer = next(other for other in self.servicers if other.role.kind == wanted)
            self.context.renew_epoch()
            log.info("role changed", to=servicer.role.name, cached_blocks=handover.blocks.num_cached)

    async def _serve(
        self, servicer: _RoleServicer, engine: Engine, handover: Handover | None
    ) -> tuple[EngineService, kv_pb2.InstanceKind.ValueType | None]:
        """Have one role until drained; return the service, and the next role, None for the end."""
        role, config = servicer.role, self.config
        async with contextlib.AsyncExitStack() as stack:
            bell = ChangeBell()
            address = config.advertised(self.server.port)
            instance = self.context.instance(role.kind, config.id, address)
            dialer, listener = open_dialer_and_listener(config, engine, instance)
            kv = EgressLink(self.setup.link_rate), instance, self.context.spans, bell.ring, dialer, listener
            measured = self.beside, self.histograms[role.name]
            shared = InstanceContext(self.setup, engine, self.channels, *kv, *measured, handover)
            service, calls = role.build(shared)
            stack.callback(self.metrics.watch(service.gauges(), role.name))
            await stack.enter_async_context(listener.running(config))
            stack.enter_context(servicer.held(calls))
            leaving = _Leaving(role.kind, [other.role.kind for other in self.servicers])
            report = self._report(role, instance, service, leaving, shared.speeds)
            agent = ClusterMembership(self.channels, config.conductor, report, bell=bell)
            lifecycle = _Lifecycle(service, agent, self.engine, self.server, config.drain_s)
            await lifecycle.run(self.context, leaving, address)
        return service, leaving.wanted

    def _report(
        self,
        role: EngineRole,
        instance: kv_pb2.Instance,
        service: EngineService,
        leaving: "_Leaving",
        speeds: Speeds,
    ) -> InstanceReport:
        either = len(self.servicers) > 1
        return InstanceReport(
            conductor_pb2.JoinHello(
                instance=instance,
                model=self.setup.model,
                total_blocks=self.engine.blocks,
                speed=speeds_to_proto(speeds),
                # Decode has one step under way: the step's stages compute one after the other.
                stages=1 if role.kind == kv_pb2.INSTANCE_KIND_DECODE else self.engine.stages,
                max_num_batched_tokens=role.max_num_batched_tokens(self.engine),
                computes_prompts=role.computes_prompts,
                either_role=either,
                in_place_role=either,
                process=world.this_process(),
                unsupported=[] if self.setup.spec.max_loras else [LORA],
            ),
            service.load,
            HeldKeys(1, lambda _: service.manager.keys()),
            service.manager.take_events,
            service.drain,
            service.replicate,
            leaving.change_role if either else keep_role,
        )


class _Leaving:
    """Says when an instance leaves its role, and for which other one.

    Attributes:
        asked: set when the role is to end.
        wanted: the next role; None = the instance ends.
    """

    def __init__(self, kind: kv_pb2.InstanceKind.ValueType, kinds: Sequence[kv_pb2.InstanceKind.ValueType]) -> None:
        self._others = [other for other in kinds if other != kind]
        self.asked = asyncio.Event()
        self.wanted: kv_pb2.InstanceKind.ValueType | None = None

    def change_role(self, wanted: kv_pb2.InstanceKind.ValueType) -> None:
        """Leave for another role; ignored for the role held now, and if the instance leaves already."""
        if wanted in self._others and not self.asked.is_set():
            log.info("changing its role", to=kv_pb2.InstanceKind.Name(wanted))
            self.wanted = wanted
            self.asked.set()

    async def stop(self, stopping: asyncio.Event) -> None:
        """Leave for good when `stopping` is set, also from a change of roles."""
        await stopping.wait()
        self.wanted = None
        self.asked.set()


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
    """One role from joining to leaving; ends at once when the engine dies."""

    service: EngineService
    agent: ClusterMembership
    engine: Engine
    server: RunningServer
    drain_s: float

    async def run(self, context: ProcessContext, leaving: _Leaving, address: str) -> None:
        """Return after a drain; raise what made the instance unable to go on."""
        left = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(self.service.run())
                watchers = [
                    group.create_task(self._watch_engine()),
                    group.create_task(leaving.stop(context.stopping)),
                ]
                self.server.set_serving(True)
                # While draining, the instance stays joined: that is how the conductor hears about the drain.
                joined = group.create_task(self.agent.run(left))
                if not context.announced:
                    context.announce(address)
                await leaving.asked.wait()
                await self._drain()
                left.set()
                await joined
                for task in (worker, *watchers):
                    task.cancel()
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
