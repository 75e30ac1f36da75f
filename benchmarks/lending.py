"""Time between tokens while prompts arrive, cores lent or half of them each: `python -m benchmarks.lending`.

A prefill and a decode instance on this host. So many sequences run; once all have begun, prompts of 2,048 fresh tokens
come one after the other, each when the one before has its first token. What counts are the gaps between the tokens of
the running sequences from then on, as their client sees them. In each run a stack whose engines have half of the cores
each (`--set core_share=0`) and one whose engines lend them are measured one after the other. `--picture FILE.svg` draws
all gaps of the last run over time, fixed and lent, in a file each. Five runs of 15 s take some five minutes.

Then come engines alone and two at once, without services (`benchmarks.lending_engines`): five runs take some three
minutes. `--only stacks` or `--only engines` leaves the other part out.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.frame import Progress, Row, Skipped, paired, run
from benchmarks.kvstore_picture import picture
from benchmarks.lending_engines import engine_rows
from benchmarks.serving import checkpoint_of, fresh_prompt
from moonpool.cli.load_generator.senders import greedy
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient

PROMPT, SHORT_PROMPT = 2048, 64
WAYS = ("fixed", "lent")
LONGEST = 3000
"""Tokens in a running answer, which is cancelled before the end."""


@dataclass(slots=True)
class Figures:
    """One stack's figures.

    Attributes:
        gaps: when each token of a running sequence came, seconds from the first prompt on, and how long after the one
            before.
        ttft_s: the prompts' TTFT.
        seconds: in which all of them came.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def percentile_ms(self, share: float) -> float:
        """Of the gaps."""
        ordered = sorted(gap for _, gap in self.gaps)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def gaps_of(times: Sequence[float], begin: float, end: float) -> list[tuple[float, float]]:
    """(seconds since `begin`, gap before it) of each token within [begin, end]."""
    pairs = itertools.pairwise(times)
    return [(later - begin, later - before) for before, later in pairs if begin <= later <= end]


async def observed(client: AsyncClient, sequences: int, seconds: float, generator: random.Random) -> Figures:
    """Lets sequences run, and sends prompts beside them for some seconds.

    Raises:
        ExceptionGroup: a sequence has failed.
    """
    clock, found = asyncio.get_running_loop().time, Figures()
    times: list[list[float]] = [[] for _ in range(sequences)]
    begun = [asyncio.Event() for _ in range(sequences)]

    async def runs(number: int, prompt: list[int]) -> None:
        async for event in client.stream(token_ids=prompt, sampling=greedy(LONGEST)):
            if event.token_ids:
                times[number].append(clock())
                begun[number].set()

    async with asyncio.TaskGroup() as group:
        prompts = [fresh_prompt(generator, SHORT_PROMPT) for _ in range(sequences)]
        tasks = [group.create_task(runs(number, prompt)) for number, prompt in enumerate(prompts)]
        await asyncio.gather(*(it.wait() for it in begun))
        await client.generate(token_ids=fresh_prompt(generator, PROMPT), sampling=greedy(1))  # warms up
        begin = clock()
        while clock() < begin + seconds:
            result = await client.generate(token_ids=fresh_prompt(generator, PROMPT), sampling=greedy(1))
            found.ttft_s.append(result.timing.ttft_s)
        end = clock()
        for task in tasks:
            task.cancel()
    found.gaps = sorted(gap for each in times for gap in gaps_of(each, begin, end))
    found.seconds = end - begin
    return found


async def beside(address: str, sequences: int, seconds: float, generator: random.Random) -> Figures:
    """The same at a stack."""
    async with AsyncClient(address) as client:
        return await observed(client, sequences, seconds, generator)


def measured(way: str, model: Path, folder: Path, options: argparse.Namespace, number: int) -> Figures:
    """One stack from start to end."""
    cores = len(os.sched_getaffinity(0))
    flags = ["--set", "core_share=0"] if way == "fixed" else []
    plan = StackPlan(
        str(model),
        folder / f"{way}-{number}",
        dtype="bfloat16",
        kvstore=0,
        threads=max(1, cores // 2) if way == "fixed" else 0,
        log_level="warning",
        extra={"prefill": flags, "decode": flags},
    )
    with LocalStack(plan) as stack:
        return asyncio.run(beside(stack.address, options.sequences, options.seconds, random.Random(number)))


def rows(model: str, options: argparse.Namespace, pairs: Sequence[tuple[Figures, Figures]]) -> list[Row]:
    """Lent beside fixed; `pairs` are (fixed, lent)."""
    what = f"{model}, TBT of {options.sequences} running sequences while prompts of {PROMPT} arrive, cores lent"
    found = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        runs = [(lent.percentile_ms(share), fixed.percentile_ms(share)) for fixed, lent in pairs]
        found.append(paired(f"{what}, {name}", "ms", runs, "half of the cores each", less_is_better=True))
    rates = [(PROMPT * len(lent.ttft_s) / lent.seconds, PROMPT * len(it.ttft_s) / it.seconds) for it, lent in pairs]
    found.append(paired(f"{model}, prompts of {PROMPT} beside them, cores lent", "tokens/s", rates, "half each"))
    return found


def draw(path: Path, pair: tuple[Figures, Figures]) -> None:
    """A picture for each way, both with the p99 of both."""
    lines = [(f"p99 {way}", it.percentile_ms(0.99)) for way, it in zip(WAYS, pair, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for way, figures in zip(WAYS, pair, strict=True):
        points = [(at, 1e3 * gap) for at, gap in figures.gaps]
        title = f"Time between tokens while prompts of {PROMPT} arrive, cores {way}"
        path.with_name(f"{path.stem}-{way}.svg").write_text(picture(title, "ms", points, lines), encoding="utf-8")


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows; draws the pictures."""
    if len(os.sched_getaffinity(0)) < 2:
        raise Skipped("one core cannot be shared by two engines")
    found, parts = list[Row](), options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint_of(options.model, Path(folder))
        if "stacks" in parts:
            found += stack_rows(model, Path(folder), options, progress)
        if "engines" in parts:
            models = dict.fromkeys((model, checkpoint_of("bundled", Path(folder))))
            found += engine_rows([*models], options.runs, options.engine_seconds, progress)
    return found


def stack_rows(model: Path, folder: Path, options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Of stacks; draws the pictures."""
    pairs = []
    for number in range(options.runs):
        fixed, lent = (measured(way, model, folder, options, number) for way in WAYS)
        pairs.append((fixed, lent))
        told = ", ".join(f"{way} {it.percentile_ms(0.99):.1f}" for way, it in zip(WAYS, (fixed, lent), strict=True))
        median = statistics.median(lent.ttft_s)
        progress(f"run {number + 1} of {options.runs}: TBT p99, ms: {told}; TTFT beside, lent: {median:.2f} s")
    path = options.picture or (options.out.with_suffix(".svg") if options.out else None)
    if path is not None:
        draw(path, pairs[-1])
    return rows(model.name, options, pairs)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default="small", help="bundled, a shape of `moonpool model create`, or a folder (default small)")
    add("--sequences", type=int, default=8, help="that run (default 8)")
    add("--seconds", type=float, default=15.0, help="in which prompts are sent, in each stack (default 15)")
    add("--only", default="stacks,engines", help="stacks, engines, or both with a comma (default both)")
    add("--engine-seconds", type=float, default=2.0, help="in which each engine is counted (default 2)")
    add("--picture", type=Path, help="FILE.svg: draws FILE-fixed.svg and FILE-lent.svg (default: beside --out)")


if __name__ == "__main__":
    run("lending", measure, flags=flags)
