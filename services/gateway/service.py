"""Builds a gateway from its settings, runs it, and drains it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from moonpool.checkpoint import Tokenizer, model_name, resolve
from moonpool.client import AsyncClient
from moonpool.rpc.auth import ApiKeys
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.tls import Security
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from services.gateway.config import GatewayConfig
from services.gateway.http_server import HttpServer, http_serving
from services.gateway.metrics import GatewayMetrics
from services.gateway.routes import Endpoints, make_app
from services.gateway.tokenization import GatewayTokenizer

CONNECT_TIMEOUT_S = 2.0
"""Seconds for which a conductor that cannot be reached is tried again, before the client is told."""

log = get_logger(__name__)


@asynccontextmanager
async def gateway(config: GatewayConfig, tokenizer: Tokenizer) -> AsyncIterator[str]:
    """Run a gateway while the body runs; yields the address it advertises.

    Raises:
        ConfigError: a setting is refused.
    """
    keys = ApiKeys(config.api_keys) if config.api_keys is not None else None
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(config.tokenizer_threads, "tokenize"))
        client = await stack.enter_async_context(
            AsyncClient(
                config.conductor,
                timeout_s=config.request_timeout_s,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                tls=Security.tls_of(Security.of(config)),
            )
        )
        metrics = Metrics(config.service())
        meter = GatewayMetrics(metrics, time.monotonic)
        texts = GatewayTokenizer(model_name(config.model), tokenizer, threads, config.tool_parser)
        endpoints = Endpoints(config, client, texts, keys, meter, metrics.registry, int(time.time()))
        server, port = await stack.enter_async_context(http_serving(make_app(endpoints), config))
        metrics.watch(_gauges(server))
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        yield config.advertised(port)


async def serve(context: ProcessContext, config: GatewayConfig) -> None:
    """Run the gateway of this process until it is told to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be used.
    """
    tokenizer = await asyncio.to_thread(lambda: Tokenizer.load(resolve(config.model)))
    async with gateway(config, tokenizer) as address:
        log.info("serving", address=address, conductor=config.conductor)
        context.announce(address)
        await context.stopping.wait()


def _gauges(server: HttpServer) -> Gauges:
    return Gauges([("connections", lambda: server.open_connections, None), *process_entries()])
