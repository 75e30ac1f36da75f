"""Builds a conductor from its settings, runs it, and drains it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from moonpool.kv.delete_kv import KVSelection
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import serving
from moonpool.rpc.tls import Security
from moonpool.runtime.driver import Driver
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.config import ConductorConfig
from services.conductor.contexts import ContextRecords, NamedContextManager
from services.conductor.core.cluster_state import ClusterView
from services.conductor.core.events import Action, Event
from services.conductor.core.policies import load_policy, seed_of
from services.conductor.core.scheduler import ConductorCore, SchedulerLimits
from services.conductor.deletion import KVDeletions, RecordLedger
from services.conductor.dispatcher import Dispatcher, InstanceCalls, RequestReader
from services.conductor.explain import DecisionLog, PredictionMetrics, RecentRequests, TraceRecording
from services.conductor.registry import Checkpoint, ClusterMembers
from services.conductor.servicer import ConductorServicer

log = get_logger(__name__)

DESCRIPTOR = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
DRAIN_MARGIN = 0.8
"""Share of `drain_s` that requests get to end by themselves; then they are ended as cancelled."""
GRACE_S = 2.0
RESERVE_LIMIT = 2.0
"""A `Reserve` call ends after so many times the seconds that the core waits for it: a late promise can be undone."""


@asynccontextmanager
async def conductor(
    config: ConductorConfig, checkpoint: Checkpoint, incarnation: int, spans: Recorder, metrics: Metrics
) -> AsyncIterator[tuple[ConductorServicer, str]]:
    """Run a conductor while the body runs; yields its servicer and the address it advertises."""
    async with AsyncExitStack() as stack:
        security = Security.of(config, config.client_listen, config.api_keys)
        channels = await stack.enter_async_context(Channels(Security.tls_of(security)))
        servicer = await stack.enter_async_context(assembled(config, checkpoint, channels, spans, metrics))
        metrics.watch(servicer.gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        contract = (DESCRIPTOR, servicer)
        server = await stack.enter_async_context(serving(config.listen, [contract], grace_s=GRACE_S, security=security))
        address = config.advertised(server.port)
        servicer.set_instance(
            kv_pb2.Instance(id=config.id, incarnation=incarnation, kind=kv_pb2.INSTANCE_KIND_CONDUCTOR, address=address)
        )
        yield servicer, address


@asynccontextmanager
async def assembled(
    config: ConductorConfig,
    checkpoint: Checkpoint,
    channels: Channels,
    spans: Recorder,
    metrics: Metrics,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[ConductorServicer]:
    """All parts of a conductor but its ports, while the body runs; yields its servicer. `clock` gives seconds.

    Raises:
        ExceptionGroup: of an Internal; the core has failed where no request is to blame, and the body was cancelled.
    """
    async with AsyncExitStack() as stack:
        tokenizing = stack.enter_context(ThreadPoolExecutor(config.tokenizer_threads, "tokenize"))
        recording = await _recording(config, stack)
        core = _core(config)
        driver: Driver[Event, Action] = Driver(
            core, lambda action: desk.perform(action), clock=clock, journal=config.journal()
        )
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(group.create_task(driver.failure()).cancel)
        cluster = ClusterMembers(checkpoint.served(), channels, driver.post, driver.tell)
        stack.callback(driver.close)
        stack.push_async_callback(cluster.steps.aclose)
        reserve_limit_s = RESERVE_LIMIT * config.reserve_timeout_s
        calls = InstanceCalls(channels, cluster.steps, cluster.find, driver.post, driver.tell, reserve_limit_s, clock)
        stack.push_async_callback(calls.aclose)
        decisions, recent = DecisionLog(config.explain_history, config.policy), RecentRequests(clock)
        desk = Dispatcher(
            calls, decisions, PredictionMetrics(metrics), recent, recording, cluster.order, driver.post, clock
        )
        intake = RequestReader(checkpoint, cluster.registry, desk, tokenizing, config, clock)
        forgetting, keeper = await _records(config, channels, cluster, desk, intake, core, stack)
        yield ConductorServicer(
            config, cluster, core, desk, intake, decisions, recent, keeper, forgetting, tokenizing, spans, clock
        )


async def _records(
    config: ConductorConfig,
    channels: Channels,
    cluster: ClusterMembers,
    desk: Dispatcher,
    intake: RequestReader,
    core: ConductorCore,
    stack: AsyncExitStack,
) -> tuple[KVDeletions, NamedContextManager]:
    """What outlives conductors: deletions and contexts."""
    registry = cluster.registry

    def stores() -> list[kv_pb2.Instance]:
        return [member.instance for member in registry.of_kind(kv_pb2.INSTANCE_KIND_KVSTORE)]

    def on_its_way(selection: KVSelection) -> None:
        desk.forget(selection, registry.model.namespace if registry.model is not None else b"")

    ledger = RecordLedger(channels, stores)
    stack.push_async_callback(ledger.aclose)
    members = lambda: [member.instance for member in registry]  # noqa: E731
    forgetting = KVDeletions(ledger, channels, members, on_its_way, config.tenant_ttl_s)
    sweeping = asyncio.create_task(forgetting.run())
    stack.push_async_callback(asyncio.wait, [sweeping])
    stack.callback(sweeping.cancel)
    held = core.picture.index.lengths
    contexts = ContextRecords(ledger, config.id)
    keeper = NamedContextManager(
        contexts, ledger, forgetting, channels, stores, intake.model, intake.read, intake.compute, held
    )
    stack.push_async_callback(keeper.aclose)
    return forgetting, keeper


def _core(config: ConductorConfig) -> ConductorCore:
    limits = SchedulerLimits(
        retries=config.retries,
        recovery_s=config.recovery_s,
        room_wait_s=config.room_wait_s,
        reserve_timeout_s=config.reserve_timeout_s,
        admission=config.admission,
        adopt_wait_s=config.adopt_wait_s,
        max_queued=config.max_queued,
        max_queued_bytes=config.max_queued_bytes,
    )
    picture = ClusterView(
        config.max_index_keys,
        config.balancing_threshold,
        config.kvstore_replicas,
        load_policy(config.policy),
        seed_of(config.id) if config.policy_seed is None else config.policy_seed,
        config.decode_prompt_tokens,
        config.slow_factor,
        config.peers,
        config.copy_share,
    )
    return ConductorCore(limits, picture, config.role_limits)


async def _recording(config: ConductorConfig, stack: AsyncExitStack) -> TraceRecording | None:
    if config.record_trace is None:
        return None
    recording = await asyncio.to_thread(TraceRecording, config.record_trace)
    stack.push_async_callback(asyncio.to_thread, recording.close)
    return recording


async def serve(context: ProcessContext, config: ConductorConfig) -> None:
    """Run the conductor of this process until it is told to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be used.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.load, config.model)
    metrics = Metrics(config.service())
    async with conductor(config, checkpoint, context.incarnation, context.spans, metrics) as (servicer, address):
        log.info("serving", address=address, model=checkpoint.name)
        context.announce(address)
        await context.stopping.wait()
        await servicer.drain(config.drain_s * DRAIN_MARGIN)
