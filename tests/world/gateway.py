"""A gateway on virtual time: requests come to its application as its HTTP server hands them over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.service import application
from tests.world.cluster import GRAVEYARD, MODEL, Simulation
from tests.world.loop import Node


class Exchange:
    """One request of an HTTP client, and what has come of the response.

    Attributes:
        status: of the response; 0 before its head.
        content: of the response, so far.
        ended: set when the response is whole, or the gateway is lost.
        whole: the response has come to its end.
    """

    def __init__(
        self, method: str, path: str, body: dict[str, Any] | bytes | None, key: str = "", boundary: str = ""
    ) -> None:
        """Take a body, or the bytes of a form with a boundary, or None; and an API key."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        kind = f"multipart/form-data; boundary={boundary}" if isinstance(body, bytes) else "application/json"
        self.status = 0
        self.content = b""
        self.ended = asyncio.Event()
        self.whole = False
        self._reads = asyncio.Event()
        self._reads.set()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": content, "more_body": False})
        headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
        if key:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": method, "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [*headers, (b"content-length", str(len(content)).encode())],
            "client": ("10.0.9.1", 1), "server": ("10.0.9.2", 80),
        }  # fmt: skip

    def leave(self) -> None:
        """The client closes its connection."""
        self._received.put_nowait({"type": "http.disconnect"})

    def lose(self) -> None:
        """The gateway has died."""
        self.ended.set()

    def pause(self) -> None:
        """The client reads nothing more, until `read_on`."""
        self._reads.clear()

    def read_on(self) -> None:
        """The client reads again."""
        self._reads.set()

    async def receive(self) -> dict[str, Any]:
        return await self._received.get()

    async def send(self, message: dict[str, Any]) -> None:
        await self._reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message["body"]
            if not message.get("more_body"):
                self.whole = True
                self.ended.set()

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON of a whole response."""
        found: dict[str, Any] = json.loads(self.content)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream so far, without OpenAI's last line."""
        blocks = self.content.decode().split("\n\n")[:-1]
        lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of a stream of completions so far."""
        return [token for event in self.events for each in event["choices"] for token in each.get("token_ids") or ()]


class Gateway:
    """A gateway on a host of its own, which may have several lives. Its first life begins at once."""

    def __init__(
        self, simulation: Simulation, conductors: Sequence[str], model: str = MODEL, flags: Sequence[str] = ()
    ) -> None:
        self.name = "gateway-0"
        self._simulation = simulation
        self._flags = ["--id", self.name, "--model", model, "--conductor", ",".join(conductors), *flags]
        self._tokenizer = Tokenizer.load(model)
        self._life = 0
        self._exchanges: dict[Exchange, None] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a life."""
        self._life += 1
        self.node = Node(self.name, self._life)
        self._context = copy_context()
        self._context.run(self._simulation.enter, self.node)
        self._app: asyncio.Future[Callable[..., Any]] = self._simulation.loop.create_future()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._stopping = asyncio.Event()
        self.task = self._spawn(self._run())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = self._context.run(self._simulation.loop.create_task, work)
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        return task

    async def _run(self) -> None:
        config = GatewayConfig.load(self._flags)
        async with application(config, self._tokenizer, PrometheusMetrics(self.name)) as (app, _):
            self._app.set_result(app)
            await self._stopping.wait()

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, key: str = "", boundary: str = ""
    ) -> Exchange:
        """Begin a request. A dead gateway takes none: its end has come at once."""
        exchange = Exchange(method, path, body, key, boundary)
        if self.node.dead:
            exchange.lose()
            return exchange
        app = await self._app
        self._exchanges = {each: None for each in self._exchanges if not each.ended.is_set()}
        self._exchanges[exchange] = None
        self._spawn(self._serve(app, exchange))
        return exchange

    async def _serve(self, app: Callable[..., Any], exchange: Exchange) -> None:
        try:
            await app(exchange.scope, exchange.receive, exchange.send)
        finally:
            exchange.ended.set()

    async def stream(self, asked: list[int], tokens: int) -> Exchange:
        """Begin a streamed greedy completion."""
        how = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        return await self.ask("POST", "/v1/completions", {"prompt": asked, **how})

    def stop(self) -> None:
        """As SIGSTOP."""
        self.node.held = []

    def resume(self) -> None:
        """As SIGCONT."""
        self._simulation.loop.resume(self.node)

    def kill(self) -> None:
        """As `kill -9`: its clients lose their connections."""
        GRAVEYARD.append((self._tasks, self._context))
        self.node.dead = True
        self._simulation.network.kill(self.node)
        for exchange in self._exchanges:
            exchange.lose()
        self._exchanges = {}

    async def close(self) -> None:
        """End an idle gateway in order."""
        self._stopping.set()
        await self.task
