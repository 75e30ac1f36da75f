"""Streams for `benchmarks.gateway`, from a separate process: `python -m benchmarks.gateway_load KIND ADDRESS`.

A closed loop of the load generator. Both kinds ask for the same: a prompt of tokens, so many tokens of answer,
streamed. No event of HTTP is parsed, so that little of what is measured is this program's own.
Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.processes import own_cpu_s
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, closed_loop
from moonpool.cli.load_generator.senders import completion_body, greedy, http_request, kept_http_sender, sdk_sender
from moonpool.client import AsyncClient

ORDINARY_TOKENS = (300, 4000)


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


def all_prompts(options: argparse.Namespace) -> list[list[int]]:
    """The prompts of the requests that count, and then a first prompt for each client."""
    counted = prompts(options.requests, options.prompt_tokens, options.seed)
    return [*counted, *prompts(options.streams, options.prompt_tokens, -options.seed - 1)]


async def clients(options: argparse.Namespace, send: SendRequest) -> Found:
    """Every client sends until no prompt is left; the first request of each is not counted."""
    first_prompts = range(options.requests, options.requests + options.streams)
    check(options, await closed_loop(options.streams, first_prompts, send))
    began, cpu_s = time.perf_counter(), own_cpu_s()
    outcomes = await closed_loop(options.streams, range(options.requests), send)
    seconds, cpu_s = time.perf_counter() - began, own_cpu_s() - cpu_s
    check(options, outcomes)
    ttft_s = [outcome.first - outcome.due for outcome in outcomes if outcome.first is not None]
    return Found(len(ttft_s), len(ttft_s) * options.answer_tokens, seconds, cpu_s, ttft_s)


def check(options: argparse.Namespace, outcomes: Sequence[RequestOutcome]) -> None:
    """A run with a failed request, or with an answer of another length, is no figure."""
    wrong = [outcome for outcome in outcomes if outcome.error or outcome.tokens != options.answer_tokens]
    assert not wrong, wrong


async def sdk(options: argparse.Namespace) -> Found:
    """Through the SDK."""
    given, sampling = all_prompts(options), greedy(options.answer_tokens)
    async with AsyncClient(options.address) as client:
        return await clients(
            options, sdk_sender(client, lambda index: {"token_ids": given[index], "sampling": sampling})
        )


async def http(options: argparse.Namespace) -> Found:
    """Through a gateway."""
    requests = [http_request("x", completion_body(prompt, options.answer_tokens)) for prompt in all_prompts(options)]
    async with kept_http_sender(options.address, requests, options.streams) as send:
        return await clients(options, send)


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
