"""An indexer's process."""

import asyncio
import contextlib

from aiohttp import web

from moonpool.base.config import format_address, parse_address
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.tls import Security
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.interop.indexer.http_api import application
from moonpool.interop.indexer.indexer import Indexer
from moonpool.interop.indexer.slow_clients import SlowClients

log = get_logger(__name__)

INDEXER_METRICS: tuple[Metric[Indexer], ...] = (
    Metric("publishers", "Registered publishers of KV events.", lambda indexer: len(indexer.publishers)),
    Metric("instances", "Instances of the cluster that are followed.", lambda indexer: len(indexer.cluster)),
    Metric("blocks", "KV blocks in the index.", lambda indexer: len(indexer.index)),
    counter("queries_total", "Answered queries.", lambda indexer: indexer.queries),
    counter("event_gaps_total", "Times that registered publishers' events were missing.", lambda indexer: indexer.gaps),
)


async def serve(context: ProcessContext, config: IndexerConfig) -> None:
    """Run an indexer until told to stop.

    Raises:
        ConfigError: a setting is refused.
    """
    async with contextlib.AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels(Security.tls_of(Security.of(config))))
        indexer = Indexer(config, stack)
        stack.push_async_callback(indexer.aclose)
        metrics = PrometheusMetrics.of(config)
        metrics.watch(MetricSet().add(INDEXER_METRICS, indexer).add(PROCESS_METRICS, None))
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        app, slow = application(indexer, config.api_key), SlowClients()
        app.middlewares.insert(0, slow.middleware())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        host, port = parse_address(config.listen)
        site = web.TCPSite(runner, host, port)
        await site.start()
        metrics.ready = lambda: ""
        address = config.advertised(runner.addresses[0][1])
        log.info("serving", address=format_address(*parse_address(address)))
        context.announce(address)
        works = (indexer.follow(channels), indexer.publish()) if config.conductor else ()
        following = [asyncio.create_task(work) for work in (slow.watch(runner.server), *works)]
        try:
            stopping = asyncio.create_task(context.stopping.wait())
            await asyncio.wait([stopping, *following], return_when=asyncio.FIRST_COMPLETED)
            for task in following:
                if task.done():
                    task.result()
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
