"""Streams for `benchmarks.gateway`, from a separate process: `python -m benchmarks.gateway_load KIND ADDRESS`.

So many clients each send their next request when the last has ended. Both kinds ask for the same: a prompt of tokens,
so many tokens of answer, streamed. HTTP is spoken by hand, so that little of what is measured is this program's own.
Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field

from benchmarks.processes import own_cpu_s
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient

ORDINARY_TOKENS = (300, 4000)
END = b"\r\n0\r\n\r\n"
"""Of a body in chunks."""

Send = Callable[[list[int]], Awaitable[float]]
"""Sends a prompt and reads the answer to the end; returns seconds until the first token."""


@dataclass(frozen=True, slots=True)
class Found:
    """One run's result: requests, tokens, seconds, this process's processor seconds, TTFTs."""

    requests: int
    tokens: int
    seconds: float
    cpu_s: float
    ttft_s: list[float] = field(default_factory=list)


def prompts(count: int, tokens: int, seed: int) -> Iterator[list[int]]:
    """Prompts without a common prefix."""
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.choices(range(*ORDINARY_TOKENS), k=tokens)


async def clients(options: argparse.Namespace, sends: list[Send]) -> Found:
    """Every client sends until no prompt is left; the first request of each is not counted."""
    for prompt, send in zip(prompts(len(sends), options.prompt_tokens, -options.seed - 1), sends, strict=True):
        await send(prompt)
    waiting = list(prompts(options.requests, options.prompt_tokens, options.seed))
    ttft_s: list[float] = []

    async def client(send: Send) -> None:
        while waiting:
            ttft_s.append(await send(waiting.pop()))

    began, cpu_s = time.perf_counter(), own_cpu_s()
    await asyncio.gather(*map(client, sends))
    seconds = time.perf_counter() - began
    return Found(len(ttft_s), len(ttft_s) * options.answer_tokens, seconds, own_cpu_s() - cpu_s, ttft_s)


async def sdk(options: argparse.Namespace) -> Found:
    """Through the SDK."""
    sampling = SamplingParams(max_tokens=options.answer_tokens, temperature=0.0, ignore_eos=True)
    async with AsyncClient(options.address) as client:

        async def send(prompt: list[int]) -> float:
            began, first, tokens = time.perf_counter(), 0.0, 0
            async for event in client.stream(token_ids=prompt, sampling=sampling):
                first = first or time.perf_counter() - began
                tokens += len(event.token_ids)
            assert tokens == options.answer_tokens
            return first

        return await clients(options, [send] * options.streams)


class HttpClient:
    """One connection to a gateway."""

    def __init__(self, options: argparse.Namespace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answer_tokens = options.answer_tokens
        self._reader = reader
        self._writer = writer

    async def send(self, prompt: list[int]) -> float:
        """A streamed completion; the response begins with the first token."""
        content = {"prompt": prompt, "max_tokens": self._answer_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**content, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = bytearray(await self._reader.read(1 << 16))
        first = time.perf_counter() - began
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        while answer[-len(END) :] != END:
            piece = await self._reader.read(1 << 16)
            assert piece, answer
            answer += piece
        assert b'"completion_tokens":%d,' % self._answer_tokens in answer, answer
        return first


async def http(options: argparse.Namespace) -> Found:
    """Through a gateway."""
    host, _, port = options.address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(options.streams)]
    try:
        return await clients(options, [HttpClient(options, *pair).send for pair in opened])
    finally:
        for _, writer in opened:
            writer.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sdk", "http"])
    parser.add_argument("address", help="HOST:PORT of the conductor, or of the gateway")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, nargs="+", help="run on these; default: on those of the parent")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    print(json.dumps(asdict(asyncio.run({"sdk": sdk, "http": http}[options.kind](options)))))


if __name__ == "__main__":
    main()
