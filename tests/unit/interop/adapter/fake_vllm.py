"""A server that speaks vLLM's HTTP and ZMQ, caches as `ModelEngine`, and answers by a function of the tokens."""

import asyncio
import base64
import hashlib
import itertools
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from tests.unit.interop.adapter.model_engine import ModelEngine

BLOCK_SIZE, BLOCKS, MAX_TOKENS = 16, 64, 1024
NUMBER_BYTES = 8


def next_token(tokens: Sequence[int], vocab_size: int, lora: str = "") -> int:
    """The token behind `tokens`, always the same one."""
    digest = hashlib.sha256(f"{list(tokens)}{lora}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % vocab_size


def answer_to(prompt: Sequence[int], count: int, vocab_size: int, lora: str = "") -> list[int]:
    """The answer that the engine gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size, lora))
    return tokens[len(prompt) :]


class FakeVllm:
    """One server.

    Attributes:
        engine: its cache.
        url: of its HTTP server.
        running: answers that it generates.
        requests: bodies of the answers that were asked for.
        hits: for each of them, the blocks that its cache had.
        gate: answers wait before their second token while it is clear.
        half: prompts wait while it is clear, half of them computed.
        dying: breaks connections off, and answers nothing.
        token_s: time that a prompt's token takes.
        kept: answers whose prompt's KV is kept for another engine, with the prompt's tokens, by id.
        peers: engines that KV can come from.
        computed_tokens: prompt tokens that were not there.
        polls: questions for its metrics.
        moves_kv: runs with a connector that moves KV.
        loras: folders of its LoRA adapters, by name.
        page_namespace: of the connector for kvstores, in hex; "" = no connector.
        pictures: tokens of a picture, by its file; renders a chat's pictures.
        masks: which of these have rows, by its file, as vLLM behind 0.32 tells.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        self.engine = ModelEngine(block_size=BLOCK_SIZE, capacity=BLOCKS)
        self.vocab_size, self.life, self.url = vocab_size, 1.0, ""
        self.events, self.replays = (f"ipc://{folder}/{name}.{what}" for what in ("events", "replays"))
        self.running = 0
        self.requests: list[dict[str, Any]] = []
        self.hits: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.half = asyncio.Event()
        self.half.set()
        self.dying = False
        self.page_namespace, self.token_s = "", 0.0
        self.loras: dict[str, Path] = {}
        self.kept: dict[str, list[int]] = {}
        self.peers: list[FakeVllm] = []
        self.moves_kv = True
        self.computed_tokens = self.polls = self.renders = 0
        self.pictures: dict[bytes, int] = {}
        self.masks: dict[bytes, list[bool]] = {}
        self.publisher: zmq.asyncio.Socket

    # --- HTTP ------------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._while_alive])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/openapi.json", self._paths)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/reset_prefix_cache", self._reset)
        return app

    @web.middleware
    async def _while_alive(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.dying:
            self._break(request)
        response: web.StreamResponse = await handler(request)
        return response

    def _break(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _paths(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {"/inference/v1/generate": {}, "/v1/chat/completions/render": {}}})

    async def _models(self, request: web.Request) -> web.Response:
        loras = [{"id": name, "root": str(path), "parent": "tiny"} for name, path in self.loras.items()]
        return web.json_response({"data": [{"id": "tiny", "max_model_len": MAX_TOKENS, "parent": None}, *loras]})

    async def _sources(self, request: web.Request) -> web.Response:
        source = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events,
            "replay_endpoint": self.replays, "topic": "",
        }  # fmt: skip
        return web.json_response({"0": source})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.polls += 1
        return web.Response(
            text=f"process_start_time_seconds {self.life}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCKS}",'
            'enable_prefix_caching="True"} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {self.running}\n'
            'vllm:num_requests_waiting{engine="0"} 0\nvllm:kv_cache_usage_perc{engine="0"} 0.0\n'
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {self.computed_tokens}\n'
            'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 9000\n'
            'vllm:num_preemptions_total{engine="0"} 4\nvllm:num_preemptions_total{engine="1"} 3\n'
            + (f'moonpool_kv_info{{engine="0",namespace="{self.page_namespace}"}} 1.0\n' * bool(self.page_namespace))
        )

    async def _render(self, request: web.Request) -> web.Response:
        self.renders += 1
        [turn] = (await request.json())["messages"]
        files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in turn["content"]]
        lengths = [self.pictures[file] for file in files]
        ends = list(itertools.accumulate(lengths, initial=3))  # behind what the chat template has in front
        features = {
            "mm_hashes": {"image": [hashlib.sha256(file).hexdigest() for file in files]},
            "mm_placeholders": {
                "image": [
                    {"offset": offset, "length": length}
                    | ({"is_embed": self.masks[file]} if file in self.masks else {})
                    for file, offset, length in zip(files, ends, lengths, strict=False)
                ]
            },
            "kwargs_data": {"image": [base64.b64encode(b"pixels of " + file).decode() for file in files]},
        }
        return web.json_response({"token_ids": [0] * (ends[-1] + 1), "features": features})

    async def _reset(self, request: web.Request) -> web.Response:
        self.engine.clear()
        await self.publish()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling, tokens, salt = body["sampling_params"], list(body["token_ids"]), body.get("cache_salt", "")
        if len(tokens) + sampling["max_tokens"] > MAX_TOKENS:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        lora = body.get("model", "")
        if lora and lora not in self.loras:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        hit = min(self.engine.hit(tokens, salt, lora), (len(tokens) - 1) // BLOCK_SIZE)
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_prefill"):
            sent = next(
                (peer.kept.pop(transfer["remote_request_id"], None) for peer in self.peers if not peer.dying), None
            )
            if sent is not None and tokens[: len(sent)] == sent:
                assert (len(tokens) - 1) // BLOCK_SIZE == (len(sent) - 1) // BLOCK_SIZE  # else vLLM ends
                hit = len(sent) // BLOCK_SIZE
                self.computed_tokens -= len(tokens) - hit * BLOCK_SIZE  # vLLM counts the last token as transferred
        self.computed_tokens += len(tokens) - hit * BLOCK_SIZE
        self.requests.append(body)
        self.hits.append(hit)
        if transfer.get("do_remote_decode"):
            return await self._keep(body, tokens, salt, hit)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._answer(request, response, tokens, sampling, salt, lora)
            usage = {"prompt_tokens_details": {"cached_tokens": hit * BLOCK_SIZE}}
            await self._write(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response

    async def _keep(self, body: dict[str, Any], tokens: list[int], salt: str, hit: int) -> web.Response:
        assert (body["sampling_params"]["max_tokens"], body["stream"]) == (1, False)
        self.engine.compute(tokens, salt)
        await self.publish()
        if body["request_id"] != "calibration":
            self.kept[body["request_id"]] = tokens
        transfer = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": body["request_id"]}
        token = next_token(tokens, self.vocab_size)
        return web.json_response({
            "choices": [{"index": 0, "token_ids": [token], "finish_reason": "length"}],
            "usage": {"prompt_tokens_details": {"cached_tokens": hit * BLOCK_SIZE}},
            "kv_transfer_params": transfer if self.moves_kv else None,
        })  # fmt: skip

    async def _answer(
        self,
        request: web.Request,
        response: web.StreamResponse,
        tokens: list[int],
        sampling: dict[str, Any],
        salt: str,
        lora: str,
    ) -> None:
        await asyncio.sleep(self.token_s * len(tokens))
        if not self.half.is_set():
            self.engine.compute(tokens[: len(tokens) // 2], salt, lora)
            await self.publish()
            await self.half.wait()
        self.engine.compute(tokens, salt, lora)
        await self.publish()
        for count in range(1, sampling["max_tokens"] + 1):
            if count == 2:
                await self.gate.wait()
            if self.dying:
                self._break(request)
            tokens.append(next_token(tokens, self.vocab_size, lora))
            stops = tokens[-1] in sampling["stop_token_ids"] and count > sampling["min_tokens"]
            finish = "stop" if stops else "length" if count == sampling["max_tokens"] else None
            if finish:
                self.engine.compute(tokens[:-1], salt, lora)  # the last token's KV is never computed
                await self.publish()
            await self._write(response, {"choices": [{"index": 0, "token_ids": tokens[-1:], "finish_reason": finish}]})
            if finish:
                return

    async def _write(self, response: web.StreamResponse, message: object) -> None:
        await response.write(b"data: " + msgspec.json.encode(message) + b"\n\n")

    # --- ZMQ -------------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        batch = self.engine.publish()
        if batch is not None:
            number, message = batch
            payload = msgspec.msgpack.encode(message)
            await self.publisher.send_multipart([b"", number.to_bytes(NUMBER_BYTES, "big"), payload])

    async def answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await socket.recv_multipart()
            for number, message in self.engine.replay(int.from_bytes(start, "big")):
                number_bytes, payload = number.to_bytes(NUMBER_BYTES, "big"), msgspec.msgpack.encode(message)
                await socket.send_multipart([client, b"", b"", number_bytes, payload])
            await socket.send_multipart([client, b"", b"", (-1).to_bytes(NUMBER_BYTES, "big", signed=True), b""])

    def restart(self) -> None:
        """The engine ends, and another one is there."""
        self.engine.restart()
        self.life += 1.0


@asynccontextmanager
async def fake_vllm(
    folder: Path, name: str, vocab_size: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeVllm]:
    """A running server."""
    server = FakeVllm(folder, name, vocab_size)
    context = zmq.asyncio.Context()
    server.publisher = context.socket(zmq.PUB)
    server.publisher.bind(server.events)
    replays = context.socket(zmq.ROUTER)
    replays.bind(server.replays)
    replaying = asyncio.create_task(server.answer_replays(replays))
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.gate.set()
        server.half.set()
        await runner.cleanup()
        replaying.cancel()
        await asyncio.gather(replaying, return_exceptions=True)
        context.destroy(linger=0)
