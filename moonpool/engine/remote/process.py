"""The program of a stage on another host: joins the leader, serves, and joins again, until stopped."""

import asyncio
from contextlib import AsyncExitStack

from moonpool.base.checkpoint import resolve, weights_fingerprint
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import serving
from moonpool.base.rpc.tls import Security
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.engine.platforms.registry import engine_platform
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.remote.stage_host import PROCESSES, StagePlace, StageProcesses, keep_serving
from moonpool.engine.setup import check_engine_installed


async def serve(context: ProcessContext, config: StageConfig, processes: StageProcesses = PROCESSES) -> None:
    """Run a stage until told to stop. The process is ready, for probes too, while the stage has joined.

    `processes` starts the stage's own processes.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint is missing or broken.
    """
    leader, node_rank = config.place()
    check_engine_installed()
    engine_platform(config.device)
    context.starting("reading the checkpoint")
    folder = resolve(config.model)
    weights = await asyncio.to_thread(weights_fingerprint, folder)
    async with AsyncExitStack() as stack:
        security = Security.of(config)
        metrics = PrometheusMetrics.of(config)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        server = await stack.enter_async_context(serving(config.listen, [], security=security))
        server.set_serving(False)
        metrics.ready = server.lacking

        def changed(joined: bool) -> None:
            server.set_serving(joined)
            if joined and not context.announced:
                context.announce(server.address)

        context.starting(f"waiting for the leader at {leader}")
        place = StagePlace(leader, node_rank, folder, weights, config.device, config.threads)
        work = asyncio.create_task(keep_serving(place, security, changed, processes=processes), name="stage")
        stopping = asyncio.create_task(context.stopping.wait())
        try:
            await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, stopping):
                task.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)
