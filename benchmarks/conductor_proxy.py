"""Requests and tokens through a whole conductor process, between a client and engines that compute nothing.

Rates are per second of the conductor's own processor time: client and engines share the machine with the conductor.
"""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.frame import Progress, Row, paired
from benchmarks.processes import Child, child
from moonpool.base.bundled import model_dir
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient

PROMPT_TOKENS = 512
SHORT, LONG = 2, 256
"""Output tokens of requests by which requests, and tokens, are counted."""
AT_ONCE = 32
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Rates:
    """One load: requests per second of the conductor's processor time, and per second."""

    per_cpu_s: float
    per_s: float


async def load(address: str, conductor: Child, requests: int, at_once: int, output: int) -> Rates:
    """Send so many requests, `at_once` at a time.

    Raises:
        RuntimeError: an answer has the wrong length.
    """
    waiting = iter(range(requests))
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    async with AsyncClient(address) as client:

        async def one_after_the_other() -> None:
            for number in waiting:
                prompt = [(number * 31 + at * 7) % 1000 + 300 for at in range(PROMPT_TOKENS)]
                stream = client.stream(token_ids=prompt, sampling=sampling)
                count = sum([len(event.token_ids) async for event in stream])
                if count != output:
                    raise RuntimeError(f"{count} tokens came instead of {output}")

        begin, cpu = time.perf_counter(), conductor.cpu_s()
        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return Rates(requests / (conductor.cpu_s() - cpu), requests / (time.perf_counter() - begin))


def measure_proxy(runs: int, requests: int, progress: Progress) -> list[Row]:
    """Rows for requests and for tokens, beside the same with one request at a time."""
    short: list[tuple[float, float]] = []
    long: list[tuple[float, float]] = []
    arguments = ("--model", str(model_dir()), "--listen", "127.0.0.1:0", "--log-level", "warning")
    with (
        child("moonpool.conductor", *arguments) as conductor,
        child("benchmarks.conductor_engines", "--conductor", conductor.address),
    ):
        for output, results in ((SHORT, short), (LONG, long)):
            count = requests if output == SHORT else max(requests // 4, AT_ONCE)
            asyncio.run(load(conductor.address, conductor, WARM_UP, 1, output))
            for number in range(runs):
                many = asyncio.run(load(conductor.address, conductor, count, AT_ONCE, output))
                single = asyncio.run(load(conductor.address, conductor, count // 8, 1, output))
                results.append((output * many.per_cpu_s, output * single.per_cpu_s))
                progress(f"{output} tokens, run {number + 1} of {runs}: {many.per_s:.0f} requests/s in all")
    where = f"{AT_ONCE} at once through a conductor, per second of its processor time"
    return [
        paired(
            f"requests of {PROMPT_TOKENS} + {SHORT} tokens, {where}",
            "1/s",
            [(many / SHORT, single / SHORT) for many, single in short],
            "one at a time",
        ),
        paired(f"tokens of answers of {LONG}, {where}", "tokens/s", long, "one at a time"),
    ]
