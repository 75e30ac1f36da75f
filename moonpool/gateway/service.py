"""Builds a gateway from settings, runs the gateway, and finally drains the gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

from starlette.applications import Starlette

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer, architecture_of, model_name, resolve
from moonpool.base.config import parse_address
from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.memory import available_bytes
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.tls import Security
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet
from moonpool.base.telemetry.prometheus import SCRAPE_TIMEOUT_S, PrometheusMetrics
from moonpool.base.version import commit, installed_version
from moonpool.client import AsyncClient, ClusterState
from moonpool.gateway.batches.in_process import InProcessClient
from moonpool.gateway.batches.runner import BatchRunner
from moonpool.gateway.batches.store import BatchStore
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.http_server import HttpServer, http_serving
from moonpool.gateway.responses.background import BackgroundResponses
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.pins import ResponsePins
from moonpool.gateway.responses.store import ResponseStore, StoreLimits
from moonpool.gateway.routes import make_app
from moonpool.gateway.serving.auth import Authenticator
from moonpool.gateway.serving.body_limits import BodyMemory, BodyPace
from moonpool.gateway.serving.body_reader import BodyReader
from moonpool.gateway.serving.cluster_state import ClusterStateCache
from moonpool.gateway.serving.embedding_sizes import EmbeddingSizes
from moonpool.gateway.serving.envelope import AllowedHosts
from moonpool.gateway.serving.generation_response import AnswerTurns
from moonpool.gateway.serving.label_scores import pooling_of
from moonpool.gateway.serving.metrics import EngineCollector, GatewayMetrics
from moonpool.gateway.serving.next_turn import NextTurns
from moonpool.gateway.serving.picture_fetch import PictureFetcher
from moonpool.gateway.serving.pictures import PictureReader, picture_rule
from moonpool.gateway.serving.request_builder import RequestBuilder, ServedNames
from moonpool.gateway.serving.request_log import RequestLog
from moonpool.gateway.serving.scrapes import Scrapes
from moonpool.gateway.serving.tokenizer import GatewayTokenizer, ParserNames

CONNECT_TIMEOUT_S = 2.0
"""Seconds for which the gateway retries a conductor that cannot be reached, before the request fails."""

SERVER_METRICS: tuple[Metric[HttpServer], ...] = (
    Metric("connections", "Open connections of HTTP clients.", lambda server: server.open_connections),
)
BODY_METRICS: tuple[Metric[BodyMemory], ...] = (
    Metric("body_bytes", "Memory held for the bodies of requests in progress.", lambda memory: memory.held_bytes),
)
RESPONSE_METRICS: tuple[Metric[ResponseStore], ...] = (
    Metric("stored_bytes", "Size of the stored responses and conversations.", lambda store: store.num_bytes),
)

log = get_logger(__name__)


@asynccontextmanager
async def application(
    config: GatewayConfig, checkpoint_tokenizer: Tokenizer, metrics: PrometheusMetrics, architecture: str = ""
) -> AsyncIterator[tuple[Starlette, MetricSet]]:
    """Run a gateway without an HTTP server while the body of the `async with` runs.

    `architecture` is the model's class, if it is known.

    Yields the ASGI application, and the metrics for the stored responses and the process.

    Raises:
        ConfigError: a setting is wrong.
    """
    async with AsyncExitStack() as stack:
        threads = TenantTurns(stack.enter_context(world.thread_pool(1, "tokenize")))
        parsing = TenantTurns(stack.enter_context(world.thread_pool(1, "bodies")))
        rendering = TenantTurns(stack.enter_context(world.thread_pool(1, "texts")))
        looking = TenantTurns(stack.enter_context(world.thread_pool(1, "pictures")))
        fetching = TenantTurns(stack.enter_context(world.thread_pool(1, "fetch")))
        pictures = PictureReader(looking, fetching, PictureFetcher(config.picture_hosts))
        stack.callback(pictures.close)
        client = await stack.enter_async_context(
            AsyncClient(
                config.conductor,
                timeout_s=config.request_timeout_s,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                tls=Security.tls_of(Security.of(config)),
            )
        )
        parsers = ParserNames(config.tool_call_parser, config.reasoning_parser)
        rule = picture_rule(config.model, checkpoint_tokenizer)
        name = model_name(config.model)
        tokenizer = GatewayTokenizer(name, checkpoint_tokenizer, threads, parsers, architecture, rule)
        tell_formats(tokenizer)
        responses = stack.enter_context(response_store(config))
        bodies = body_reader(config, parsing)
        handlers = gateway_context(config, client, tokenizer, metrics, responses, bodies, rendering)
        handlers = replace(handlers, pictures=pictures)
        stack.push_async_callback(handlers.pins.close)
        stack.push_async_callback(handlers.background.close)
        stack.push_async_callback(handlers.next_turns.close)
        handlers = replace(handlers, batches=await stack.enter_async_context(running_batches(config, handlers)))
        app = make_app(handlers, allowed_hosts(config), config.allowed_origins)
        watched = MetricSet().add(RESPONSE_METRICS, responses).add(BODY_METRICS, bodies.memory)
        yield app, watched.add(PROCESS_METRICS, None)


@asynccontextmanager
async def gateway(config: GatewayConfig, checkpoint_tokenizer: Tokenizer, architecture: str = "") -> AsyncIterator[str]:
    """Run a gateway while the body of the `async with` runs. Yields the address that the gateway advertises.

    `architecture` is the model's class, if it is known.

    Raises:
        ConfigError: a setting is wrong.
    """
    metrics = PrometheusMetrics.of(config, ssl_certfile=config.ssl_certfile)
    async with (
        application(config, checkpoint_tokenizer, metrics, architecture) as (app, watched),
        http_serving(app, config) as (server, port),
    ):
        metrics.watch(watched.add(SERVER_METRICS, server))
        metrics.ready = lambda: ""
        async with metrics.served(config.metrics_listen):
            yield config.advertised(port)


@asynccontextmanager
async def running_batches(config: GatewayConfig, handlers: ResponsesContext) -> AsyncIterator[BatchRunner | None]:
    """Run the batches of `config.batch_dir` while the body of the `async with` runs; None without such a folder.

    Raises:
        ConfigError: the folder cannot be used.
    """
    if config.batch_dir is None:
        yield None
        return

    async def waiting() -> int:
        queue = (await handlers.cluster.state_now()).queue
        return queue.for_limits + queue.for_room

    with world.thread_pool(1, "batches") as threads, world.thread_pool(1, "lines") as lines:
        store = BatchStore(config.batch_dir, config.batch_bytes, threads, world.unix_time)
        app = make_app(handlers, AllowedHosts(["*"]))  # the runner's own: any host is the gateway itself
        client, reading = InProcessClient(app), TenantTurns(lines)
        runner = BatchRunner(store, client, reading, waiting, config.batch_concurrency, config.max_body_bytes)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            running.cancel()
            await runner.close()
            threads.submit(store.close).result()  # behind what the database still does


def tell_formats(tokenizer: GatewayTokenizer) -> None:
    """Write to the log how answers are read."""
    row, reasoning = tokenizer.found.row, tokenizer.found.reasoning
    calls, thinking = (
        row.name if row is not None else "unknown",
        reasoning.names[0] if reasoning is not None else "none",
    )
    log.info("answers are read", tool_call_parser=calls, reasoning_parser=thinking)
    if tokenizer.found.note:
        log.warning(tokenizer.found.note)


@contextmanager
def response_store(config: GatewayConfig) -> Iterator[ResponseStore]:
    """The response store for a gateway with these settings, open while the body of the `with` runs.

    Raises:
        ConfigError: the file of the store is wrong.
    """
    limits = StoreLimits(config.response_store_bytes, config.response_ttl_s, config.max_body_bytes)
    with world.thread_pool(1, "responses") as threads:
        store = ResponseStore(limits, config.response_store_file, threads, world.unix_time)
        try:
            yield store
        finally:
            threads.submit(store.close).result()


def state_reader(cluster: ClusterStateCache) -> Callable[[], ClusterState | None]:
    """The cluster now, or None if the cluster cannot be asked; for other threads than that of the running loop."""
    loop = asyncio.get_running_loop()

    def read() -> ClusterState | None:
        try:
            return asyncio.run_coroutine_threadsafe(cluster.state_now(), loop).result(SCRAPE_TIMEOUT_S)
        except (MoonpoolError, TimeoutError):
            return None

    return read


def allowed_hosts(config: GatewayConfig) -> AllowedHosts:
    """The hosts under which a gateway with these settings answers."""
    if config.allowed_hosts or config.api_keys is not None:
        return AllowedHosts(config.allowed_hosts or ("*",))
    own = {parse_address(config.listen)[0], parse_address(config.advertised(1))[0], socket.gethostname()}
    return AllowedHosts([*own, "localhost"], config.allowed_origins, addresses=True)


def body_memory(wanted: int, free: int | None) -> int:
    """Bytes that bodies may take: as set, and half of what the machine or container has left at most."""
    if free is None or wanted <= free // 2:
        return wanted
    most = max(1 << 20, free // 2)
    log.warning("bodies may take less than body_memory_bytes: half of the free memory", wanted=wanted, most=most)
    return most


def body_reader(config: GatewayConfig, threads: TenantTurns) -> BodyReader:
    """What reads the bodies of a gateway with these settings; `threads` parse large ones."""
    memory = BodyMemory(body_memory(config.body_memory_bytes, available_bytes()))
    return BodyReader(config.max_body_bytes, config.read_timeout_s, memory, threads, BodyPace())


def gateway_context(
    config: GatewayConfig,
    client: AsyncClient,
    tokenizer: GatewayTokenizer,
    metrics: PrometheusMetrics,
    responses: ResponseStore,
    bodies: BodyReader,
    rendering: TenantTurns,
    keys: ApiKeys | None = None,
) -> ResponsesContext:
    """What the handlers of a gateway work with. `keys` are those of `config.api_keys` unless given.

    Raises:
        ConfigError: the file of API keys is wrong.
    """
    if keys is None and config.api_keys is not None:
        keys = ApiKeys(config.api_keys)
    request_metrics = GatewayMetrics(metrics, world.monotonic)
    cluster = ClusterStateCache(client, request_metrics.clock)
    names = ServedNames(config.served_model_name, any_name=config.any_model_name)
    builder = RequestBuilder(config.request_timeout_s, tokenizer, names)
    context = ResponsesContext(
        client=client,
        auth=Authenticator(
            keys,
            request_metrics.clock,
            operator_tenants=config.operator_tenants,
            bodies=bodies,
        ),
        cluster=cluster,
        tokenizer=tokenizer,
        builder=builder,
        next_turns=NextTurns(client, builder, cluster, config.speculative_prefill),
        responses=responses,
        pins=ResponsePins(client, config.response_pin_s),
        background=BackgroundResponses(config.max_background_responses, config.request_timeout_s),
        metrics=request_metrics,
        log=RequestLog(every=config.log_requests),
        scrapes=Scrapes(metrics.registry),
        wall_clock=world.unix_time,
        rendering=rendering,
        pictures=PictureReader(rendering, rendering, PictureFetcher(config.picture_hosts)),
        turns=AnswerTurns(rendering, bodies.memory),
        started_at=int(world.unix_time()),
        served_names=config.served_model_name,
        embedding_sizes=EmbeddingSizes.of(config.model, config.embedding_dimensions),
        pooling=pooling_of(config.model),
    )
    metrics.registry.register(EngineCollector(state_reader(context.cluster), context.shown_name))
    return context


async def serve(context: ProcessContext, config: GatewayConfig) -> None:
    """Run the gateway of this process until the process is asked to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be read.
    """
    path = await asyncio.to_thread(resolve, config.model)
    tokenizer = await asyncio.to_thread(lambda: Tokenizer.load(path, config.chat_template))
    async with gateway(config, tokenizer, await asyncio.to_thread(architecture_of, path)) as address:
        told = {"version": installed_version(), "commit": commit()}
        log.info("serving", address=address, conductor=config.conductor, **told)
        context.announce(address)
        await context.stopping.wait()
