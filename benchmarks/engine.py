"""Prefill and decode through all four services, beside other engines for CPUs: `python -m benchmarks.engine`.

`--model` takes shapes of `moonpool model create`, which get random weights, folders, GGUF files, and `smollm2`, the
trained one that `moonpool model fetch` has fetched. What quantised weights stand for is computed by all without
quantising, unless `--weights` says otherwise: "file" keeps the codes of GGUF files, and a type (Q4_0, Q4_1, Q8_0) first
writes the models in that type; then ours and the peers that read GGUF compute with the same file. `--dtype` takes one
or more; figures are wanted of bfloat16. All have all cores. Every figure is from the first request's start, to servers
and clients that are connected, to the last one's end: a prompt of 2,048 tokens and its first token; answers of 64
tokens to prompts of 128, in batches. Prompts are fresh in every run, so no KV is cached.
In each run ours and the peers' are measured one after the other. Peers are installed once, each into a separate
environment (`--peers`); vLLM by `make test-engines`. Beside them stand this machine's limits: its best matrix product,
and for one sequence reading all weights once a token, by the memory's speed just before each run. Greedy steps of few
sequences read the head as bytes (`moonpool.engine.kernels.int8_head`): so there is a second limit, of what they read.
Beside these limits count the tokens behind the first ones, in the time that whole answers take longer than answers of
one token.

Our decode guesses tokens as by default; `--speculative off` leaves that out.

`--device cuda` puts prefill and decode on a GPU, beside those of transformers, vLLM and SGLang that are there and the
GPU's own limits. Never run there.

Answers are greedy, and a row per peer says which share of its tokens is ours too, up to an answer's first other token:
behind it the two answer different texts. Sums that round differently change the choice where two tokens are nearly as
likely, soon in bfloat16 with random weights; with `--dtype float32` and `transformers` hardly ever.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.ceilings import Limits, Span, measured_limits, memory_now, rate, with_limit
from benchmarks.frame import Absent, Progress, Row, Skipped, paired, run, spread_of
from benchmarks.peers.engines import NAMES, Environment, Peer, running
from benchmarks.serving import checkpoint_of
from moonpool.base.checkpoint import inspect_checkpoint
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient

PROMPT, SHORT_PROMPT, OUTPUT = 2048, 128, 64
TARGETS = {1: 1.2, 8: 1.2, 32: 1.0}
"""Wanted of the best peer's decode, by batch."""
PREFILL_TARGET, ROOFLINE_TARGET = 1.0, 0.85
SEED = 1
GGUF = ("openvino", "llama_cpp")
"""Peers that read the model from such a file."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""As the format numbers them."""
AS_FLOAT32 = (("llama_cpp", "float32"),)
"""Peers that get float32, and for which type; OpenVINO reads none, but computes in the type read."""
DTYPES = ("bfloat16", "float32")
TRAINED = "smollm2"
Answers = list[list[int]]
Ask = Callable[[Sequence[Sequence[int]], int], tuple[float, Answers]]
"""Seconds of greedy answers of so many tokens to prompts of one length, sent together; and the answers."""


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
        """Tokens that the rate counts: the prompt's if the answer has one token, else the answers'."""
        return self.prompt if self.output == 1 else self.batch * self.output

    def prompts(self, generator: random.Random) -> list[list[int]]:
        """Random ordinary token ids."""
        return [[generator.randrange(300, 4000) for _ in range(self.prompt)] for _ in range(self.batch)]

    @property
    def limit_name(self) -> str:
        """Of what the machine can do at most."""
        return "the best matrix product" if self.output == 1 else "reading all weights, or the best product"

    def limit(self, limits: Limits) -> float:
        """Tokens per second that the machine can do at most."""
        return limits.prompt_tokens_per_s if self.output == 1 else limits.decode_tokens_per_s(self.batch)


TASKS = (
    Task(f"prefill, {PROMPT} tokens", 1, PROMPT, 1, PREFILL_TARGET),
    *(
        Task(f"decode, batch {batch}, {SHORT_PROMPT} + {OUTPUT} tokens", batch, SHORT_PROMPT, OUTPUT, target)
        for batch, target in TARGETS.items()
    ),
)


async def through_services(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Answers]:
    """All prompts sent together; as `Ask`."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    clock = asyncio.get_running_loop().time
    async with AsyncClient(address) as client:
        await client.stats()  # connected

        async def ask(prompt: Sequence[int]) -> tuple[Span, list[int]]:
            begin = clock()
            result = await client.generate(token_ids=list(prompt), sampling=sampling)
            return Span(begin, clock(), len(result.token_ids)), result.token_ids

        found = await asyncio.gather(*map(ask, prompts))
    spans, answers = zip(*found, strict=True)
    return len(prompts) * tokens / rate(spans), list(answers)


def same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the answers' tokens that are equal up to each answer's first that is not."""
    same = 0
    for own, other in zip(ours, theirs, strict=True):
        same += next((at for at, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), len(own))
    return same / sum(map(len, ours))


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is computed in an element type.

    Attributes:
        model: the model's name.
        checkpoint: a folder, or a GGUF file.
        dtype: bfloat16 or float32.
    """

    model: str
    checkpoint: Path
    dtype: str

    @property
    def name(self) -> str:
        """The rows' names."""
        return self.model if self.wanted else f"{self.model}, {self.dtype}"

    @property
    def wanted(self) -> bool:
        """Whether there are targets."""
        return self.dtype == "bfloat16"


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second, measured one after the other.

    Attributes:
        ours: through the services.
        steps: of ours, those behind the first ones: in the time that whole answers take longer than one token each.
        theirs: for each peer that has not ended.
        limit: what the machine can do at most, by the memory's speed just before.
        int8_head: the same of one sequence by the bytes that are read, where those are not all weights; else 0.
    """

    ours: float
    steps: float
    theirs: dict[Peer, float]
    limit: float
    int8_head: float = 0.0


class Beside:
    """Our stack and the peers, on one model. A peer that ends has no further figures; the others go on."""

    def __init__(
        self, subject: Subject, ours: Ask, peers: Sequence[Peer], limits: Callable[[], Limits], progress: Progress
    ) -> None:
        self._limits = limits
        self._model, self._wanted = subject.name, subject.wanted
        self._ours = ours
        self._peers = list(peers)
        self._progress = progress
        self._random = random.Random(SEED)
        self._ended: dict[Peer, str] = {}
        self._same: dict[Peer, list[float]] = {peer: [] for peer in peers}

    def rows(self, runs: int) -> list[Row | Absent]:
        """A row per task and peer, per task and limit, and per peer for equal tokens."""
        rows: list[Row | Absent] = []
        for task in TASKS:
            # The first one warms up.
            figures = [self._measured(task, number, runs) for number in range(runs + 1)][1:]
            rows += [self._beside_peer(task, peer, figures) for peer in self._peers]
            rows += self._beside_limits(task, figures)
        return [*rows, *(self._equality(peer) for peer in self._peers if self._same[peer])]

    def _measured(self, task: Task, number: int, runs: int) -> Round:
        """One round, for ours and each peer that has not ended."""
        limits = self._limits()
        limit, int8_head = task.limit(limits), limits.int8_head_tokens_per_s if task.batch == 1 < task.output else 0.0
        prompts = task.prompts(self._random)
        seconds, answers = self._ours(prompts, task.output)
        ours, steps, theirs = task.counted / seconds, self._steps(task, seconds), dict[Peer, float]()
        for peer in self._peers:
            if peer in self._ended:
                continue
            try:
                seconds, others = peer.answer(prompts, task.output)
            except Skipped as reason:
                self._ended[peer] = str(reason)
                self._progress(f"{peer.version}: {reason}")
                continue
            theirs[peer] = task.counted / seconds
            self._same[peer].append(same_tokens(answers, others))
        rates = ", ".join(f"{answer:.1f}" for answer in (ours, *theirs.values()))
        self._progress(f"{task.name}, run {number} of {runs}: {rates} tokens/s")
        return Round(ours, steps, theirs, limit, int8_head)

    def _steps(self, task: Task, seconds: float) -> float:
        """Tokens per second behind the first ones; each prompt's own."""
        if task.output == 1:
            return task.counted / seconds
        first, _ = self._ours(task.prompts(self._random), 1)
        return task.batch * (task.output - 1) / (seconds - first)

    def _beside_peer(self, task: Task, peer: Peer, figures: Sequence[Round]) -> Row | Absent:
        name = f"{self._model}, {task.name}"
        if peer in self._ended:
            return Absent(name, peer.version, self._ended[peer])
        pairs = [(figure.ours, figure.theirs[peer]) for figure in figures]
        target = task.target if self._wanted else None
        return with_limit(
            paired(name, "tokens/s", pairs, peer.version, target=target), max(figure.limit for figure in figures)
        )

    def _beside_limits(self, task: Task, figures: Sequence[Round]) -> list[Row]:
        target = ROOFLINE_TARGET if self._wanted and task.batch == 1 and task.output > 1 else None
        pairs = [(figure.steps, figure.limit) for figure in figures]
        name = f"{self._model}, {task.name}{'' if task.output == 1 else ', behind the first tokens'}"
        rows = [paired(name, "tokens/s", pairs, task.limit_name, target=target)]
        if all(figure.int8_head for figure in figures):
            pairs = [(figure.steps, figure.int8_head) for figure in figures]
            rows.append(paired(name, "tokens/s", pairs, "reading what is read: the head as bytes"))
        return rows

    def _equality(self, peer: Peer) -> Row:
        shares = self._same[peer]
        share = statistics.mean(shares)
        name = f"{self._model}, share of tokens that are ours too, up to the first other one"
        return Row(name, share, "", spread_of(shares), peer.version, 1.0, share)


def gguf_of(model: Path, folder: Path, kind: str) -> Path:
    """The same model as a GGUF file in a type of `FILE_TYPES`; F16 and F32 are what peers read without quantising."""
    from benchmarks.peers.gguf_files import rewrite_gguf, write_gguf

    file = folder / f"{model.stem if model.is_file() else model.name}-{kind}.gguf"
    metadata = {"general.file_type": FILE_TYPES[kind]}
    if file.exists():  # another peer has read it
        return file
    if model.is_file():
        return rewrite_gguf(model, file, kind, metadata=metadata)
    architecture = json.loads((model / "config.json").read_text())["model_type"].replace("_", "")
    return write_gguf(architecture, model, file, kind, metadata=metadata)


def measured(
    subject: Subject, folder: Path, environment: Environment, options: argparse.Namespace, progress: Progress
) -> list[Row | Absent]:
    """One model's rows in one type."""
    model, dtype = subject.checkpoint, subject.dtype
    limits = measured_limits(model, dtype, options.device)
    if options.weights != "none":
        held = inspect_checkpoint(model, dtype).weight_bytes
        parameters = limits.all_parameters + limits.other_parameters
        limits = replace(limits, weight_bytes=held / parameters, int8_panels_bytes=0)
    progress(f"{subject.name}: {limits}")
    kept = "none" if options.weights == "none" else "auto"
    both = ("--device", options.device, "--set", f"quantization={kept}")
    where = {"prefill": both, "decode": (*both, "--speculative", options.speculative)}
    plan = StackPlan(model=str(model), data_dir=folder / f"{dtype}-data", dtype=dtype, extra={**where})
    absent: list[Row | Absent] = []
    with contextlib.ExitStack() as stack:
        peers = []
        for name in options.only.split(","):
            try:
                python = environment.python(name)
                file = model
                if options.weights != "none" and name not in GGUF:
                    raise Skipped(f"does not compute with {options.weights} weights")
                if options.weights == "none" and name in GGUF:
                    file = gguf_of(model, folder, "F32" if (name, dtype) in AS_FLOAT32 else "F16")
                threads = len(os.sched_getaffinity(0))
                peers.append(stack.enter_context(running(name, python, file, threads, dtype, options.device)))
                progress(f"{subject.name}: {peers[-1].version} is ready")
            except Skipped as reason:
                absent += [Absent(f"{subject.name}, {task.name}", NAMES[name], str(reason)) for task in TASKS]
        address = stack.enter_context(LocalStack(plan)).address

        def ours(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Answers]:
            return asyncio.run(through_services(address, prompts, tokens))

        def now() -> Limits:
            return replace(limits, read_bytes_per_s=memory_now()) if options.device == "cpu" else limits

        return [*Beside(subject, ours, peers, now, progress).rows(options.runs), *absent]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Skipped("there is no GPU")
    environment = Environment(options.peers, progress)
    rows: list[Row | Absent] = []
    for name in options.model.split(","):
        trained = cached_model(name, cache_folder()) if name == TRAINED else None
        if name == TRAINED and trained is None:
            rows.append(Absent(name, "other engines", f"it is not here (`moonpool model fetch {name}`)"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = trained or checkpoint_of(name, Path(folder))
            if options.weights not in ("none", "file"):
                checkpoint = gguf_of(checkpoint, Path(folder), options.weights)
            for dtype in options.dtype.split(","):
                subject = Subject(name if trained else checkpoint.name, checkpoint, dtype)
                rows += measured(subject, Path(folder), environment, options, progress)
    return rows


def dtypes(text: str) -> str:
    """Element types with commas.

    Raises:
        argparse.ArgumentTypeError: one is not known.
    """
    for name in text.split(","):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return text


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    models = f"shapes of `moonpool model create`, folders, GGUF files, or {TRAINED}, with commas"
    add("--model", default=f"small,qwen2.5-0.5b,{TRAINED}", help=models)
    peers = ",".join(name for name in NAMES if name != "sglang")
    add("--only", default=peers, help=f"of {', '.join(NAMES)}, with commas (default {peers})")
    types = "of ours, and of peers that take one: bfloat16 or float32, or both with a comma (default both)"
    add("--dtype", type=dtypes, default=",".join(DTYPES), help=types)
    kinds = f"of the models: none = dequantised, file = as they are, {', '.join(list(FILE_TYPES)[2:])} = written so"
    add("--weights", choices=("none", "file", *list(FILE_TYPES)[2:]), default="none", help=kinds)
    add("--speculative", choices=("auto", "off"), default="auto", help="of our decode")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of our engines, and of peers that run on it")
    add("--peers", type=Path, default=Path(".peers"), help="folder of the peers' environments (default .peers)")


if __name__ == "__main__":
    run("engine", measure, flags=flags)
