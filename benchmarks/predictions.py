"""How far predicted times are from measured ones at light, middle and heavy load: `python -m benchmarks.predictions`.

One prefill and one decode instance, of the bundled model and then emulated (`--engine` chooses). A closed loop first
teaches the conductor how fast the instances are, and says how many requests a second they can do at most; then requests
come in an open loop at a share of that rate. Emulated speed is disturbed, so that predicting is not reading the pacer's
own numbers. The error of one request is |predicted / measured - 1|. TTFT and TPOT, the mean over an answer, are
predicted at its placement.

What nothing can foresee is measured beside: each round is sent twice, the second time with other tokens of the same
lengths at the same times. What the two differ by is the *noise*: no prediction has a smaller error but by luck. The
same is told of equal requests that are sent one after the other to an idle stack.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Progress, Row, bounded, run
from moonpool.base.bundled import model_dir
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateResult

CONTINUES = 0.3
"""Share of requests that begin with an earlier prompt."""
SPREAD = 0.6
"""Of the logarithm of a prompt's length."""
FIRST_TOKEN, TOKENS = 300, 3700
"""Prompts consist of these."""
LEVELS = {"light load": 0.3, "middle load": 0.5, "heavy load": 0.8}
"""Requests per second as a share of the closed loop's."""
LEAST_REQUESTS = 4
"""Of a round."""
LESSONS = 24
AT_ONCE = 6
"""Clients of the closed loop."""
ALONE = 9
"""Requests of one length, one after the other."""
FIGURES = ("TTFT", "TPOT")
ENGINES = ("real", "emulated:llama-70b-a800")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        prompt_tokens: median of new tokens of a prompt; `most_tokens` it has at most.
        answer_tokens: least and most tokens of an answer.
        block_size: of the stack.
        wanted: median error wanted at most.
    """

    prompt_tokens: int
    most_tokens: int
    answer_tokens: tuple[int, int]
    block_size: int
    wanted: float


REAL = Load(300, 1400, (8, 40), 64, 0.15)
EMULATED = Load(1000, 6000, (4, 16), 512, 0.10)


@dataclass(frozen=True, slots=True)
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
        prompt = [*earlier, *(_token(drawn.randrange(TOKENS)) for _ in range(count))][: self.load.most_tokens]
        self._prompts.append(prompt)
        return prompt

    def alone(self, count: int) -> list[Asked]:
        """Requests of equal lengths and without anything in common, each to be sent when the one before is over."""
        prompts = [
            [_token(self._random.randrange(TOKENS)) for _ in range(self.load.prompt_tokens)] for _ in range(count)
        ]
        return [Asked(0.0, prompt, self.load.answer_tokens[1]) for prompt in prompts]


def again(asked: Sequence[Asked]) -> list[Asked]:
    """The same requests at the same times with other tokens: what began alike still does, and nothing is cached."""
    return [replace(request, prompt=[_token(token - FIRST_TOKEN + 1) for token in request.prompt]) for request in asked]


def _token(number: int) -> int:
    return FIRST_TOKEN + number % TOKENS


class Pair(NamedTuple):
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
        "TTFT": [Pair(result.placement.predicted_ttft_s, result.timing.ttft_s) for result in results],
        "TPOT": [
            Pair(result.placement.predicted_tpot_s, result.timing.tpot_s)
            for result in results
            if result.timing.tpot_s > 0
        ],
    }


async def open_loop(address: str, asked: Sequence[Asked]) -> list[GenerateResult]:
    """Send each request when it is due, whatever the others do."""
    async with AsyncClient(address) as client:
        began = asyncio.get_running_loop().time()

        async def send(request: Asked) -> GenerateResult:
            await asyncio.sleep(request.at + began - asyncio.get_running_loop().time())
            return await _generate(client, request)

        return await asyncio.gather(*map(send, asked))


async def closed_loop(address: str, asked: Sequence[Asked]) -> float:
    """Send each request when one of a few clients is free; return requests per second of the second half."""
    ends: list[float] = []
    waiting = iter(asked)
    async with AsyncClient(address) as client:

        async def worker() -> None:
            for request in waiting:
                await _generate(client, request)
                ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    half = len(ends) // 2
    return (len(ends) - 1 - half) / (ends[-1] - ends[half])


async def _generate(client: AsyncClient, request: Asked) -> GenerateResult:
    sampling = SamplingParams(max_tokens=request.answer, temperature=0.0, ignore_eos=True)
    return await client.generate(token_ids=request.prompt, sampling=sampling)


Figures = dict[str, list[Pair]]


class Round(NamedTuple):
    """A round that was sent twice: the pairs of both by figure, and by how much times differ that should be equal."""

    pairs: Figures
    noise: dict[str, float]


Measured = dict[str, list[Round]]
"""By level, then one round after the other."""


def rounds(address: str, load: Load, options: argparse.Namespace, progress: Progress) -> Measured:
    """Rounds of all levels in turn, so that what else the machine does falls on all of them."""
    lessons, requests = Requests(load, options.seed), Requests(load, options.seed + 1)
    capacity = asyncio.run(closed_loop(address, list(lessons.take(LESSONS, 1.0))))
    progress(f"seed {options.seed}; {capacity:.2f} requests/s in a closed loop of {AT_ONCE}")
    found: Measured = {level: [] for level in LEVELS}
    for number, (level, share) in itertools.product(range(options.runs), LEVELS.items()):
        rate = share * capacity
        asked = list(requests.take(max(LEAST_REQUESTS, round(rate * options.seconds)), rate))
        first, second = (pairs(asyncio.run(open_loop(address, requests))) for requests in (asked, again(asked)))
        found[level].append(twice(first, second))
        progress(f"round {number + 1} of {options.runs}, {level}: {told(found[level][-1])}")
    return found


def alone(address: str, load: Load, options: argparse.Namespace) -> dict[str, float]:
    """The noise of equal requests on an idle stack."""
    asked = Requests(load, options.seed + 2).alone(ALONE)
    found = pairs([asyncio.run(open_loop(address, [request]))[0] for request in asked])
    return {figure: distance([pair.measured_s for pair in found[figure]]) for figure in FIGURES}


def twice(first: Figures, other: Figures) -> Round:
    """What a round has told that was sent twice.

    The logarithm of the ratio of two equally noisy times spreads by sqrt(2) more than that of each.
    """
    noise = {
        figure: math.expm1(
            statistics.median(
                abs(math.log(a.measured_s / b.measured_s)) for a, b in zip(first[figure], other[figure], strict=True)
            )
            / math.sqrt(2)
        )
        for figure in FIGURES
    }
    return Round({figure: first[figure] + other[figure] for figure in FIGURES}, noise)


def distance(values: Sequence[float]) -> float:
    """Median distance of some times from their median, as a share of it."""
    median = statistics.median(values)
    return statistics.median(abs(value / median - 1.0) for value in values)


def told(found: Round) -> str:
    """A round in words."""
    return ", ".join(
        f"{figure} {median_error(found.pairs[figure]):.1%} (noise {found.noise[figure]:.1%})" for figure in FIGURES
    )


def median_error(found: Sequence[Pair]) -> float:
    """Median error of some requests."""
    return statistics.median(pair.error for pair in found)


def rows(engine: str, found: Measured, idle: Mapping[str, float], wanted: float) -> list[Row]:
    """Rows per figure and level: the median over the rounds of their median errors, in percent, and of the noise."""
    found_rows: list[Row] = []
    for figure in FIGURES:
        for level, rounds in found.items():
            errors = [100 * median_error(done.pairs[figure]) for done in rounds]
            noise = [100 * done.noise[figure] for done in rounds]
            found_rows.append(_row(f"{engine}: {figure}, {level}: median error of the prediction", errors, wanted))
            found_rows.append(replace(_row(f"{engine}: {figure}, {level}: noise", noise, wanted), target=None))
        found_rows.append(replace(_row(f"{engine}: {figure}, idle: noise", [100 * idle[figure]], wanted), target=None))
    return found_rows


def _row(name: str, percents: Sequence[float], wanted: float) -> Row:
    return bounded(name, "%", percents, "wanted at most", 100 * wanted)


def plan_of(engine: str, options: argparse.Namespace, load: Load, folder: Path) -> StackPlan:
    """The stack that is measured."""
    extra: dict[str, Sequence[str]] = {}
    if engine != "real":
        noise = [
            "--set",
            f"emulated_jitter={options.jitter:g}",
            "--set",
            f"emulated_speed_error={options.speed_error:g}",
        ]
        noise += ["--set", f"emulated_seed={options.seed}"]
        extra = {"prefill": noise, "decode": noise}
    return StackPlan(
        str(model_dir()),
        folder,
        engine=engine,
        time_scale=options.time_scale if engine != "real" else 0.0,
        block_size=load.block_size,
        log_level="warning",
        core_page=folder / "cores",  # other stacks of this user lend it none
        extra=extra,
    )


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    found_rows: list[Row] = []
    for engine in options.engine.split(","):
        load = REAL if engine == "real" else EMULATED
        with tempfile.TemporaryDirectory() as folder, LocalStack(plan_of(engine, options, load, Path(folder))) as stack:
            found = rounds(stack.address, load, options, progress)
            idle = alone(stack.address, load, options)
        found_rows += rows(engine, found, idle, load.wanted)
    return found_rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engine", default=",".join(ENGINES), help=f"some of real and emulated:PROFILE (default {','.join(ENGINES)})")
    add("--time-scale", type=float, default=0.0, help="emulated seconds that pass in one second; 0 = the profile's own")
    add("--jitter", type=float, default=0.1, help="of emulated steps, as a share (default 0.1)")
    add("--speed-error", type=float, default=0.5, help="hidden error of the emulated speed, as a share (default 0.5)")
    add("--seconds", type=float, default=2.5, help="in which a round's requests come, four at least (default 2.5)")
    add("--seed", type=int, default=1, help="of prompts and times (default 1)")


if __name__ == "__main__":
    run("predictions", measure, flags=flags)
