"""What choosing a token costs: each parameter beside greedy, and within a step, as the masks of structured answers.

`python -m benchmarks.sampling [--json]`. Steps are those of one stage in this process, in bfloat16, a context of 256
tokens each. They go in runs of 64, as in an engine (docs/adr/0028-lookahead.md). All sequences of a structured run
follow the same JSON schema and begin it anew when they have ended, which ends the run; a plain run of as many steps
follows, which samples from the same contexts. Both draw at temperature 1; batch 8. The mean step counts, beginnings of
runs included: of a schema that was used before, and of the first 32 steps of one that was not. Two shapes have the
vocabulary that their model has, and `small` takes both in turn: its steps are so short that what is added to them
shows. Weights are random and tokenizers made up (`moonpool model create`), but for SmolLM2-135M-Instruct, where it was
fetched. At batch 32 runs that draw with top-p alternate with greedy ones, and the time is taken that those spend
outside native code, their beginnings included.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.frame import Absent, Progress, Row, bounded, paired, run
from moonpool.base.checkpoint import Tokenizer, kv_layout, load_config
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling, SequenceStep, Step
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.process_engine import RUN_STEPS
from moonpool.engine.sampling.sampler import sample
from moonpool.engine.structured_output import MaskBuilder
from moonpool.v1 import kv_pb2

VOCABULARIES = (49_152, 151_936)
"""Of SmolLM2 and of Qwen2.5."""
BATCH, CONTEXT, BLOCK_SIZE = 8, 256, 64
NEW_STEPS = 32
"""Of a schema that was not used before."""
MANY = 32
SMALL, SMOLLM2, QWEN = "small", "smollm2-135m", "qwen2.5-0.5b"
SHAPES = (
    (SMALL, 32_000, False, True),
    (SMALL, 49_152, True, False),
    (SMALL, 151_936, True, True),
    (SMOLLM2, 49_152, True, False),
    (QWEN, 151_936, True, True),
)
"""Shapes, vocabularies, whether steps of theirs are measured with masks, and with many sequences."""
TRAINED = "SmolLM2-135M-Instruct"
WANTED = 1 / 1.05
"""A step with masks takes at most 5 % longer."""
WANTED_TOP_P = 0.9
"""Of the tokens per second of greedy steps."""
MOST_OUTSIDE = 0.03
"""Of a step, outside native calls."""
NATIVE = ("step", "go_on", "rows", "rms_norm", "product", "uniform", "sample")
"""What a step calls."""
PLAIN = SampleSpec(SamplingParams())
TOP_P = SampleSpec(SamplingParams(temperature=0.8, top_p=0.95), seed=1)
FEATURES = {
    "temperature 0.8": SamplingParams(temperature=0.8),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature 0.8, top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "20 log probabilities": SamplingParams(temperature=0.0, logprobs=20),
}


def schema(number: int) -> dict[str, object]:
    """One of many that cost the same, and of which none is used when another one was."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40 + number},
            "kind": {"enum": ["person", "place", "thing"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
            "size": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "integer"}},
                "required": ["x"],
            },
        },
        "required": ["name", "kind", "tags", "size"],
        "additionalProperties": False,
    }


class Stage:
    """One stage of a checkpoint, and sequences that it generates for."""

    def __init__(self, checkpoint: Path, batch: int) -> None:
        config = load_config(checkpoint)
        self._blocks = -(-(CONTEXT + RUN_STEPS) // BLOCK_SIZE)
        self._pool = KVPool.create(
            kv_layout(config, "bfloat16", BLOCK_SIZE), batch * self._blocks, [(0, config.num_layers)]
        )
        self._ends = config.eos_token_ids
        native = library.get()
        aside: Callable[[], AbstractContextManager[None]] = nullcontext
        if native is not None:
            aside = native.aside
        self._masks = MaskBuilder(lambda: Tokenizer.load(checkpoint), config.vocab_size, self._ends, aside)
        model = load_stage(checkpoint, config, torch.bfloat16, 0, config.num_layers)
        self._events: list[StageEvent] = []
        [part] = self._pool.parts
        self._runner = StageRunner(
            0,
            model,
            stage_platform(None, part, lambda error: None),
            NoLinks(),
            KVGates(),
            self._events.append,
            1.0,
            self._masks,
        )
        self._numbers = itertools.count(1)
        self._batch = batch
        self.follow(schema(0))

    def follow(self, wanted: dict[str, object]) -> None:
        """Structured sequences begin anew, with this schema."""
        params = SamplingParams(max_tokens=10_000, response_format="json_schema", grammar=json.dumps(wanted))
        self._sampling = [SequenceSampling.of(replace(params, seed=row), 1, self._ends) for row in range(self._batch)]
        self._answers = [array("i", [3]) for _ in range(self._batch)]

    def structured(self, steps: int = RUN_STEPS) -> list[float]:
        """Times of a run's steps whose sequences follow the schema."""
        specs = [sampling.at(answer) for sampling, answer in zip(self._sampling, self._answers, strict=True)]
        times = []
        for took, tokens in self._run(specs, frozenset(self._ends), steps):
            times.append(took)
            for row, token in enumerate(tokens):
                self._grow(row, token or 0)
        return times

    def plain(self, spec: SampleSpec, steps: int = RUN_STEPS) -> list[float]:
        """Times of a run's steps that sample so."""
        return [took for took, _ in self._run([spec] * self._batch, steps=steps)]

    def _run(
        self, specs: Sequence[SampleSpec], ends: frozenset[int] = frozenset(), steps: int = RUN_STEPS
    ) -> Iterator[tuple[float, Sequence[int | None]]]:
        shares = tuple(self._sequence(row, spec, ends) for row, spec in enumerate(specs))
        step: Step | None = Step(next(self._numbers), shares, steps=steps)
        goes_on = True
        while goes_on:
            begin = time.perf_counter()
            goes_on = self._runner.go_on() if step is None else self._runner.run(step)
            took, step = time.perf_counter() - begin, None
            done = self._events.pop()
            self._events.clear()
            assert isinstance(done, StageDone)
            yield took, done.sampled

    def _sequence(self, row: int, spec: SampleSpec, ends: frozenset[int]) -> SequenceStep:
        table = tuple(range(row * self._blocks, (row + 1) * self._blocks))
        return SequenceStep(array("i", [row + 3]).tobytes(), CONTEXT, table, spec, end_token_ids=ends)

    def _grow(self, row: int, token: int) -> None:
        self._answers[row].append(token)
        if self._sampling[row].finish(self._answers[row], 10_000) != kv_pb2.FINISH_REASON_UNSPECIFIED:
            del self._answers[row][1:]

    def close(self) -> None:
        """End the thread and give the memory back."""
        self._masks.close()
        self._pool.close()


@contextmanager
def checkpoint_of(shape: str, vocabulary: int) -> Iterator[Path]:
    """A model of a shape with this vocabulary."""
    with tempfile.TemporaryDirectory() as path:
        yield create(shape, Path(path) / "model", overrides={"vocab_size": vocabulary})


class Clock:
    """Counts the time that a library's functions take, once `watch` has been called."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, native: Library) -> None:
        """From now on."""
        for name in NATIVE:
            setattr(native, name, self._timed(getattr(native, name)))

    def _timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return call

    def outside(self, made: Stage, spec: SampleSpec) -> float:
        """Share of a run's steps."""
        before = self.seconds
        took = sum(made.plain(spec))
        return 1 - (self.seconds - before) / took


def paired_runs(
    ours: Callable[[], list[float]], theirs: Callable[[], list[float]], rounds: int, steps: int
) -> list[tuple[float, float]]:
    """Median milliseconds of at least so many steps each, in runs that alternate, in each round."""
    pairs = []
    for round_ in range(rounds + 1):  # in the first memory settles
        mine: list[float] = []
        others: list[float] = []
        while len(mine) < steps:
            mine += ours()
            others += theirs()
        if round_:
            pairs.append((1e3 * statistics.median(mine), 1e3 * statistics.median(others)))
    return pairs


def many_rows(checkpoint: Path, of: str, runs: int, steps: int) -> Iterator[Row]:
    """Steps of many sequences: drawn with top-p beside greedy, and what is outside native calls."""
    native, of = library.get(), f"{of}, batch {MANY}"
    with closing(Stage(checkpoint, MANY)) as made:
        pairs = paired_runs(partial(made.plain, TOP_P), partial(made.plain, SampleSpec()), runs, steps)
        name = f"step at temperature 0.8 with top-p 0.95, {of}"
        yield paired(name, "ms", pairs, "the greedy step", less_is_better=True, target=WANTED_TOP_P)
        if native is None:
            return
        clock = Clock()
        clock.watch(native)
        for name, spec in (("greedy", SampleSpec()), ("top-p", TOP_P)):
            shares = [clock.outside(made, spec) for _ in range(runs) for _ in range(-(-steps // RUN_STEPS))]
            name = f"share of a step outside native calls, {name}, {of}"
            yield bounded(name, "of the step", shares, "wanted", MOST_OUTSIDE)


def masked(made: Stage, steps: int) -> tuple[float, float]:
    """Mean milliseconds of at least so many steps with masks, and of as many without, in runs that alternate."""
    mine: list[float] = []
    others: list[float] = []
    while len(mine) < steps:
        times = made.structured(min(steps, RUN_STEPS))
        mine += times
        others += made.plain(PLAIN, len(times))
    return 1e3 * statistics.fmean(mine), 1e3 * statistics.fmean(others)


def mask_rows(checkpoint: Path, of: str, runs: int, steps: int) -> Iterator[Row]:
    """A step with masks beside one without, of a schema that was used before and of a new one."""
    known, new = [], []
    with closing(Stage(checkpoint, BATCH)) as made:
        masked(made, steps)  # parsers learn and memory settles
        for round_ in range(runs):
            made.follow(schema(0))
            known.append(masked(made, steps))
            made.follow(schema(round_ + 1))
            new.append(masked(made, NEW_STEPS))
    name, beside = f"step with masks, {of}, batch {BATCH}", "the step without"
    yield paired(name, "ms", known, beside, less_is_better=True, target=WANTED)
    yield paired(f"{name}, first {NEW_STEPS} steps of a schema", "ms", new, beside, less_is_better=True)


def feature_rows(vocabulary: int, runs: int) -> Iterator[Row]:
    """Choosing a token for each of eight rows, beside the highest logit."""
    logits = torch.randn(BATCH, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    history = array("i", range(5, 5 + 2 * CONTEXT)).tobytes()
    for name, params in FEATURES.items():
        spec = SampleSpec(params, seed=1, history=history if params.penalised else None, prompt_tokens=CONTEXT)
        pairs = [(_choosing(logits, spec), _choosing(logits, SampleSpec())) for _ in range(runs)]
        yield paired(f"{name}, vocabulary {vocabulary}", "us per row", pairs, "greedy", less_is_better=True)


def _choosing(logits: torch.Tensor, spec: SampleSpec, times: int = 5) -> float:
    """Microseconds per row, the least of some times; the logits are copied before."""

    def once(copied: torch.Tensor) -> float:
        begin = time.perf_counter()
        sample(copied, [spec] * len(copied))
        return time.perf_counter() - begin

    return 1e6 / len(logits) * min(once(logits.clone()) for _ in range(times))


def rows_of(options: argparse.Namespace) -> Iterator[Row | Absent]:
    """All rows."""
    for vocabulary in VOCABULARIES:
        yield from feature_rows(vocabulary, options.runs)
    for shape, vocabulary, masked, many in SHAPES:
        with checkpoint_of(shape, vocabulary) as checkpoint:
            of = f"{shape}, vocabulary {vocabulary}"
            if masked:
                yield from mask_rows(checkpoint, of, options.runs, options.steps)
            if many:
                yield from many_rows(checkpoint, of, options.runs, options.steps)
    trained = cached_model("smollm2", cache_folder())
    if trained is None:
        name = f"step with masks, {TRAINED}, batch {BATCH}"
        yield Absent(name, "the step without", "it is not here (`moonpool pull smollm2`)")
    else:
        yield from mask_rows(trained, TRAINED, options.runs, options.steps)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows, each told when it is there."""
    rows: list[Row | Absent] = []
    for row in rows_of(options):
        rows.append(row)
        if isinstance(row, Row):
            progress(f"{row.name}: {row.value:.3f} {row.unit}, ratio {row.ratio:.3f}")
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--steps", type=int, default=64, help="steps of each kind per round, at least")


if __name__ == "__main__":
    run("sampling", measure, flags=flags)
