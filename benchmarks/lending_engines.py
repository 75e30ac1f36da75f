"""Engines with lent cores, with all cores and with one, without services around them: rows of `benchmarks.lending`.

Each engine is given one step after the other, so it computes all the time. One that shares a page with an engine that
idles stands beside one that has all cores; two that compute at once stand beside two with half of the cores each; and
two threads beside one.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Progress, Row, paired
from moonpool.base.checkpoint import kv_layout
from moonpool.base.checkpoint.formats import load_config
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.executor import start_engine
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec

PROMPT, CHUNK, CONTEXT, RUN = 2048, 512, 128, 64
"""Tokens of a prompt, of each of its steps, of a sequence when its run begins, and of the run."""
BLOCK = 64
ALONE_TARGET, SUM_TARGET, THREADS_TARGET = 0.95, 0.95, 1.0


class Kind(NamedTuple):
    """An engine: its threads (0 = as many cores as it is lent), and which one of those that have as many."""

    threads: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine does, again and again.

    Attributes:
        batch: sequences that get `RUN` tokens each; 0 = a prompt is computed.
    """

    batch: int

    def __str__(self) -> str:
        return f"decode, batch {self.batch}" if self.batch else f"prefill, {PROMPT} tokens"

    @property
    def tokens(self) -> int:
        """That count."""
        return self.batch * RUN or PROMPT

    def steps(self) -> Iterator[Step]:
        """Its steps, not numbered yet. What lies in the blocks does not matter."""
        if self.batch:
            size = -(-(CONTEXT + RUN) // BLOCK)
            tables = [tuple(range(size * n, size * (n + 1))) for n in range(self.batch)]
            last = (SequenceStep(bytes(4), CONTEXT - 1, table, SampleSpec()) for table in tables)
            yield Step(0, tuple(last), steps=RUN)
            return
        table = tuple(range(PROMPT // BLOCK))
        for start in range(0, PROMPT, CHUNK):
            sample = SampleSpec() if start + CHUNK == PROMPT else None
            yield Step(0, (SequenceStep(bytes(4 * CHUNK), start, table, sample),))


PREFILL, DECODE = Work(0), (Work(1), Work(8))
BLOCKS = max(PROMPT // BLOCK, DECODE[-1].batch * -(-(CONTEXT + RUN) // BLOCK))


@dataclass(slots=True)
class Driven:
    """An engine, and the numbers of its steps."""

    engine: Engine
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def does(self, work: Work) -> int:
        """Does some work once; the tokens that count."""
        for step in work.steps():
            await self.engine.run(replace(step, step_id=next(self.numbers)))
        return work.tokens


Busy = tuple[tuple[Kind, Work], ...]
"""Engines that compute at once, and what they do."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row: tokens per second of all its engines together.

    Engines that do different work are added up as shares of what the others' engines have at that work.
    """

    name: str
    ours: Busy
    beside: str
    theirs: Busy
    target: float

    def row(self, model: str, rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Row:
        """From the rates of our engines and of theirs, round by round."""
        name = f"{model}, {self.name}"
        if len({work for _, work in self.ours}) == 1:
            sums = [(sum(ours), sum(theirs)) for ours, theirs in rounds]
            return paired(name, "tokens/s", sums, self.beside, target=self.target)
        shares = [(sum(map(_share, ours, theirs)), float(len(self.ours))) for ours, theirs in rounds]
        return paired(name, "of its rate there, sum", shares, self.beside, target=self.target)


def _share(own: float, other: float) -> float:
    return own / other


def comparisons(cores: int) -> tuple[Comparison, ...]:
    """Those of lent cores."""
    (one, two), half, every = (Kind(0), Kind(0, 1)), cores // 2, Kind(cores)
    halves, fixed = (Kind(half), Kind(half, 1)), "half of the cores each"
    found = [
        Comparison(f"{it}, one engine busy, cores lent", ((one, it),), "all cores", ((every, it),), ALONE_TARGET)
        for it in (PREFILL, *DECODE)
    ]
    for pair, name in (
        ((PREFILL, PREFILL), f"{PREFILL}, two engines busy"),
        ((DECODE[-1], DECODE[-1]), f"{DECODE[-1]}, two engines busy"),
        ((PREFILL, DECODE[-1]), f"one engine busy with prefill, one with {DECODE[-1]}"),
    ):
        ours, theirs = tuple(zip((one, two), pair, strict=True)), tuple(zip(halves, pair, strict=True))
        found.append(Comparison(f"{name}, cores lent", ours, fixed, theirs, SUM_TARGET))
    return tuple(found)


def threads_compared() -> tuple[Comparison, ...]:
    """Two threads beside one, in an engine alone."""
    return tuple(
        Comparison(f"{it}, alone, two threads", ((Kind(2), it),), "one thread", ((Kind(1), it),), THREADS_TARGET)
        for it in (PREFILL, *DECODE)
    )


async def rates(engines: Mapping[Kind, Driven], busy: Busy, seconds: float) -> list[float]:
    """Tokens per second of engines that compute at once: each goes on until the last one was counted.

    Raises:
        ExceptionGroup: an engine has died.
    """
    clock, counting = asyncio.get_running_loop().time, len(busy)

    async def one(engine: Driven, work: Work) -> float:
        nonlocal counting
        begin = clock()
        tokens = await engine.does(work)
        while clock() < begin + seconds:
            tokens += await engine.does(work)
        rate = tokens / (clock() - begin)
        counting -= 1
        while counting:
            await engine.does(work)
        return rate

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(engines[kind], work)) for kind, work in busy]
    return [task.result() for task in tasks]


async def compared(model: Path, rows: Sequence[Comparison], runs: int, seconds: float, progress: Progress) -> list[Row]:
    """The rows of a model; in each run what is compared follows each other, so many seconds each."""
    layout = kv_layout(load_config(model), "bfloat16", BLOCK)
    spec = EngineSpec(str(model), "bfloat16", layout, BLOCKS, measure=False)
    sides = [side for it in rows for side in (it.ours, it.theirs)]
    rounds: list[list[tuple[list[float], list[float]]]] = [[] for _ in rows]
    engines: dict[Kind, Driven] = {}
    async with AsyncExitStack() as stack:
        page = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "page")
        for kind in dict.fromkeys(kind for side in sides for kind, _ in side):
            its = replace(spec, threads=kind.threads, core_page="" if kind.threads else page)
            engines[kind] = Driven(await stack.enter_async_context(start_engine(its)))
        for kind, work in dict.fromkeys(it for side in sides for it in side):
            await engines[kind].does(work)  # memory and code are touched for the first time
        for number in range(runs):
            for row, found in zip(rows, rounds, strict=True):
                ours, theirs = [await rates(engines, side, seconds) for side in (row.ours, row.theirs)]
                found.append((ours, theirs))
            progress(f"{model.name}: engines alone and together, run {number + 1} of {runs}")
    return [row.row(model.name, found) for row, found in zip(rows, rounds, strict=True)]


def engine_rows(models: Sequence[Path], runs: int, seconds: float, progress: Progress) -> list[Row]:
    """Those of lent cores of the first model, and of threads of all."""
    found: list[Row] = []
    for number, model in enumerate(models):
        lent = () if number else comparisons(len(os.sched_getaffinity(0)))
        found += asyncio.run(compared(model, (*lent, *threads_compared()), runs, seconds, progress))
    return found
