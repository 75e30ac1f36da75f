"""A server that speaks SGLang's HTTP and ZMQ, caches as `ModelEngine`, and answers by a function of the tokens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, BLOCKS, MAX_TOKENS, NUMBER_BYTES, next_token
from tests.unit.interop.adapter.model_engine import ModelEngine

FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


class FakeSglang:
    """One server.

    Attributes:
        engine: its cache.
        url: of its HTTP server.
        info: what the server says of itself.
        running: answers that it generates.
        requests: bodies of the answers that were asked for.
        hits: for each of them, the blocks that its cache had.
        rooms: where both engines of a pair meet: what the prefill side has computed, by room; shared by all servers.
        whole: each message has all tokens so far.
        dying: breaks connections off.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int, mode: str) -> None:
        self.engine = ModelEngine(block_size=BLOCK_SIZE, capacity=BLOCKS)
        self.vocab_size, self.url, self.running, self.whole, self.dying = vocab_size, "", 0, True, False
        self.events, self.replays = (f"ipc://{folder}/{name}.{what}" for what in ("events", "replays"))
        config = {"publisher": "zmq", "endpoint": self.events, "replay_endpoint": self.replays, "topic": "kv-events"}
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "page_size": BLOCK_SIZE,
            "max_total_num_tokens": BLOCKS * BLOCK_SIZE,
            "context_length": MAX_TOKENS,
            "dp_size": 1,
            "random_seed": 4711,
            "disaggregation_mode": mode,
            "disaggregation_bootstrap_port": 8998,
            "kv_events_config": msgspec.json.encode(config).decode(),
        }
        self.requests: list[dict[str, Any]] = []
        self.hits: list[int] = []
        self.rooms: dict[int, asyncio.Future[list[int]]] = {}
        self.publisher: zmq.asyncio.Socket

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/loads", self._load)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/flush_cache", self._flush)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _load(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "token_usage": 0.0}
        return web.json_response({"version": self.info["version"], "loads": [load]})

    async def _flush(self, request: web.Request) -> web.Response:
        self.engine.clear()
        await self.publish()
        return web.Response(text="Cache flushed.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, room = await request.json(), 0
        tokens, sampling, salt = body["input_ids"], body["sampling_params"], body.get("extra_key", "")
        assert body["stream"]
        if len(tokens) + sampling["max_new_tokens"] > MAX_TOKENS:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.requests.append(body)
        self.hits.append(min(self.engine.hit(tokens, salt), (len(tokens) - 1) // BLOCK_SIZE))
        alone = body.get("bootstrap_host") == "2.2.2.2"
        if "bootstrap_room" in body and not alone:
            assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8998)
            room = body["bootstrap_room"]
            met = self.rooms.setdefault(room, asyncio.get_running_loop().create_future())
            if self.info["disaggregation_mode"] == "decode":
                assert await met == tokens  # the other engine has computed the prompt
            else:
                met.set_result(list(tokens))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            if self.info["disaggregation_mode"] != "null" and "bootstrap_room" not in body:
                refusal = {"type": "abort", "status_code": 400, "message": "without bootstrap room id"}
                told = {"output_ids": [], "meta_info": {"finish_reason": refusal}}
                await response.write(b"data: " + msgspec.json.encode(told) + b"\n\n")
            else:
                await self._answer(request, response, tokens, sampling, salt)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response

    async def _answer(
        self, request: web.Request, response: web.StreamResponse, tokens: list[int], sampling: dict[str, Any], salt: str
    ) -> None:
        self.engine.compute(tokens, salt)
        await self.publish()
        hit, ids = self.hits[-1], list[int]()
        for count in range(1, sampling["max_new_tokens"] + 1):
            if self.dying:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            ids.append(next_token([*tokens, *ids], self.vocab_size))
            stops = ids[-1] in sampling["stop_token_ids"] and count > sampling["min_new_tokens"]
            finish: dict[str, Any] | None = {"type": "stop", "matched": ids[-1]} if stops else None
            if finish is None and count == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": count}
            meta = {
                "finish_reason": finish,
                "completion_tokens": count,
                "cached_tokens": hit * BLOCK_SIZE,
                "output_token_logprobs": [[-0.5, token, None] for token in (ids if self.whole else ids[-1:])],
            }
            told = {"text": "", "output_ids": ids if self.whole else ids[-1:], "meta_info": meta}
            if finish:
                self.engine.compute([*tokens, *ids[:-1]], salt)  # the last token's KV is never computed
                await self.publish()
            await response.write(b"data: " + msgspec.json.encode(told) + b"\n\n")
            if finish:
                return

    async def publish(self) -> None:
        """Publishes what has happened, in SGLang's form: salts have a field of their own."""
        batch = self.engine.publish()
        if batch is not None:
            number, message = batch
            payload = msgspec.msgpack.encode(as_sglang(message))
            await self.publisher.send_multipart([b"kv-events", number.to_bytes(NUMBER_BYTES, "big"), payload])

    async def answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await socket.recv_multipart()
            for number, message in self.engine.replay(int.from_bytes(start, "big")):
                payload = msgspec.msgpack.encode(as_sglang(message))
                await socket.send_multipart([client, b"", number.to_bytes(NUMBER_BYTES, "big"), payload])
            await socket.send_multipart([client, b"", (-1).to_bytes(NUMBER_BYTES, "big", signed=True), b""])


def as_sglang(message: list[Any]) -> list[Any]:
    """A batch of `ModelEngine` in SGLang's form, which leaves out what has its default, one event a page."""
    time, events, rank = message
    found = []
    for event in events:
        told = {"type": event["type"]} | {name: event[name] for name in FIELDS if name in event}
        extra = event.get("extra_keys") or []
        pages = event["block_hashes"] if event["type"] == "BlockStored" else []
        parent = event.get("parent_block_hash")
        for at, page in enumerate(pages):
            stored = told | {"block_hashes": [page], "parent_block_hash": parent}
            stored["token_ids"] = event["token_ids"][at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            if extra[at]:
                stored["cache_salt"] = extra[at][0]
            found.append(stored)
            parent = page
        if not pages:
            found.append(told)
    return [time, found, rank]


@asynccontextmanager
async def fake_sglang(folder: Path, name: str, vocab_size: int, mode: str = "null") -> AsyncIterator[FakeSglang]:
    """A running server."""
    server = FakeSglang(folder, name, vocab_size, mode)
    context = zmq.asyncio.Context()
    server.publisher = context.socket(zmq.PUB)
    server.publisher.bind(server.events)
    replays = context.socket(zmq.ROUTER)
    replays.bind(server.replays)
    replaying = asyncio.create_task(server.answer_replays(replays))
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
        replaying.cancel()
        await asyncio.gather(replaying, return_exceptions=True)
        context.destroy(linger=0)
