"""Servers that speak vLLM's HTTP and KV events and compute nothing: `python -m benchmarks.emulated_vllm --engines 4`.

Steps take the time that a profile gives. Batches, chunks of prompts, prefix caches and evictions are as in vLLM: the
answers that run get a token each step, the rest of the step goes to prompts in their order, blocks are evicted by last
use, the ends of chains first. One token stands for `--token-scale` tokens of the profile, so long prompts cost no more
processor time than short ones. `GET /emulated` tells what was cached, and by how much steps came late.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import signal
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq.asyncio
from aiohttp import web
from tokenizers import Tokenizer

from moonpool.base.bundled import model_dir
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.engine.emulated.profile import EmulatedCompute, load_profile
from moonpool.interop.kv_events.events import BlockRemoved, BlockStored, EngineEvent, ExtraKeys
from moonpool.interop.kv_events.publisher import publishing

MODEL = "tiny"
BLOCK_SIZE, MAX_TOKENS, MAX_RUNNING = 16, 8192, 64
MADE_UP_S = 0.005
"""Lateness that the next step makes up for."""
HASH_BYTES = 8
KIND = "full_attention"


def words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a word each; text of them is cut at its spaces."""
    found = []
    for piece, token in sorted(tokenizer.get_vocab().items()):
        text = tokenizer.decode([token])
        if len(piece) > 1 and text[:1] == " " and text[1:].isalpha() and text.isascii():
            found.append(token)
    return found


@dataclass(eq=False, slots=True)
class Request:
    """An answer: its tokens, the prompt's full blocks, and what is computed.

    Attributes:
        tokens: of the prompt and, as they come, of the answer.
        prompt_tokens: tokens of the prompt.
        wanted: tokens of the answer.
        hashes: of the blocks that are held for this request.
        computed: tokens with KV.
        blocks: blocks that are promised, but hold no full block yet.
        outputs: tokens to send; None behind the last one.
    """

    tokens: list[int]
    prompt_tokens: int
    wanted: int
    salt: str
    hashes: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    blocks: int = 0
    outputs: "asyncio.Queue[int | None]" = field(default_factory=asyncio.Queue)


class PrefixCache:
    """Blocks of KV; tells changes as vLLM's events.

    Attributes:
        capacity: blocks in all.
        held: full blocks by hash, the least recently used first, and how many requests use each.
        events: not told yet.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, int] = {}
        self.events: list[EngineEvent] = []
        self._promised = 0

    def hashes(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Of all full blocks; each stands for all tokens before it."""
        found, digest = list[int](), hashlib.sha256(salt.encode()).digest()
        for at in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            digest = hashlib.sha256(digest + array("i", tokens[at : at + BLOCK_SIZE]).tobytes()).digest()
            found.append(int.from_bytes(digest[:HASH_BYTES], "big"))
        return found

    def admit(self, request: Request) -> bool:
        """Take blocks for a request, its cached ones among them, if there is room."""
        hashes = self.hashes(request.tokens[: request.prompt_tokens - 1], request.salt)
        cached = list(itertools.takewhile(self.held.__contains__, hashes))
        needed = -(-(request.prompt_tokens + request.wanted) // BLOCK_SIZE) - len(cached)
        for block in cached:
            self.held[block] += 1
        free = self.capacity - self._promised - len(self.held)
        evictable = [block for block, users in self.held.items() if not users]
        if needed > free + len(evictable):
            for block in cached:
                self.held[block] -= 1
            return False
        gone = evictable[: max(0, needed - free)]
        for block in gone:
            del self.held[block]
        if gone:
            self.events.append(BlockRemoved(tuple(gone), "GPU", 0))
        self._promised += needed
        request.hashes, request.blocks = cached, needed
        request.computed = request.cached = len(cached) * BLOCK_SIZE
        return True

    def filled(self, request: Request) -> None:
        """Blocks of a request have become full."""
        begin = len(request.hashes)
        if request.computed // BLOCK_SIZE == begin:
            return
        hashes = self.hashes(request.tokens[: request.computed], request.salt)
        new = [block for block in hashes[begin:] if block not in self.held]
        for block in hashes[begin:]:
            self.held[block] = self.held.get(block, 0) + 1
        self._promised -= len(hashes) - begin
        request.blocks -= len(hashes) - begin
        request.hashes = hashes
        if new:
            first = hashes.index(new[0])
            tokens = request.tokens[first * BLOCK_SIZE : (first + len(new)) * BLOCK_SIZE]
            salt: ExtraKeys = (request.salt,) if request.salt and not first else ()
            extra: list[ExtraKeys] = [salt, *[()] * (len(new) - 1)]
            parent = hashes[first - 1] if first else None
            self.events.append(BlockStored(tuple(new), parent, tokens, BLOCK_SIZE, "GPU", tuple(extra), kind=KIND))

    def release(self, request: Request) -> None:
        """A request has ended: its blocks may be evicted, the last ones first."""
        for block in reversed(request.hashes):
            self.held[block] = self.held.pop(block) - 1
        self._promised -= request.blocks

    @property
    def used(self) -> float:
        """Share of the blocks that requests hold."""
        return (self._promised + sum([users > 0 for users in self.held.values()])) / self.capacity


class EmulatedVllm:
    """One server.

    Args:
        speeds: seconds of steps, by tokens of the profile.
        token_scale: tokens of the profile for each token.
        blocks: of KV.
        max_num_batched_tokens: tokens of a step at most.
        answer: tokens of which answers consist.
        publish: publishes a step's events.
    """

    def __init__(
        self,
        speeds: Speeds,
        token_scale: int,
        blocks: int,
        max_num_batched_tokens: int,
        answer: Sequence[int],
        publish: Callable[[Sequence[EngineEvent]], Awaitable[None]],
    ) -> None:
        self.cache = PrefixCache(blocks)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counts = {"prompt_tokens": 0, "cached_tokens": 0, "requests": 0, "step_s": 0.0, "late_s": 0.0}
        self.started = time.time()
        self._speeds, self._scale, self._step_tokens = speeds, token_scale, max_num_batched_tokens
        self._answer = itertools.cycle(answer)
        self._work = asyncio.Event()
        self._publish = publish

    async def answer(self, tokens: Sequence[int], wanted: int, salt: str) -> AsyncGenerator[tuple[int, Request], None]:
        """An answer's tokens, each with the request."""
        request = Request([*tokens], len(tokens), wanted, salt)
        self.waiting.append(request)
        self._work.set()
        try:
            while (token := await request.outputs.get()) is not None:
                yield token, request
        finally:
            request.wanted = 0  # a client that leaves ends its request

    async def run(self) -> None:
        """Run steps for as long as there is work."""
        clock, due = asyncio.get_running_loop().time, 0.0
        while True:
            if not self.waiting and not self.running:
                self._work.clear()
                await self._work.wait()
                due = clock()
            while self.waiting and len(self.running) < MAX_RUNNING and self.cache.admit(self.waiting[0]):
                self._begin(self.waiting.pop(0))
            work, seconds = self._plan()
            due = max(due, clock() - MADE_UP_S) + seconds
            await asyncio.sleep(max(0.0, due - clock()))
            self.counts["step_s"] += seconds
            self.counts["late_s"] += max(0.0, clock() - due - MADE_UP_S)
            for request, count in work:
                self._computed(request, count)
            events, self.cache.events = self.cache.events, []
            if events:
                await self._publish(events)

    def _begin(self, request: Request) -> None:
        self.running.append(request)
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += request.prompt_tokens
        self.counts["cached_tokens"] += request.cached

    def _plan(self) -> tuple[list[tuple[Request, int]], float]:
        """What the next step computes of each request, and the seconds that the step takes."""
        work, left, seconds = list[tuple[Request, int]](), self._step_tokens, 0.0
        decodes = [request for request in self.running if request.computed >= request.prompt_tokens]
        if decodes:
            context = sum([request.computed for request in decodes]) * self._scale
            seconds += decode_step_seconds(self._speeds, len(decodes), context)
            work += [(request, 1) for request in decodes]
            left -= len(decodes)
        for request in self.running:
            count = min(request.prompt_tokens - request.computed, left)
            if count > 0:
                seconds += prefill_seconds(
                    self._speeds,
                    count * self._scale,
                    request.computed * self._scale,
                    begins=request.computed == request.cached,
                )
                work.append((request, count))
                left -= count
        return work, seconds

    def _computed(self, request: Request, count: int) -> None:
        request.computed += count
        given = len(request.tokens) - request.prompt_tokens
        if request.computed == len(request.tokens) and given < request.wanted:
            request.tokens.append(next(self._answer))
            request.outputs.put_nowait(request.tokens[-1])
            given += 1
        self.cache.filled(request)
        if given >= request.wanted:
            request.outputs.put_nowait(None)
            self.cache.release(request)
            self.running.remove(request)


class HttpApi:
    """A server's HTTP: what routers and Moonpool's adapter ask for."""

    def __init__(self, engine: EmulatedVllm, tokenizer: Tokenizer, sources: Mapping[str, Any]) -> None:
        self._engine, self._tokenizer, self._sources = engine, tokenizer, sources

    def app(self) -> web.Application:
        """All paths."""
        app = web.Application()
        fixed = {
            "/health": {}, "/version": {"version": "0.32.0"}, "/kv_event_sources": {"0": self._sources},
            "/openapi.json": {"paths": {"/inference/v1/generate": {}}},
            "/v1/models": {"data": [{"id": MODEL, "max_model_len": MAX_TOKENS, "parent": None}]},
        }  # fmt: skip
        for path, content in fixed.items():
            app.router.add_get(path, partial(_fixed, content))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/emulated", partial(_fixed, self._engine.counts))
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.Response(
            text=f"process_start_time_seconds {engine.started}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{engine.cache.capacity}",'
            'enable_prefix_caching="True"} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {len(engine.running)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {len(engine.waiting)}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {engine.cache.used}\nvllm:num_preemptions_total{{engine="0"}} 0\n'
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def message(token: int, finish: str | None) -> dict[str, Any]:
            return {"choices": [{"index": 0, "token_ids": [token], "finish_reason": finish}]}

        wanted = body["sampling_params"]["max_tokens"]
        return await self._stream(request, body["token_ids"], wanted, body.get("cache_salt", ""), message)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        tokens = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt

        def message(token: int, finish: str | None) -> dict[str, Any]:
            choice = {"index": 0, "text": self._tokenizer.decode([token]), "logprobs": None, "finish_reason": finish}
            return {"id": "cmpl", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}

        return await self._stream(request, tokens, body["max_tokens"], body.get("cache_salt", ""), message)

    async def _stream(
        self, request: web.Request, tokens: Sequence[int], wanted: int, salt: str, message: Any
    ) -> web.StreamResponse:
        if len(tokens) + wanted > min(MAX_TOKENS, self._engine.cache.capacity * BLOCK_SIZE):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        async with contextlib.aclosing(self._engine.answer(tokens, wanted, salt)) as answer:
            async for token, live in answer:
                count += 1
                await _event(response, message(token, "length" if count == wanted else None))
                cached = live.cached
        usage = {
            "prompt_tokens": len(tokens), "completion_tokens": count, "total_tokens": len(tokens) + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _fixed(content: Any, request: web.Request) -> web.Response:
    return web.json_response(content)


async def _event(response: web.StreamResponse, message: Any) -> None:
    await response.write(b"data: " + msgspec.json.encode(message) + b"\n\n")


def _bound(endpoint: str) -> str:
    """An endpoint as vLLM names the place where it listens."""
    return f"tcp://*:{endpoint.rpartition(':')[2]}"


async def serve(options: argparse.Namespace) -> None:
    """Serve all engines until told to stop; print their addresses."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    answer, profile = words(tokenizer), load_profile(options.profile)
    speeds = EmulatedCompute(profile, options.time_scale, decode=False, vocab_size=tokenizer.get_vocab_size()).speeds
    stopping, urls, context = asyncio.Event(), list[str](), zmq.asyncio.Context()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # sglang-router asks whether it is gRPC
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        for _ in range(options.engines):
            events = await stack.enter_async_context(publishing(context, options.events, options.replays))
            engine = EmulatedVllm(
                speeds,
                options.token_scale,
                options.blocks,
                options.max_num_batched_tokens // options.token_scale,
                answer,
                events.publish,
            )
            source = {
                "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": _bound(events.endpoint),
                "replay_endpoint": _bound(events.replay_endpoint), "topic": "",
            }  # fmt: skip
            runner = web.AppRunner(HttpApi(engine, tokenizer, source).app(), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, options.host, options.port)
            await site.start()
            urls.append(f"http://{options.host}:{runner.addresses[0][1]}")
            stack.callback(asyncio.create_task(engine.run()).cancel)
        print("ready:", json.dumps(urls), flush=True)
        await stopping.wait()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--profile", default="llama-70b-a800")
    parser.add_argument("--time-scale", type=float, default=4.0, help="profile seconds that pass in one second")
    parser.add_argument("--token-scale", type=int, default=32, help="the profile's tokens for each token")
    parser.add_argument("--blocks", type=int, default=500, help="KV blocks of 16 tokens")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="the profile's tokens of a step at most"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="of HTTP; 0 = any free one, as several engines need")
    parser.add_argument("--events", default="tcp://127.0.0.1:*", help="ZMQ endpoint of KV events")
    parser.add_argument("--replays", default="tcp://127.0.0.1:*", help="ZMQ endpoint of their replays")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
