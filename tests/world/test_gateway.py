"""The gateway on virtual time: requests come to its application as its HTTP server hands them over."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from moonpool.checkpoint import Tokenizer
from moonpool.telemetry.prometheus import PrometheusMetrics
from services.gateway.config import GatewayConfig
from services.gateway.service import application
from tests.world.cluster import MODEL, Cluster, Simulation, answer, prompt, until
from tests.world.loop import Node
from tests.world.process import on_virtual_time

FLAGS = ["--block-size", "16"]
TOKENS = 200
"""Of an answer, which takes about six seconds."""


class Exchange:
    """One request of an HTTP client, and what has come of the response."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.status = 0
        self.content = b""
        self.ended = asyncio.Event()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": content, "more_body": False})
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [*headers, (b"content-length", str(len(content)).encode())],
            "client": ("10.0.9.1", 1), "server": ("10.0.9.2", 80),
        }  # fmt: skip

    def leave(self) -> None:
        """The client closes its connection."""
        self._received.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self._received.get()

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message["body"]
            if not message.get("more_body"):
                self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of a stream so far."""
        lines = [
            line.removeprefix("data: ") for line in self.content.decode().split("\n") if line.startswith("data: {")
        ]
        chunks = [json.loads(line) for line in lines]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


class Gateway:
    """A gateway, on a host of its own."""

    def __init__(self, simulation: Simulation, conductors: Sequence[str]) -> None:
        self._simulation = simulation
        self._flags = ["--id", "gateway-0", "--model", MODEL, "--conductor", ",".join(conductors)]
        self._node = Node("gateway-0", 1)
        self._context = copy_context()
        self._context.run(simulation.enter, self._node)
        self._app: asyncio.Future[Callable[..., Any]] = simulation.loop.create_future()
        self._tasks = [self._begin(self._run())]

    def _begin(self, work: Any) -> asyncio.Task[None]:
        return self._context.run(self._simulation.loop.create_task, work)

    async def _run(self) -> None:
        config = GatewayConfig.load(self._flags)
        async with application(config, Tokenizer.load(MODEL), PrometheusMetrics("gateway-0")) as (app, _):
            self._app.set_result(app)
            await asyncio.Event().wait()

    async def post(self, path: str, body: dict[str, Any]) -> Exchange:
        """Begin a request."""
        exchange, app = Exchange(path, body), await self._app
        self._tasks.append(self._begin(app(exchange.scope, exchange.receive, exchange.send)))
        return exchange

    async def stream(self, asked: list[int], tokens: int = TOKENS) -> Exchange:
        """Begin a streamed greedy completion."""
        how = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        return await self.post("/v1/completions", {"prompt": asked, **how})

    def kill(self) -> None:
        """As `kill -9`."""
        self._node.dead = True
        self._simulation.network.kill(self._node)


async def begun(exchanges: Sequence[Exchange]) -> None:
    """Wait until each stream has some tokens."""

    async def all_run() -> bool:
        return all(len(it.token_ids) > 5 for it in exchanges)

    await until(all_run, "all streams have tokens")


async def started(simulation: Simulation) -> tuple[Cluster, Gateway]:
    """Two decode instances, and a gateway before them."""
    cluster = Cluster(simulation, {"decode": 2}, {"prefill": FLAGS, "decode": FLAGS})
    await cluster.start()
    return cluster, Gateway(simulation, cluster.addresses)


@on_virtual_time
async def test_streams_outlive_a_decode_instance_and_the_conductor(simulation: Simulation) -> None:
    """Their clients see neither a lost nor a doubled token, and no error."""
    cluster, gateway = await started(simulation)
    prompts = [prompt(100 + 60 * number, f"gateway {number}") for number in range(4)]
    streams = [await gateway.stream(asked) for asked in prompts]
    await begun(streams)
    cluster.services["decode-0"].kill()
    await asyncio.sleep(1.0)
    cluster.services["conductor-0"].kill()
    await cluster.services["conductor-0"].start()
    for asked, exchange in zip(prompts, streams, strict=True):
        await exchange.ended.wait()
        assert exchange.status == 200
        assert exchange.token_ids == answer(asked, TOKENS)
        assert exchange.content.rstrip().endswith(b"data: [DONE]")
    await cluster.services["decode-0"].start()
    await cluster.rest()


@on_virtual_time
async def test_clients_that_leave_and_a_killed_gateway_leave_nothing_behind(simulation: Simulation) -> None:
    cluster, gateway = await started(simulation)
    leaving, staying = [await gateway.stream(prompt(100, name), 2000) for name in ("leaves", "stays")]
    await begun([leaving, staying])
    leaving.leave()

    async def one_runs() -> bool:
        return await cluster.gauge("conductor-0", "requests_running") == 1

    await until(one_runs, "the request of the client that left has ended")
    assert not staying.ended.is_set()
    gateway.kill()
    await cluster.rest()
