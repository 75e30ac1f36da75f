"""How far predicted times are from measured ones at light, middle and heavy load: `python -m benchmarks.predictions`.

One instance of each kind. A closed loop first teaches the conductor how fast the instances are, and says how many
requests a second they can do at most; then requests come in an open loop at a share of that rate. `--engine
emulated:PROFILE` disturbs the emulated speed, so that predicting is not reading the pacer's own numbers. The error of
one request is |predicted / measured - 1|; TTFT is predicted at its placement, the time between tokens when decode
promises room, TPOT is its mean over the answer. `--picture FILE.svg` has one dot per request.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.frame import Progress, Row, bounded, run
from benchmarks.predictions_picture import Dots, picture
from moonpool.bundled import model_dir
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateResult, SamplingParams

LEVELS = {"light load": 0.3, "middle load": 0.5, "heavy load": 0.8}
"""Requests per second as a share of the closed loop's."""
LEAST_REQUESTS = 4
"""Of a round."""
LESSONS = 24
AT_ONCE = 6
"""Clients of the closed loop."""
CONTINUES = 0.3
"""Share of requests that begin with an earlier prompt."""
SPREAD = 0.6
"""Of the logarithm of a prompt's length."""
ORDINARY_TOKENS = (300, 4000)
FIGURES = ("TTFT", "TPOT")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        prompt_tokens: median of new tokens of a prompt; `most_tokens` it has at most.
        answer_tokens: least and most tokens of an answer.
        block_tokens: of the stack.
        wanted: median error wanted at most.
    """

    prompt_tokens: int
    most_tokens: int
    answer_tokens: tuple[int, int]
    block_tokens: int
    wanted: float


REAL = Load(300, 1400, (8, 40), 64, 0.15)
EMULATED = Load(1000, 6000, (4, 16), 512, 0.10)


@dataclass(slots=True)
class Asked:
    """A request: seconds since its round began, its prompt and the length of its answer."""

    at: float
    prompt: Sequence[int]
    answer: int


@dataclass(slots=True)
class Requests:
    """Requests without an end; equal seeds give equal ones."""

    load: Load
    seed: int
    _random: random.Random = field(init=False)
    _prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"moonpool predictions {self.seed}")

    def take(self, count: int, rate: float) -> Iterator[Asked]:
        """The next ones, so many per second on the average."""
        at = 0.0
        for _ in range(count):
            yield Asked(at, self._prompt(), self._random.randint(*self.load.answer_tokens))
            at += self._random.expovariate(rate)

    def _prompt(self) -> list[int]:
        drawn = self._random
        earlier = drawn.choice(self._prompts) if self._prompts and drawn.random() < CONTINUES else []
        count = max(16, round(self.load.prompt_tokens * drawn.lognormvariate(0.0, SPREAD)))
        prompt = [*earlier, *(drawn.randrange(*ORDINARY_TOKENS) for _ in range(count))][: self.load.most_tokens]
        self._prompts.append(prompt)
        return prompt


@dataclass(frozen=True, slots=True)
class Pair:
    """A predicted and a measured time, seconds."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return abs(self.predicted_s / self.measured_s - 1.0)


def pairs(results: Sequence[GenerateResult]) -> dict[str, list[Pair]]:
    """Predicted and measured times by figure."""
    return {
        "TTFT": [Pair(it.placement.predicted_ttft_s, it.timing.ttft_s) for it in results],
        "TPOT": [Pair(it.placement.predicted_tbt_s, it.timing.tpot_s) for it in results if it.timing.tpot_s > 0],
    }


async def open_loop(address: str, asked: Sequence[Asked]) -> list[GenerateResult]:
    """Sends each request when it is due, whatever the others do."""
    async with AsyncClient(address) as client:
        began = asyncio.get_running_loop().time()

        async def one(it: Asked) -> GenerateResult:
            await asyncio.sleep(it.at + began - asyncio.get_running_loop().time())
            return await _generate(client, it)

        return await asyncio.gather(*map(one, asked))


async def closed_loop(address: str, asked: Sequence[Asked]) -> float:
    """Sends each request when one of a few clients is free; returns requests per second of the second half."""
    ends: list[float] = []
    waiting = iter(asked)
    async with AsyncClient(address) as client:

        async def worker() -> None:
            for it in waiting:
                await _generate(client, it)
                ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    half = len(ends) // 2
    return (len(ends) - 1 - half) / (ends[-1] - ends[half])


async def _generate(client: AsyncClient, it: Asked) -> GenerateResult:
    sampling = SamplingParams(max_tokens=it.answer, temperature=0.0, ignore_eos=True)
    return await client.generate(token_ids=it.prompt, sampling=sampling)


Measured = dict[str, list[dict[str, list[Pair]]]]
"""By level, then one round after the other: pairs by figure."""


def rounds(address: str, load: Load, options: argparse.Namespace, progress: Progress) -> Measured:
    """Rounds of all levels in turn, so that what else the machine does falls on all of them."""
    requests = Requests(load, options.seed)
    capacity = asyncio.run(closed_loop(address, list(requests.take(LESSONS, 1.0))))
    progress(f"seed {options.seed}; {capacity:.2f} requests/s in a closed loop of {AT_ONCE}")
    found: Measured = {level: [] for level in LEVELS}
    for number, (level, share) in itertools.product(range(options.runs), LEVELS.items()):
        rate = share * capacity
        asked = list(requests.take(max(LEAST_REQUESTS, round(rate * options.seconds)), rate))
        found[level].append(pairs(asyncio.run(open_loop(address, asked))))
        errors = ", ".join(f"{name} {median_error(it):.1%}" for name, it in found[level][-1].items())
        progress(f"round {number + 1} of {options.runs}, {level}: {errors}")
    return found


def median_error(found: Sequence[Pair]) -> float:
    """Median error of some requests."""
    return statistics.median(pair.error for pair in found)


def rows(found: Measured, wanted: float) -> list[Row]:
    """A row per figure and level: the median over the rounds of their median errors, in percent."""
    return [
        bounded(
            f"{figure}, {level}: median error of the prediction",
            "%",
            [100 * median_error(it[figure]) for it in each],
            "wanted at most",
            100 * wanted,
        )
        for figure in FIGURES
        for level, each in found.items()
    ]


def dots(found: Measured, figure: str) -> Dots:
    """All requests of all rounds, by level."""
    return {
        level: [(pair.predicted_s, pair.measured_s) for it in each for pair in it[figure]]
        for level, each in found.items()
    }


def plan_of(options: argparse.Namespace, load: Load, folder: Path) -> StackPlan:
    """The stack that is measured."""
    extra: dict[str, Sequence[str]] = {}
    if options.engine != "real":
        noise = ["--emulated-jitter", f"{options.jitter:g}", "--emulated-speed-error", f"{options.speed_error:g}"]
        noise += ["--emulated-seed", str(options.seed)]
        extra = {"prefill": noise, "decode": noise}
    return StackPlan(
        str(model_dir()),
        folder,
        engine=options.engine,
        time_scale=options.time_scale,
        block_tokens=load.block_tokens,
        log_level="warning",
        extra=extra,
    )


def picture_path(options: argparse.Namespace) -> Path | None:
    """Where the picture goes: the flag, or beside the results, or nowhere."""
    chosen: Path | None = options.picture
    out: Path | None = options.out
    return out.with_suffix(".svg") if chosen is None and out is not None else chosen


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows; writes the picture."""
    load = REAL if options.engine == "real" else EMULATED
    with tempfile.TemporaryDirectory() as folder, LocalStack(plan_of(options, load, Path(folder))) as stack:
        found = rounds(stack.address, load, options, progress)
    path = picture_path(options)
    if path is not None:
        panels = {figure: dots(found, figure) for figure in FIGURES}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture(f"Predicted and measured, {options.engine}", panels, load.wanted), encoding="utf-8")
    return rows(found, load.wanted)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engine", default="real", help="real, or emulated:PROFILE (default real)")
    add("--time-scale", type=float, default=0.0, help="emulated seconds that pass in one second; 0 = the profile's own")
    add("--jitter", type=float, default=0.1, help="of emulated steps, as a share (default 0.1)")
    add("--speed-error", type=float, default=0.5, help="hidden error of the emulated speed, as a share (default 0.5)")
    add("--seconds", type=float, default=2.5, help="in which a round's requests come, four at least (default 2.5)")
    add("--seed", type=int, default=1, help="of prompts and times (default 1)")
    add("--picture", type=Path, help="SVG file, one dot per request (default: beside --out)")


if __name__ == "__main__":
    run("predictions", measure, flags=flags)
