"""Prompts through two pipeline stages beside one: `python -m benchmarks.prefill [--quick] [--json]`.

Engines of one model of random weights, one core for each process. `many` computes many prompts, a prompt in a step:
one engine of one stage, one of two stages, and, as control, two engines of one stage that halve the prompts. What the
two engines gain over one is what the machine's two cores can give. The bound of fill and division is what the stages'
own processor seconds allow: the longer stage without a gap, and the shorter one for one prompt more. `long` computes
one prompt in chunks; the bound is what two stages of equal halves take for the one stage's own chunk times. `auto`
takes the steps that `--max-num-batched-tokens auto` takes for a prompt alone, beside fixed steps.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import Absent, Progress, Row, Skipped, optional, paired, run
from benchmarks.processes import cpu_s_of
from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import pipelined_step_tokens, work_of
from moonpool.base.scheduling.steps import SequenceStep, Step, StepResult, max_steps_in_flight
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.stage_costs import layer_costs
from moonpool.engine.start_engine import start_engine

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY = 256, 25, 4, 768, 512
BLOCK = 16
PROMPT, PROMPTS = 512, 32
"""Tokens of each of many prompts, and prompts."""
LONG, CHUNK = 8192, 1024
LENGTHS, FIXED = (1024, 4096, 8192), (256, 512, 1024, 2048)
"""Prompts that are alone, and the fixed steps beside `auto`, tokens."""
MANY_TARGET, LONG_TARGET, AUTO_TARGET = 1.8, 0.9, 0.95
SEED = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of `tokens` tokens in steps of `size`, in blocks of its own from `block` on."""

    tokens: int
    size: int
    block: int = 0

    def steps(self) -> list[SequenceStep]:
        """The prompt's chunks; the last samples a token."""
        found = []
        for start in range(0, self.tokens, self.size):
            end = min(start + self.size, self.tokens)
            table = tuple(range(self.block, self.block + -(-end // BLOCK)))
            sample = SampleSpec() if end == self.tokens else None
            found.append(SequenceStep(bytes(4 * (end - start)), start, table, sample=sample))
        return found


class Computing:
    """An engine whose steps have growing ids."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, ProcessEngine)
        self.engine = engine
        self._ids = itertools.count(1)

    def pin(self, cores: Sequence[int]) -> None:
        """Give each process a core of its own."""
        for pid, core in zip(self.engine.pids, cores, strict=True):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), {core})

    async def compute(self, prompts: Sequence[Prompt]) -> tuple[float, list[StepResult]]:
        """Compute prompts with as many steps in flight as may be; return seconds and results."""
        room = asyncio.Semaphore(max_steps_in_flight(self.engine.stages))
        began, running = time.perf_counter(), []

        async def one(part: SequenceStep) -> StepResult:
            try:
                return await self.engine.run(Step(next(self._ids), (part,)))
            finally:
                room.release()

        for part in (part for prompt in prompts for part in prompt.steps()):
            await room.acquire()
            running.append(asyncio.create_task(one(part)))
        results = await asyncio.gather(*running)
        return time.perf_counter() - began, results


def write_model(folder: Path) -> None:
    """Write a Llama of random weights."""
    torch, safetensors = optional("torch"), optional("safetensors.torch")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 2 * LONG, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(SEED)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{name}.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    weights = {name: torch.randn(shape, generator=drawn) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    safetensors.save_file(weights, str(folder / "model.safetensors"))


@contextlib.asynccontextmanager
async def computing(folder: Path, stages: int, *, measure: bool = False) -> AsyncIterator[Computing]:
    """An engine with one thread a stage."""
    config = load_config(folder)
    layout = kv_layout(config, "float32", BLOCK)
    blocks = max(LONG, PROMPT * PROMPTS) // BLOCK
    spec = EngineSpec(
        str(folder), "float32", layout, blocks,
        max_num_batched_tokens=max(FIXED), stages=stages, threads=1, max_tokens=config.max_position_embeddings,
        measure=measure, layer_costs=layer_costs(config, PROMPT, on_cpu=True, trimmed=True),
    )  # fmt: skip
    async with start_engine(spec) as engine:
        yield Computing(engine)


def bound_s(chunk_s: Sequence[float]) -> float:
    """Seconds of two stages of equal halves, each of which computes half of every chunk, in order."""
    halves = [seconds / 2 for seconds in chunk_s]
    return max(sum(halves[: at + 1]) + sum(halves[at:]) for at in range(len(halves)))


@dataclass(frozen=True, slots=True)
class Many:
    """Seconds of many prompts.

    Attributes:
        one, two, engines: of one stage, of two stages, of two engines side by side.
        bound: of two stages, by fill and division.
        alone: of one stage, on a processor of its own, as `bound` counts.
    """

    one: float
    two: float
    engines: float
    bound: float
    alone: float


async def _many(one: Computing, two: Computing, other: Computing, count: int) -> Many:
    prompts = [Prompt(PROMPT, PROMPT, at * PROMPT // BLOCK) for at in range(count)]
    pids = (*one.engine.pids, *two.engine.pids)
    began_s = [cpu_s_of(pid) for pid in pids]
    one_s, _ = await one.compute(prompts)
    two_s, _ = await two.compute(prompts)
    alone, *stages = [cpu_s_of(pid) - before for before, pid in zip(began_s, pids, strict=True)]
    began = time.perf_counter()
    await asyncio.gather(one.compute(prompts[::2]), other.compute(prompts[1::2]))
    return Many(one_s, two_s, time.perf_counter() - began, max(stages) + min(stages) / count, alone)


async def _long(one: Computing, two: Computing, tokens: int) -> tuple[float, float]:
    """Seconds of a prompt in two stages, and their bound."""
    _, results = await one.compute([Prompt(tokens, CHUNK)])
    two_s, _ = await two.compute([Prompt(tokens, CHUNK)])
    return two_s, bound_s([(result.end_ns - result.start_ns) / 1e9 for result in results])


async def _auto(two: Computing, tokens: int) -> tuple[float, float, int]:
    """Seconds with `auto`, of the best fixed step, and auto's step."""
    size = pipelined_step_tokens(two.engine.speeds, 2, work_of(tokens, 0), max(FIXED), BLOCK)
    fixed = [(await two.compute([Prompt(tokens, each)]))[0] for each in FIXED if each <= tokens]
    own, _ = await two.compute([Prompt(tokens, size)])
    return own, min(fixed), size


async def _measure(options: argparse.Namespace, folder: Path, progress: Progress) -> list[Row | Absent]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise Skipped("two stages need two cores")
    count, lengths = (4, LENGTHS[:1]) if options.quick else (PROMPTS, LENGTHS)
    async with (
        computing(folder, 1) as one,
        computing(folder, 1) as other,
        computing(folder, 2, measure=True) as two,
    ):
        one.pin(cores[:1])
        other.pin(cores[1:])
        two.pin(cores)
        progress("engines started")
        many = [await _many(one, two, other, count) for _ in range(options.runs)]
        progress("many prompts")

        def rate(seconds: float) -> float:
            return count * PROMPT / seconds

        tokens = lengths[-1]
        long = [await _long(one, two, tokens) for _ in range(options.runs)]
        progress("a long prompt")
        rows: list[Row | Absent] = [
            paired("many prompts, two stages over one", "tokens/s", [(rate(each.two), rate(each.one)) for each in many],
                   "one stage", target=MANY_TARGET),
            paired("many prompts, bound of fill and division over one", "tokens/s",
                   [(rate(each.bound), rate(each.alone)) for each in many], "one stage, by processor"),
            paired("many prompts, two engines over one (control)", "tokens/s",
                   [(rate(each.engines), rate(each.one)) for each in many], "one stage"),
            paired("many prompts, two stages over two engines", "tokens/s",
                   [(rate(each.two), rate(each.engines)) for each in many], "two engines"),
            paired(f"one prompt of {tokens} in chunks of {CHUNK}", "s", long, "bound", less_is_better=True,
                   target=LONG_TARGET),
        ]  # fmt: skip
        for tokens in lengths:
            found = [await _auto(two, tokens) for _ in range(options.runs)]
            size = statistics.median_low(each[2] for each in found)
            pairs = [each[:2] for each in found]
            name = f"one prompt of {tokens}, auto (steps of {size})"
            rows.append(paired(name, "s", pairs, "best fixed step", less_is_better=True, target=AUTO_TARGET))
            progress(name)
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    with tempfile.TemporaryDirectory(prefix="moonpool-prefill-") as folder:
        write_model(Path(folder))
        return asyncio.run(_measure(options, Path(folder), progress))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="few and short prompts: a check that everything runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return 0 if run("prefill", measure, argv, flags=_flags) else 1


if __name__ == "__main__":
    raise SystemExit(main())
