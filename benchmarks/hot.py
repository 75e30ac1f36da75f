"""Hot prefixes on a running stack, spread by loading and copies, beside none of both: `python -m benchmarks.hot`.

Most prompts begin with one of ten prefixes, the others are as long and their own. They come at random times, the same
in both stacks. Compute is emulated: eight prefill instances, no kvstore. So what a prefix costs is the profile's time,
or the time on the links, and where prompts go is the conductor's decision. 20 per second keep an instance busy for
seven tenths of its time that alone has two of the prefixes (1.9 prompts per second each, 0.15 s) and its part of the
other prompts (a second each); behind one of these a hot prompt waits, or is computed elsewhere. With half of that a
prompt hardly ever waits, and nothing needs to spread. There must be many: the other prompts are 5 %, and with the first
ones of each prefix soon a tenth, of which the p90 tells then.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulated import grown, late, lateness
from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.bundled import model_dir
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import GaugeReading, wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateResult

ORDINARY_TOKENS = (300, 4000)
BESIDE = "no peers, no copies"
SPREAD: Sequence[str] = ()
ALONE = ("--set", "peers=false", "--set", "copy_share=0")
"""Flags of the conductor in the two stacks."""
REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, arrival in profile seconds, and whether the prompt begins with a hot prefix."""

    at_s: float
    prompt: list[int]
    hot: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: profile seconds, and the share of prompt tokens not computed.

    `hot_p90_s` is of the prompts that begin with a hot prefix. `loaded` and `copied` count blocks that prefill
    instances have read from others, for prompts and by order; `late` is the per cent of the steps' time by which the
    machine was late.
    """

    ttft_s: float
    ttft_p90_s: float
    cached: float
    hot_p90_s: float = 0.0
    loaded: float = 0.0
    copied: float = 0.0
    late: float = 0.0

    @property
    def told(self) -> str:
        """For people."""
        blocks = f"{self.loaded:.0f} blocks loaded, {self.copied:.0f} copied"
        ttft = f"p90 of TTFT {self.ttft_p90_s:.4f} s, of hot prompts {self.hot_p90_s:.4f} s"
        return f"{ttft}, {self.cached:.1%} cached, {blocks}, late by {self.late:.1f} %"


def arrivals(options: argparse.Namespace, number: int) -> list[Asked]:
    """What comes in a run, in seconds of the profile; equal seeds give equal ones."""
    drawn, now = random.Random(f"moonpool hot {options.seed} {number}"), 0.0

    def some(count: int) -> list[int]:
        return [drawn.randrange(*ORDINARY_TOKENS) for _ in range(count)]

    prefixes = [some(options.prefix_tokens) for _ in range(options.prefixes)]
    found = []
    for _ in range(options.requests):
        now += drawn.expovariate(options.rate)
        hot = drawn.random() < options.share
        prefix = drawn.choice(prefixes) if hot else some(options.prefix_tokens)
        found.append(Asked(now, [*prefix, *some(options.question_tokens)], hot))
    return found


async def serve(address: str, asked: Sequence[Asked], scale: float) -> list[GenerateResult]:
    """Sends all prompts when due; `scale` profile seconds pass in one."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    loop = asyncio.get_running_loop()
    async with AsyncClient(address) as client:
        begun = loop.time()

        async def ask(one: Asked) -> GenerateResult:
            await asyncio.sleep(begun + one.at_s / scale - loop.time())
            return await client.generate(token_ids=one.prompt, sampling=sampling)

        return await asyncio.gather(*map(ask, asked))


def p90(seconds: Iterable[float]) -> float:
    """The least value that nine tenths are not above."""
    ordered = sorted(seconds)
    return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def figures(
    asked: Sequence[Asked],
    results: Sequence[GenerateResult],
    before: Sequence[GaugeReading],
    after: Sequence[GaugeReading],
    scale: float,
) -> Figures:
    """Of all requests, and of the gauges before and after them; `scale` seconds have passed in one."""
    ttft_s = [scale * result.timing.ttft_s for result in results]
    prompt = sum(result.usage.prompt_tokens for result in results)
    return Figures(
        statistics.median(ttft_s),
        p90(ttft_s),
        sum(result.usage.cached_tokens for result in results) / prompt,
        p90(seconds for one, seconds in zip(asked, ttft_s, strict=True) if one.hot),
        grown("loaded_blocks_total", before, after),
        grown("copied_blocks_total", before, after),
        late(before, after),
    )


def one_run(options: argparse.Namespace, number: int, conductor: Sequence[str]) -> Figures:
    """A fresh stack that gets a run's prompts."""
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            str(model_dir()),
            Path(folder),
            engine=options.engine,
            time_scale=options.time_scale,
            prefill=options.prefill,
            kvstore=0,
            log_level="warning",
            extra={"conductor": list(conductor)},
        )
        with LocalStack(plan) as stack:
            before = wait_at_rest(stack.address, REST_S)
            asked = arrivals(options, number)
            results = asyncio.run(serve(stack.address, asked, options.time_scale))
            return figures(asked, results, before, wait_at_rest(stack.address, REST_S), options.time_scale)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    pairs = []
    for number in range(options.runs):
        ours, beside = one_run(options, number, SPREAD), one_run(options, number, ALONE)
        pairs.append((ours, beside))
        progress(f"run {number + 1} of {options.runs}: {ours.told}")
        progress(f"run {number + 1} of {options.runs}, {BESIDE}: {beside.told}")
    return list(rows(pairs))


def rows(pairs: Sequence[tuple[Figures, Figures]]) -> Iterator[Row]:
    """A row per figure."""
    names: Mapping[str, str] = {
        "ttft_s": "TTFT, median",
        "ttft_p90_s": "TTFT, p90",
        "hot_p90_s": "TTFT of hot prompts, p90",
    }
    for key, name in names.items():
        runs = [(1e3 * getattr(ours, key), 1e3 * getattr(beside, key)) for ours, beside in pairs]
        yield paired(name, "ms", runs, BESIDE, less_is_better=True)
    shares = [(100 * ours.cached, 100 * beside.cached) for ours, beside in pairs]
    yield paired("prompt tokens not computed", "%", shares, BESIDE)
    yield lateness([max(ours.late, beside.late) for ours, beside in pairs])


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engine", default="emulated:llama-70b-a800", help="real, or emulated:PROFILE (default %(default)s)")
    add("--time-scale", type=float, default=1.0, help="seconds of the profile that pass in one second (default 1)")
    add("--prefill", type=int, default=8, help="instances (default 8)")
    add("--requests", type=int, default=1500, help="in a run (default 1500)")
    add("--rate", type=float, default=20.0, help="of them per second of the profile, Poisson (default 20)")
    add("--prefixes", type=int, default=10, help="hot ones (default 10)")
    add("--prefix-tokens", type=int, default=8192, help="of each (default 8192)")
    add("--share", type=float, default=0.95, help="of the requests that begin with one (default 0.95)")
    add("--question-tokens", type=int, default=256, help="after the prefix (default 256)")
    add("--seed", type=int, default=1, help="of the prompts (default 1)")


if __name__ == "__main__":
    run("hot", measure, flags=flags)
