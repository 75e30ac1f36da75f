"""Builds a conductor from settings, runs the conductor, and drains the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc

from moonpool.base import world
from moonpool.base.config import assignments
from moonpool.base.errors import ConfigError
from moonpool.base.grammar import prepare_checks
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import RunningServer, serving
from moonpool.base.rpc.tls import Security, Tls
from moonpool.base.runtime.driver import Driver
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.base.settings import stated_values
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.version import commit, installed_version
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.conductor.cluster_members import ClusterMembers
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.contexts import ContextServices, NamedContextManager
from moonpool.conductor.core.actions import Action
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.events import Event
from moonpool.conductor.core.roles import RoleLimits
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.core.scheduler import SchedulerLimits
from moonpool.conductor.decision_log import DecisionLog
from moonpool.conductor.deletion import DELETION_WAIT_S, KVDeletions
from moonpool.conductor.dispatcher import Dispatcher
from moonpool.conductor.endpoint_picker import EndpointPicker
from moonpool.conductor.instance_calls import InstanceCalls
from moonpool.conductor.loras import LoraAdapters, read_settings_loras
from moonpool.conductor.placement.policies.registry import load_decode_policy, load_policy, seed_of
from moonpool.conductor.recent_requests import RecentRequests
from moonpool.conductor.records import RecordSync
from moonpool.conductor.registry import Registry
from moonpool.conductor.request_metrics import EndedRequests
from moonpool.conductor.request_reports import RequestReports
from moonpool.conductor.request_validator import RequestValidator
from moonpool.conductor.servicer import ConductorParts, ConductorServicer
from moonpool.conductor.trace_recording import TraceRecording
from moonpool.v1 import conductor_pb2, ext_proc_pb2, kv_pb2

log = get_logger(__name__)

PICKER = ext_proc_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"]
DESCRIPTOR = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
DRAIN_MARGIN = 0.8
"""Share of `drain_s` for which open requests may go on; then they end as cancelled."""
GRACE_S = 2.0
TOKENIZER_THREADS = 2
"""Threads that tokenise prompts."""
EXPLAINED_REQUESTS = 4096
"""Requests with placements that `Explain` remembers."""
READINESS_S = 0.1
"""Seconds between two looks at whether there are engines to pick."""
RESERVE_LIMIT = 2.0
"""Timeout for a `Reserve` call, as a multiple of the core's: a late reservation can still be cancelled."""


@asynccontextmanager
async def conductor(
    config: ConductorConfig,
    checkpoint: Checkpoint,
    epoch: int,
    spans: Recorder,
    metrics: PrometheusMetrics,
    deletion_wait_s: float = DELETION_WAIT_S,
) -> AsyncIterator[tuple[ConductorServicer, str]]:
    """Run a conductor while the body runs; yields the servicer and the advertised address."""
    async with AsyncExitStack() as stack:
        security = Security.of(config, config.client_listen, config.api_keys)
        credentials = _picker_credentials(config, Security.tls_of(security))
        channels = await stack.enter_async_context(Channels(Security.tls_of(security), carries=True))
        servicer = await stack.enter_async_context(
            assembled(config, checkpoint, channels, spans, metrics, deletion_wait_s)
        )
        metrics.watch(servicer.gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        if config.picker_listen:
            picker = EndpointPicker(servicer.cluster.registry, servicer.dispatcher, servicer.endpoint_served)
            asked = await stack.enter_async_context(
                serving(config.picker_listen, [(PICKER, picker)], grace_s=GRACE_S, credentials=credentials)
            )
            servicer.picker_address = asked.address
            following = asyncio.create_task(_follow_readiness(asked, servicer.cluster.registry))
            stack.callback(following.cancel)
            log.info("proxies ask for engines here", address=asked.address)
        rpcs = [(DESCRIPTOR, servicer)]
        server = await stack.enter_async_context(serving(config.listen, rpcs, grace_s=GRACE_S, security=security))
        metrics.ready = server.lacking
        address = config.advertised(server.port)
        servicer.set_instance(
            kv_pb2.Instance(id=config.id, epoch=epoch, kind=kv_pb2.INSTANCE_KIND_CONDUCTOR, address=address)
        )
        yield servicer, address


async def _follow_readiness(picker: RunningServer, registry: Registry) -> None:
    """Proxies turn to another conductor while this one has no engine: a picker without engines says NOT_SERVING."""
    told = True
    while True:
        if registry.ready != told:
            told = registry.ready
            picker.set_serving(told)
        await asyncio.sleep(READINESS_S)


def _picker_credentials(config: ConductorConfig, tls: Tls | None) -> grpc.ServerCredentials | None:
    """Return how proxies connect; None = in plaintext.

    Raises:
        ConfigError: there is no certificate.
    """
    if config.picker_tls == "none" or (tls is None and config.picker_tls == "auto"):
        return None
    if tls is None or not tls.has_certificate:
        raise ConfigError("picker_tls", f"{config.picker_tls} needs tls_cert, tls_key and tls_ca")
    return tls.server_credentials(client_certificates=config.picker_tls == "mutual")


@asynccontextmanager
async def assembled(
    config: ConductorConfig,
    checkpoint: Checkpoint,
    channels: Channels,
    spans: Recorder,
    metrics: PrometheusMetrics,
    deletion_wait_s: float = DELETION_WAIT_S,
    clock: Callable[[], float] = world.monotonic,
) -> AsyncIterator[ConductorServicer]:
    """Return all parts of a conductor except the ports, while the body runs; yield the servicer. `clock` gives seconds.

    Raises:
        ConfigError: a LoRA adapter of the settings cannot be used.
        ExceptionGroup: with an Internal; the core has failed outside any request, and the body was cancelled.
    """
    own_loras, modules = list[kv_pb2.LoraAdapter](), assignments(config.lora_modules)
    if modules:
        own_loras = await asyncio.to_thread(read_settings_loras, modules, checkpoint.name)
    async with AsyncExitStack() as stack:
        tokenizing = stack.enter_context(world.thread_pool(TOKENIZER_THREADS, "tokenize"))
        checking = stack.enter_context(world.thread_pool(1, "grammars"))
        checking.submit(prepare_checks)
        recording = await _recording(config, stack)
        core = _core(config)
        driver: Driver[Event, Action] = Driver(
            core, lambda action: dispatcher.perform(action), clock=clock, journal=config.journal()
        )
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(group.create_task(driver.failure()).cancel)
        cluster = ClusterMembers(checkpoint.served(), channels, driver.post, driver.tell)
        stack.callback(driver.close)
        stack.push_async_callback(cluster.steps.aclose)
        reserve_limit_s = RESERVE_LIMIT * config.reserve_timeout_s
        calls = InstanceCalls(channels, cluster.steps, cluster.find, driver.post, driver.tell, reserve_limit_s, clock)
        stack.push_async_callback(calls.aclose)
        decisions, recent = DecisionLog(EXPLAINED_REQUESTS, config.policy), RecentRequests(clock)
        reports = RequestReports(decisions, EndedRequests(metrics), recent, recording, core.cluster.hindsight)
        stores = partial(cluster.instances, kv_pb2.INSTANCE_KIND_KVSTORE)
        sync = RecordSync(channels, stores)
        stack.push_async_callback(sync.aclose)
        loras = LoraAdapters(sync, channels, cluster.lora_engines, checkpoint.name, config.lora_folder, own_loras)
        stack.push_async_callback(loras.aclose)
        turns = TenantTurns(tokenizing, TOKENIZER_THREADS), TenantTurns(checking)
        reader = RequestValidator(checkpoint, cluster.registry, loras, *turns, config)
        dispatcher = Dispatcher(reader, calls, reports, cluster.order, driver.post, clock)
        deletions = KVDeletions(
            sync, channels, cluster.instances, dispatcher.kv_deleted, config.tenant_ttl_s, deletion_wait_s
        )
        _run_until_exit(deletions.run(), stack)
        contexts = NamedContextManager(
            ContextServices(
                sync=sync,
                deletions=deletions,
                channels=channels,
                stores=stores,
                conductor=config.id,
                model=reader.model_name,
                read=reader.read,
                compute=lambda message: dispatcher.compute(message, config.request_timeout_s),
                held=core.cluster.index.lengths,
            )
        )
        stack.push_async_callback(contexts.aclose)
        yield ConductorServicer(
            ConductorParts(
                config=config,
                cluster=cluster,
                core=core,
                dispatcher=dispatcher,
                reports=reports,
                contexts=contexts,
                deletions=deletions,
                loras=loras,
                spans=spans,
                clock=clock,
            )
        )


def _run_until_exit(work: Coroutine[Any, Any, None], stack: AsyncExitStack) -> None:
    """Run work in the background, and cancel the work when the stack ends."""
    task = asyncio.create_task(work)
    stack.push_async_callback(asyncio.wait, [task])
    stack.callback(task.cancel)


def _core(config: ConductorConfig) -> ConductorCore:
    limits = SchedulerLimits(
        budgets=config.budgets,
        **stated_values(SchedulerLimits, config),
    )
    routing = RoutingConfig(
        policy=load_policy(config.policy),
        decode_policy=load_decode_policy(config.decode_policy),
        shadow_policy=load_policy(config.shadow_policy) if config.shadow_policy else None,
        seed=seed_of(config.id) if config.policy_seed is None else config.policy_seed,
        **stated_values(RoutingConfig, config),
    )
    return ConductorCore(limits, ClusterView(routing), RoleLimits(swap=config.swap_roles))


async def _recording(config: ConductorConfig, stack: AsyncExitStack) -> TraceRecording | None:
    if config.record_trace is None:
        return None
    recording = await asyncio.to_thread(TraceRecording, config.record_trace)
    stack.push_async_callback(asyncio.to_thread, recording.close)
    return recording


async def serve(context: ProcessContext, config: ConductorConfig) -> None:
    """Run this process's conductor until the process stops.

    Raises:
        ConfigError: a setting is wrong.
        CheckpointError: the checkpoint cannot be used.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.load, config.model, config.chat_template)
    if config.generation_config == "auto" and (unread := checkpoint.config.answer_rules.unread):
        log.warning("generation_config.json has settings that are not honoured", settings=", ".join(unread))
    metrics = PrometheusMetrics.of(config)
    async with conductor(config, checkpoint, context.epoch, context.spans, metrics) as (servicer, address):
        log.info("serving", address=address, model=checkpoint.name, version=installed_version(), commit=commit())
        context.announce(address)
        await context.stopping.wait()
        await servicer.drain(config.drain_s * DRAIN_MARGIN)
