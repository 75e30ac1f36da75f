"""An adapter's process, which joins the cluster whenever the engine is there."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.base import world
from moonpool.base.cluster import ChangeBell, ClusterMembership, HeldKeys, InstanceReport
from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import serving
from moonpool.base.rpc.tls import Security
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.interop.adapter.adapter import Adapter
from moonpool.interop.adapter.base import EngineClient, EngineFacts
from moonpool.interop.adapter.calibration import keeps_kv, measured_speeds
from moonpool.interop.adapter.checked_client import CheckedClient
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.adapter.engine_http import EngineHttp
from moonpool.interop.adapter.engine_life import EngineLife, ServedCheckpoint, identify_loras
from moonpool.interop.adapter.servicers import AdapterDecodeServicer, AdapterPrefillServicer, AdapterServicer
from moonpool.interop.adapter.sglang import SglangClient
from moonpool.interop.adapter.vllm import VllmClient
from moonpool.v1 import adapter_pb2, decode_pb2, kv_pb2, prefill_pb2

POLL_S = 0.25
"""Seconds between two looks at the engine's load."""
MAX_FAILED_POLLS = 3
RETRY_S = 0.5
SETTLE_S = 3.0
"""Seconds within which the engine's past events are to come, before it joins."""
BESIDE_THREADS = 2
KINDS = {"prefill": kv_pb2.INSTANCE_KIND_PREFILL, "decode": kv_pb2.INSTANCE_KIND_DECODE}
ENGINE_CLIENTS: dict[str, tuple[str, Callable[[EngineHttp], EngineClient]]] = {
    "vllm": ("vLLM", VllmClient),
    "sglang": ("SGLang", SglangClient),
}
"""By `AdapterConfig.kind`: the make's name, and what makes a client."""
log = get_logger(__name__)


async def serve(context: ProcessContext, config: AdapterConfig) -> None:
    """Run an adapter until told to stop; the adapter joins whenever the engine is there.

    Raises:
        ConfigError: a setting is refused, or the engine was started without something that is needed.
        CheckpointError: the checkpoint cannot be read.
        Mismatch: the conductor serves something else.
    """
    context.starting("reading the checkpoint")
    checkpoint = await asyncio.to_thread(ServedCheckpoint.load, config)
    async with contextlib.AsyncExitStack() as stack:
        security = Security.of(config)
        channels = await stack.enter_async_context(Channels(Security.tls_of(security)))
        name, made = ENGINE_CLIENTS[config.kind]
        http = EngineHttp(name, config.engine, config.engine_api_key, config.engine_ca)
        client = CheckedClient(made(http), checkpoint.config.vocab_size)
        stack.push_async_callback(client.aclose)
        beside = ThreadOffload(stack.enter_context(world.thread_pool(BESIDE_THREADS, "beside")))
        adapter = Adapter(config, beside)
        gauges, metrics = adapter.gauges(), PrometheusMetrics.of(config)
        metrics.watch(gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        contracts = [
            (
                prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
                AdapterPrefillServicer(adapter, gauges, channels),
            ),
            (decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], AdapterDecodeServicer(adapter, gauges)),
            (adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"], AdapterServicer(adapter)),
        ]
        server = await stack.enter_async_context(serving(config.listen, contracts, security=security))
        metrics.ready = server.lacking
        address = config.advertised(server.port)
        context.starting("waiting for the engine")
        while not context.stopping.is_set():
            facts = await _wait_for_engine(client, context)
            if facts is not None:
                await _live(adapter, client, facts, checkpoint, channels, address, context)
        adapter.closing.set()


async def _wait_for_engine(client: EngineClient, context: ProcessContext) -> EngineFacts | None:
    """The engine, once answering; None if the adapter stops before."""
    told = ""
    while not context.stopping.is_set():
        try:
            return await client.describe()
        except Unavailable as error:
            if str(error) != told:
                told = str(error)
                log.warning("the engine is not there (yet)", error=told)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.stopping.wait(), RETRY_S)
    return None


async def _live(
    adapter: Adapter,
    client: EngineClient,
    facts: EngineFacts,
    checkpoint: ServedCheckpoint,
    channels: Channels,
    address: str,
    context: ProcessContext,
) -> None:
    """The engine from the first answer to the last, or to the adapter's end."""
    bell, config = ChangeBell(), adapter.config
    log.info("found the engine", version=facts.version, blocks=facts.blocks, block_size=facts.block_size)
    try:
        speeds = await measured_speeds(client, facts, checkpoint.config.vocab_size)
        if config.role == "prefill" and not await keeps_kv(client):
            raise ConfigError("role", f"{facts.version} runs without a connector that moves KV (docs/engines.md)")
        if config.kvstores:
            facts = await client.describe()  # the namespace is told with the first answer
        _, load = await client.load()
    except (Unavailable, InvalidRequest) as error:
        log.warning("the engine answers no prompt (yet)", error=str(error))
        await asyncio.sleep(RETRY_S)
        return
    if config.kvstores and not facts.page_namespace:
        raise ConfigError("kvstores", f"{facts.version} runs without the connector of moonpool-kv (docs/engines.md)")
    loras = await asyncio.to_thread(identify_loras, facts.loras)
    life = EngineLife(client, facts, checkpoint, config, bell.ring, loras)
    life.speeds = SpeedTracker(speeds)
    life.observe(load)
    adapter.lives += 1
    ended = asyncio.Event()
    epoch = world.random_bits(63) or 1
    kinds = {name: kind for name, kind in KINDS.items() if config.role in ("both", name)}
    memberships = []
    adapter.identities = {}
    for number, (name, kind) in enumerate(kinds.items()):
        instance = kv_pb2.Instance(id=f"{config.id}-{name}", epoch=epoch + number, kind=kind, address=address)
        adapter.identities[instance.epoch] = instance
        report = InstanceReport(
            life.hello(instance, config.kv_domain or config.id, life.model_info()),
            lambda kind=kind: life.load_report(kind),  # type: ignore[misc]
            HeldKeys(1, lambda _: list(life.cache.held)),
            on_drain=lambda: _drain(life, bell),
        )
        memberships.append(ClusterMembership(channels, config.conductor, report, bell=bell))
    try:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(stream.run()) for stream in life.streams]
            work.append(group.create_task(_tell_changes(life, memberships)))
            work.append(group.create_task(_watch(life, client, ended)))
            await _settle(life)
            adapter.life = life
            joined = [group.create_task(membership.run(ended)) for membership in memberships]
            if not context.announced:
                context.announce(address)
            await _first(ended.wait(), context.stopping.wait())
            if not ended.is_set():
                _drain(life, bell)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(life.empty.wait(), config.drain_s / 2)
                ended.set()
            await asyncio.wait(joined)
            for task in work:
                task.cancel()
    finally:
        life.lose(life.lost or "the adapter stops")
        adapter.life = None


def _drain(life: EngineLife, bell: ChangeBell) -> None:
    life.draining = True
    bell.ring()


async def _settle(life: EngineLife) -> None:
    """Wait for the engine's past events, for a limited time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            for stream in life.streams:
                await stream.settled.wait()


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _tell_changes(life: EngineLife, memberships: Sequence[ClusterMembership]) -> None:
    while True:
        await life.cache_changed.wait()
        life.cache_changed.clear()
        stored, removed, _ = life.cache.take_changes()
        news = list(stored), list(removed)
        for membership in memberships:
            membership.changed(KeyChanges(*news))


async def _watch(life: EngineLife, client: EngineClient, ended: asyncio.Event) -> None:
    """Follow the engine's load, until the engine is lost or is another one."""
    failed = 0
    while not ended.is_set():
        try:
            started, load = await client.load()
            life.observe(load)
            failed = 0
        except Unavailable as error:
            failed += 1
            if failed >= MAX_FAILED_POLLS:
                life.lose(f"the engine is lost: {error}")
        else:
            if started != life.facts.life:
                life.lose("the engine was restarted")
        if life.lost:
            log.warning("the engine is lost", reason=life.lost)
            ended.set()
            return
        await asyncio.sleep(POLL_S)
