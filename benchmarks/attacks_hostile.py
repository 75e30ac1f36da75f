"""The hostile client of `benchmarks.attacks`: `python -m benchmarks.attacks_hostile ATTACK HOST:PORT SECONDS`."""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

CALM, HOSTILE = "calm", "hostile"
"""Keys, and the tenants that they are of."""
LEXEMES = 100
"""Of the hostile grammar: fewer than a conductor refuses."""
PROMPT_TOKENS = 6000
"""Of prompts with log probabilities: about as many as the bundled model takes."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where to attack."""

    host: str
    port: int

    async def ask(self, path: str, body: object, key: str = HOSTILE) -> bytes:
        """Send one request; returns what comes back until the connection ends."""
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        return await self.send(head.encode() + raw)

    async def send(self, *pieces: bytes) -> bytes:
        """Send on a separate connection, and read to the end."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        finally:
            writer.close()


Attack = Callable[[Gateway], Awaitable[object]]


def grammar(lexemes: int) -> str:
    """A Lark grammar with overlapping lexemes."""
    names = [f"L{number}" for number in range(lexemes)]
    rules = [
        f"L{at}: /[a-z ]*{chr(97 + at % 26)}{chr(97 + at // 26 % 26)}[a-z ]{{{at % 7 + 1},{at % 7 + 5}}}/"
        for at in range(lexemes)
    ]
    return f"start: item*\nitem: {' | '.join(names)}\n" + "\n".join(rules)


def chat(**fields: Any) -> dict[str, Any]:
    """A body of a chat."""
    return {"messages": [{"role": "user", "content": f"{time.monotonic_ns()} Say it."}], **fields}


async def chunks(gateway: Gateway) -> None:
    """Bodies in one-byte chunks, without a key."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    piece = b"1\r\n \r\n" * 10_000
    await gateway.send(head + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 20)


async def detokenize(gateway: Gateway) -> None:
    """As many tokens as a body may have, and more than the model takes."""
    await gateway.ask("/detokenize", {"tokens": [1234] * 250_000})


async def words(gateway: Gateway) -> None:
    """More banned words than are taken."""
    await gateway.ask("/v1/chat/completions", chat(bad_words=[f"w{number}" for number in range(60_000)]))


async def lexemes(gateway: Gateway) -> None:
    """An answer that follows a costly grammar."""
    format_ = {"grammar": grammar(LEXEMES) + f"\n// {time.monotonic_ns()}\n"}
    await gateway.ask("/v1/chat/completions", chat(structured_outputs=format_, max_tokens=200))


async def refused(gateway: Gateway) -> None:
    """Grammars that cost too much."""
    format_ = {"grammar": grammar(4 * LEXEMES) + f"\n// {time.monotonic_ns()}\n"}
    await gateway.ask("/v1/chat/completions", chat(structured_outputs=format_, max_tokens=200))


async def scores(gateway: Gateway) -> None:
    """Log probabilities of long prompts."""
    prompt = [5 + (time.monotonic_ns() + at * 7919) % 4000 for at in range(PROMPT_TOKENS)]
    await gateway.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20})


async def answers(gateway: Gateway) -> None:
    """Many answers to one prompt."""
    await gateway.ask("/v1/chat/completions", chat(n=32, max_tokens=100, ignore_eos=True))


async def bodies(gateway: Gateway) -> None:
    """Bodies that are held back just before their end."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {HOSTILE}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {4 * MIB}\r\n\r\n"
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    try:
        writer.write(head.encode() + b'{"messages":[{"role":"user","content":"')
        for _ in range(15):
            writer.write(b"x" * (MIB // 4))
            await writer.drain()
        await reader.read()
    finally:
        writer.close()


async def lists(gateway: Gateway) -> None:
    """Lists of short prompts."""
    prompts = [[7, 8, 9, 10, 5 + (time.monotonic_ns() + at) % 4000] for at in range(2000)]
    await gateway.ask("/v1/completions", {"prompt": prompts, "max_tokens": 1})


async def embeddings(gateway: Gateway) -> None:
    """Lists of short texts."""
    await gateway.ask("/v1/embeddings", {"input": [f"{time.monotonic_ns()} {number}" for number in range(2000)]})


async def ranks(gateway: Gateway) -> None:
    """Many documents for one query."""
    documents = [f"{time.monotonic_ns()} {number}" for number in range(2000)]
    await gateway.ask("/rerank", {"query": "which", "documents": documents})


async def markdown(gateway: Gateway) -> None:
    """Text that is costly to render."""
    await gateway.ask("/moonpool/markdown", {"text": "[" * 32_000})


async def tools(gateway: Gateway) -> None:
    """Large bodies of many parts."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    await gateway.ask("/v1/chat/completions", chat(tools=[tool] * 2000, tool_choice="none", max_tokens=1))


async def long_prompts(gateway: Gateway) -> None:
    """Texts that are longer than the model takes."""
    await gateway.ask("/v1/completions", {"prompt": "a b c d " * 100_000, "max_tokens": 1})


async def scored_answers(gateway: Gateway, *, stream: bool) -> None:
    """Many answers with many log probabilities."""
    body = chat(n=64, max_tokens=100, ignore_eos=True, logprobs=True, top_logprobs=20, stream=stream)
    await gateway.ask("/v1/chat/completions", body)


async def nothing(_gateway: Gateway) -> None:
    """A client that computes and asks nothing: what an attacker on the same machine costs without any attack."""
    sum(range(20_000_000))


ATTACKS: dict[str, tuple[Attack, int]] = {
    "nothing": (nothing, 1),
    "chunks": (chunks, 4),
    "detokenize": (detokenize, 4),
    "words": (words, 4),
    "grammar": (lexemes, 4),
    "grammars refused": (refused, 4),
    "prompt log probabilities": (scores, 2),
    "answers": (answers, 1),
    "lists": (lists, 4),
    "embeddings": (embeddings, 4),
    "ranks": (ranks, 4),
    "Markdown": (markdown, 8),
    "tools": (tools, 4),
    "long prompts": (long_prompts, 4),
    "log probabilities": (partial(scored_answers, stream=False), 1),
    "streamed log probabilities": (partial(scored_answers, stream=True), 1),
    "bodies": (bodies, 300),
}
"""By name: the attack, and the number of concurrent connections."""


async def attack(name: str, gateway: Gateway, seconds: float) -> None:
    """Run an attack for this long, whatever the outcome."""
    what, connections = ATTACKS[name]

    async def again() -> None:
        while True:
            with suppress(OSError):
                await what(gateway)
            await asyncio.sleep(0.01)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(again() for _ in range(connections)))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("address", help="HOST:PORT of the gateway")
    parser.add_argument("seconds", type=float)
    options = parser.parse_args()
    host, _, port = options.address.rpartition(":")
    print("attacking", flush=True)
    asyncio.run(attack(options.attack, Gateway(host, int(port)), options.seconds))


if __name__ == "__main__":
    main()
