"""A gateway in front of a conductor in memory."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.applications import Starlette

from moonpool.base import world
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.responses.store import ResponseStore, StoreLimits
from moonpool.gateway.routes import make_app
from moonpool.gateway.service import allowed_hosts, body_reader, gateway_context
from moonpool.gateway.serving.next_turn import NextTurns
from moonpool.gateway.serving.pictures import picture_rule
from moonpool.gateway.serving.tokenizer import GatewayTokenizer, ParserNames
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.clocks import hurried

MODEL = "tiny"
MODEL_TOKENS = 100
TURNS = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def settings(**changes: Any) -> GatewayConfig:
    """A gateway's settings."""
    return GatewayConfig(
        **{"conductor": "conductor:1", "model": MODEL, "listen": "127.0.0.1:0", "allowed_hosts": "*", **changes}
    )


def ready(fake: FakeConductor) -> FakeConductor:
    """The conductor with a model that is served."""
    fake.state.model.name = MODEL
    fake.state.model.max_tokens = MODEL_TOKENS
    return fake


def make_gateway(client: AsyncClient, config: GatewayConfig, threads: Executor, tokenizer: Tokenizer) -> Starlette:
    """The application as the service builds it."""
    keys = ApiKeys(config.api_keys, hurried()) if config.api_keys else None
    turns = TenantTurns(threads)
    parsers, rule = ParserNames(config.tool_call_parser, config.reasoning_parser), picture_rule(config.model, tokenizer)
    texts = GatewayTokenizer(MODEL, tokenizer, turns, parsers, pictures=rule)
    limits = StoreLimits(config.response_store_bytes, config.response_ttl_s, config.max_body_bytes)
    responses = ResponseStore(limits, config.response_store_file, threads, world.unix_time)
    bodies = body_reader(config, turns)
    context = gateway_context(config, client, texts, PrometheusMetrics("gateway"), responses, bodies, turns, keys)
    app = make_app(dataclasses.replace(context, started_at=7), allowed_hosts(config), config.allowed_origins)
    app.state.next_turns, app.state.pictures = context.next_turns, context.pictures
    return app


@functools.cache
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.load(model_dir())


@dataclass
class Answers:
    """A client of a gateway, without a network."""

    fake: FakeConductor
    app: Starlette
    http: httpx2.AsyncClient

    async def chat(self, **body: Any) -> httpx2.Response:
        """A chat with one turn, unless `messages` says otherwise."""
        return await self.http.post(CHAT, json={"messages": TURNS, **body})

    async def plain(self, **body: Any) -> httpx2.Response:
        """A plain completion."""
        return await self.http.post(PLAIN, json=body)

    async def metric(self, line: str) -> str:
        """The value of a metric, "" when it is not there."""
        text = (await self.http.get("/metrics")).text
        return next((found.rpartition(" ")[2] for found in text.splitlines() if found.startswith(f"{line} ")), "")

    @property
    def next_turns(self) -> NextTurns:
        """What the gateway computes ahead."""
        found: NextTurns = self.app.state.next_turns
        return found

    @property
    def asked(self) -> pb.GenerateRequest:
        """The one request that has come to the conductor."""
        (request,) = self.fake.requests
        return request


@asynccontextmanager
async def answering(fake: FakeConductor, texts: Tokenizer | None = None, **changes: Any) -> AsyncIterator[Answers]:
    """A client of a gateway in front of `fake`, with the bundled model's tokenizer unless another one is given."""
    with ThreadPoolExecutor(1) as threads:
        app = make_gateway(ready(fake).async_client(), settings(**changes), threads, texts or tokenizer())
        transport = httpx2.ASGITransport(app)
        with contextlib.closing(app.state.pictures):
            async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
                yield Answers(fake, app, http)


def scope(path: str, **headers: str) -> dict[str, Any]:
    """A POST of JSON, as a server tells the application of it."""
    given = {"content-type": "application/json", **headers}
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("gateway", 80), "client": ("client", 1),
    }  # fmt: skip
