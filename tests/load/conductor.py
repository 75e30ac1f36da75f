"""Loads a conductor through the SDK: `python -m tests.load.conductor [--address HOST:PORT]`.

Without an address a local stack with the bundled model is started. Prompts share beginnings as conversations do: each
belongs to one of `--conversations`, whose common prefix is cached after its first turn.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from moonpool.bundled import model_dir
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, SamplingParams, Slo
from tests.load.frame import Outcome, Send, Summary, closed_loop, open_loop, poisson_arrivals, summarize


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="", help="conductor to load; default: a local stack of its own")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=8, help="first requests that do not count")
    parser.add_argument("--request-rate", type=float, default=0.0, help="open loop, requests per second (Poisson)")
    parser.add_argument("--max-concurrency", type=int, default=4, help="closed loop when no rate is given")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--shared-tokens", type=int, default=384, help="of these, common to a conversation")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--ttft-slo-s", type=float, default=math.inf)
    parser.add_argument("--tpot-slo-s", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


@contextlib.contextmanager
def target(address: str) -> Iterator[str]:
    """The conductor to load."""
    if address:
        yield address
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalStack(StackPlan(model=str(model_dir()), data_dir=Path(folder))) as stack,
    ):
        yield stack.address


def sender(client: AsyncClient, options: argparse.Namespace) -> Send:
    """What one request is; its tokens follow from the seed and its index."""
    slo = Slo(ttft_s=options.ttft_slo_s if math.isfinite(options.ttft_slo_s) else None)
    sampling = SamplingParams(max_tokens=options.output_tokens, temperature=0.0, ignore_eos=True)

    def tokens(count: int, *seed: object) -> list[int]:
        generator = random.Random(f"{options.seed}/{seed}")
        return [generator.randrange(16, 4000) for _ in range(count)]

    async def send(index: int, outcome: Outcome, clock: Callable[[], float]) -> None:
        shared = tokens(options.shared_tokens, "conversation", index % options.conversations)
        prompt = shared + tokens(options.prompt_tokens - options.shared_tokens, "turn", index)
        async for event in client.stream(token_ids=prompt, sampling=sampling, slo=slo):
            if event.token_ids and outcome.first is None:
                outcome.first = clock()
            outcome.tokens += len(event.token_ids)

    return send


async def load(address: str, options: argparse.Namespace) -> Summary:
    """Runs the load and sums it up."""
    async with AsyncClient(address) as client:
        send = sender(client, options)
        if options.request_rate > 0:
            arrivals = poisson_arrivals(options.request_rate, options.requests, options.seed)
            outcomes = await open_loop(arrivals, send)
        else:
            outcomes = await closed_loop(options.max_concurrency, options.requests, send)
    return summarize(outcomes, warmup=options.warmup, ttft_slo_s=options.ttft_slo_s, tpot_slo_s=options.tpot_slo_s)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    options = parse(argv)
    with target(options.address) as address:
        summary = dataclasses.asdict(asyncio.run(load(address, options)))
    if options.json:
        print(json.dumps(summary, indent=2))
        return
    print(f"seed {options.seed}")
    for name, value in summary.items():
        print(f"{name:16} {value if not isinstance(value, float) else format(value, '.3f')}")


if __name__ == "__main__":
    main()
