"""Prefill and decode through all four services, beside other engines for CPUs: `python -m benchmarks.engine`.

`--model` takes shapes of `moonpool model create`, which get random weights, or folders. All have all cores, and every
figure is from the first request's start to the last one's end: a prompt of 2,048 tokens and its first token; answers of
64 tokens to prompts of 128, in batches. Prompts are fresh in every run, so nothing is cached. In each run ours and the
peers' are measured one after the other. Peers are installed once, each into an environment of its own (`--peers`).
Beside them stand this machine's limits: its best matrix product, and for one sequence reading all weights once a token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import Absent, Progress, Row, Skipped, paired, run
from benchmarks.peers.engines import NAMES, Environment, Peer, running
from benchmarks.serving import checkpoint_of
from benchmarks.serving_limits import Limits, Span, measured_limits, rate, with_limit
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, SamplingParams

PROMPT, SHORT_PROMPT, OUTPUT = 2048, 128, 64
TARGETS = {1: 1.2, 8: 1.2, 32: 1.0}
"""Wanted of the best peer's decode, by batch."""
PREFILL_TARGET, ROOFLINE_TARGET = 1.0, 0.85
SEED = 1
GGUF = ("openvino", "llama_cpp")
"""Peers that read the model from such a file."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured: so many prompts of a length, sent together, with answers of so many tokens."""

    name: str
    batch: int
    prompt: int
    output: int
    target: float

    @property
    def counted(self) -> int:
        """Tokens that its rate counts: the prompt's where one is answered by one token, else the answers'."""
        return self.prompt if self.output == 1 else self.batch * self.output

    def prompts(self, generator: random.Random) -> list[list[int]]:
        """Random ordinary token ids."""
        return [[generator.randrange(300, 4000) for _ in range(self.prompt)] for _ in range(self.batch)]

    def limit(self, limits: Limits) -> tuple[str, float]:
        """The machine's limit and its name."""
        if self.output == 1:
            return "the best matrix product", limits.prompt_tokens_per_s
        return "reading all weights, or the best product", limits.decode_tokens_per_s(self.batch)


TASKS = (
    Task(f"prefill, {PROMPT} tokens", 1, PROMPT, 1, PREFILL_TARGET),
    *(
        Task(f"decode, batch {batch}, {SHORT_PROMPT} + {OUTPUT} tokens", batch, SHORT_PROMPT, OUTPUT, target)
        for batch, target in TARGETS.items()
    ),
)


async def through_services(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Span]:
    """All prompts sent together."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    clock = asyncio.get_running_loop().time
    async with AsyncClient(address) as client:

        async def one(prompt: Sequence[int]) -> Span:
            begin = clock()
            result = await client.generate(token_ids=list(prompt), sampling=sampling)
            return Span(begin, clock(), len(result.token_ids))

        return await asyncio.gather(*map(one, prompts))


class Beside:
    """Our stack and the peers, on one model."""

    def __init__(self, model: Path, stack: LocalStack, peers: Sequence[Peer], progress: Progress) -> None:
        self._model = model
        self._stack = stack
        self._peers = peers
        self._progress = progress
        self._random = random.Random(SEED)

    def rows(self, limits: Limits, runs: int) -> list[Row]:
        """A row per task and peer, and per task and limit."""
        rows: list[Row] = []
        for task in TASKS:
            figures = [self._measured(task, number, runs) for number in range(runs + 1)][1:]  # the first one warms up
            ours = [it[0] for it in figures]
            name = f"{self._model.name}, {task.name}"
            limit_name, limit = task.limit(limits)
            for at, peer in enumerate(self._peers, 1):
                pairs = [(it[0], it[at]) for it in figures]
                rows.append(with_limit(paired(name, "tokens/s", pairs, peer.version, target=task.target), limit))
            target = ROOFLINE_TARGET if task.batch == 1 and task.output > 1 else None
            rows.append(paired(name, "tokens/s", [(own, limit) for own in ours], limit_name, target=target))
        return rows

    def _measured(self, task: Task, number: int, runs: int) -> list[float]:
        """Tokens per second of ours, then of each peer."""
        prompts = task.prompts(self._random)
        spans = asyncio.run(through_services(self._stack.address, prompts, task.output))
        rates = [rate(spans) * task.counted / (task.batch * task.output)]
        rates += [task.counted / peer.answer(prompts, task.output)[0] for peer in self._peers]
        self._progress(f"{task.name}, run {number} of {runs}: {', '.join(f'{it:.1f}' for it in rates)} tokens/s")
        return rates


def gguf_of(model: Path, folder: Path) -> Path:
    """The same model as a GGUF file in float16, which is what its peers read without quantising."""
    from benchmarks.peers.gguf_files import write_gguf

    file = folder / f"{model.name}.gguf"
    if file.exists():  # another peer has read it
        return file
    kind = json.loads((model / "config.json").read_text())["model_type"]
    return write_gguf(kind, model, file, "F16", metadata={"general.file_type": 1})


def measured(
    model: Path, folder: Path, environment: Environment, options: argparse.Namespace, progress: Progress
) -> list[Row | Absent]:
    """The rows of one model."""
    limits = measured_limits(model)
    progress(f"{model.name}: {limits}")
    plan = StackPlan(model=str(model), data_dir=folder / f"{model.name}-data", dtype="bfloat16")
    absent: list[Row | Absent] = []
    with contextlib.ExitStack() as stack:
        peers = []
        for name in options.only.split(","):
            try:
                python = environment.python(name)
                file = gguf_of(model, folder) if name in GGUF else model
                peers.append(stack.enter_context(running(name, python, file, len(os.sched_getaffinity(0)))))
                progress(f"{model.name}: {peers[-1].version} is ready")
            except Skipped as reason:
                absent += [Absent(f"{model.name}, {task.name}", NAMES[name], str(reason)) for task in TASKS]
        ours = stack.enter_context(LocalStack(plan))
        return [*Beside(model, ours, peers, progress).rows(limits, options.runs), *absent]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    environment = Environment(options.peers, progress)
    rows: list[Row | Absent] = []
    for name in options.model.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(checkpoint_of(name, Path(folder)), Path(folder), environment, options, progress)
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default="small,qwen2.5-0.5b", help="shapes of `moonpool model create`, or folders, with commas")
    add("--only", default=",".join(NAMES), help=f"peers, with commas (default {','.join(NAMES)})")
    add("--peers", type=Path, default=Path(".peers"), help="folder of the peers' environments (default .peers)")


if __name__ == "__main__":
    run("engine", measure, flags=flags)
