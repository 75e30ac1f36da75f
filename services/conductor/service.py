"""Builds a conductor from its settings, runs it, and drains it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import serving
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.checkpoint import Checkpoint
from services.conductor.cluster import BackgroundTasks, Cluster
from services.conductor.config import ConductorConfig
from services.conductor.servicer import ConductorServicer

log = get_logger(__name__)

DESCRIPTOR = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
DRAIN_MARGIN = 0.8
"""Share of `drain_s` that requests get to end by themselves; then they are ended as cancelled."""
GRACE_S = 2.0


@asynccontextmanager
async def conductor(
    config: ConductorConfig, checkpoint: Checkpoint, incarnation: int, spans: Recorder
) -> AsyncIterator[tuple[ConductorServicer, str]]:
    """Run a conductor while the body runs; yields its servicer and the address it advertises."""
    async with AsyncExitStack() as stack:
        tokenizing = stack.enter_context(ThreadPoolExecutor(config.tokenizer_threads, "tokenize"))
        channels = await stack.enter_async_context(Channels())
        cluster = Cluster(config, checkpoint.served(), channels)
        background = BackgroundTasks()
        stack.push_async_callback(cluster.steps.aclose)
        stack.push_async_callback(background.aclose)
        servicer = ConductorServicer(config, checkpoint, cluster, background, tokenizing, spans)
        metrics = Metrics(config.service())
        metrics.watch(servicer.gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        server = await stack.enter_async_context(serving(config.listen, [(DESCRIPTOR, servicer)], grace_s=GRACE_S))
        address = config.advertised(server.port)
        servicer.set_instance(
            kv_pb2.Instance(id=config.id, incarnation=incarnation, kind=kv_pb2.INSTANCE_KIND_CONDUCTOR, address=address)
        )
        yield servicer, address


async def serve(context: ProcessContext, config: ConductorConfig) -> None:
    """Run the conductor of this process until it is told to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be used.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.load, config.model)
    async with conductor(config, checkpoint, context.incarnation, context.spans) as (servicer, address):
        log.info("serving", address=address, model=checkpoint.name)
        context.announce(address)
        await context.stopping.wait()
        await servicer.drain(config.drain_s * DRAIN_MARGIN)
