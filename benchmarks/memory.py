"""Memory of an engine as told before loading, beside what its process takes: `python -m benchmarks.memory [--json]`.

One engine process for each kind of model: dense, packed codes of a GGUF file (SmolLM2, if it was fetched), experts,
layers with a recurrent state. Resident memory is read when the engine is ready, after the largest steps (chunks, and a
full batch), and at its peak while loading. Predictions are those of `moonpool model inspect`.

Then whole stacks, as `moonpool serve` starts them with one engine and with two, after some answers: what all processes
hold (PSS, so that shared pages count once), less KV and other shared memory, with a model and with the same model of
one layer. For each byte by which the file is larger, 1.15 are wanted; the rest is the program. Two engines hold the
weights once if the cache folder gives large pages.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame import Absent, Progress, Row, bounded, run
from benchmarks.one_engine import ask_all, fresh_prompts, stack
from moonpool.base.checkpoint import held_quantization, inspect_checkpoint, kv_layout, resolve_dtype
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.fork_server import execute
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.footprint import resident_bytes
from moonpool.engine.memory_estimate import MemoryEstimate, estimated_memory
from moonpool.engine.messages import EngineSpec
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_processes

BLOCK, CHUNK, BATCH, LONGEST = 64, 512, 64, 4096
KV_BYTES = 64 << 20
WITHIN = 0.1
"""A prediction is off by this part at most."""
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense, bfloat16": ("smollm2-135m", {}),
    "experts, bfloat16": (
        "tiny-mixtral",
        {
            "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
            "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 8192,
        },
    ),
    "hybrid, bfloat16": (
        "tiny-qwen3-next",
        {
            "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 4,
            "linear_num_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "vocab_size": 8192,
        },
    ),
}  # fmt: skip
PACKED = "packed, GGUF"
STACKS: Mapping[str, str] = {"stack, SmolLM2's shape": "smollm2-135m", "stack, Qwen3-0.6B's shape": "qwen3-0.6b"}
OF_FILE = 1.15
"""Memory for each byte of a file, wanted at most."""
ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 128, 48
"""What a stack has answered when its memory is read."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Resident bytes of an engine process: when ready, after the largest steps, and at the peak of loading."""

    ready: int
    used: int
    loading: int


def told(path: Path) -> tuple[MemoryEstimate, EngineSpec]:
    """What is told of the checkpoint's engine, and the engine."""
    found = inspect_checkpoint(path)
    dtype = resolve_dtype(found.config)
    layout = kv_layout(found.config, dtype, BLOCK)
    blocks = layout.blocks_in(KV_BYTES, CHUNK, LONGEST)
    quantization = held_quantization(path, found.config, "auto")
    spec = EngineSpec(
        str(path), dtype, layout, blocks,
        max_num_batched_tokens=CHUNK, threads=2, quantization=quantization, int8_head=True,
        max_tokens=LONGEST, measure=False,
    )  # fmt: skip
    return estimated_memory(found, spec), spec


async def taken(spec: EngineSpec) -> Taken:
    """Start the engine, and run the largest steps."""
    async with start_processes(spec, start_timeout_s=300, launcher=execute) as engine:
        assert isinstance(engine, ProcessEngine)
        [pid] = engine.pids
        ready = resident_bytes(pid)
        loading = resident_bytes(pid, peak=True)
        for number, parts in enumerate(largest_steps(spec)):
            await engine.run(Step(number + 1, parts))
        return Taken(ready, resident_bytes(pid), loading)


def largest_steps(spec: EngineSpec) -> Iterator[tuple[SequenceStep, ...]]:
    """Chunks of a long prompt, then a batch of decode steps, twice."""
    sampled = SampleSpec(SamplingParams(temperature=0.8, top_p=0.9))
    longest = min(LONGEST, spec.blocks * BLOCK) // CHUNK * CHUNK
    for _ in range(2):
        for begin in range(0, longest, CHUNK):
            blocks = tuple(range((begin + CHUNK) // BLOCK))
            yield (SequenceStep(bytes(4 * CHUNK), begin, blocks, sample=sampled),)
        count = min(BATCH, spec.blocks)
        yield tuple(SequenceStep(bytes(4), BLOCK - 1, (block,), sample=sampled) for block in range(count))


def rows(name: str, path: Path, progress: Progress) -> Iterator[Row]:
    """Figures of one model: predicted over measured."""
    estimate, spec = told(path)
    found = asyncio.run(taken(spec))
    for when, predicted, measured in (
        ("when ready, KV not yet used", estimate.idle - estimate.kv, found.ready),
        ("between steps, after the largest", estimate.idle, found.used),
        ("at the peak of loading", estimate.loading, found.loading),
    ):
        progress(f"{name}, {when}: {predicted >> 20} MiB told, {measured >> 20} MiB taken")
        off = 1 + abs(predicted / measured - 1)
        told_mib, taken_mib = predicted / 2**20, measured / 2**20
        yield Row(f"{name}, {when}", taken_mib, "MiB", None, "told before", told_mib, 1 / off, 1 / (1 + WITHIN))
    yield bounded(
        f"{name}, after the largest steps", "MiB", [found.used / 2**20], "told before, at most", estimate.all / 2**20
    )


def stack_bytes(path: Path, engines: str, progress: Progress) -> int:
    """All processes' memory without KV after a few answers."""
    with stack(path, engines, ()) as started:
        prompts = fresh_prompts(random.Random(1), PROMPT_TOKENS, 1, ANSWERS)
        asyncio.run(ask_all(started.address, prompts, ANSWER_TOKENS))
        kinds = {kind: started.pss_bytes(f"Pss_{kind}") for kind in ("Anon", "File", "Shmem")}
        told = ", ".join(f"{kind} {held >> 20} MiB" for kind, held in kinds.items())
        progress(f"--engines {engines}, weights of {weights_bytes(path) >> 20} MiB: {told}")
        return kinds["Anon"] + kinds["File"]


def weights_bytes(path: Path) -> int:
    """The bytes of a folder's weights."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def stack_rows(name: str, shape: str, progress: Progress) -> Iterator[Row]:
    """Memory of stacks for each byte by which a file is larger."""
    held: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory(prefix="moonpool-memory-") as folder:
        paths = {
            which: create(shape, Path(folder) / which, dtype="bfloat16", overrides=overrides)
            for which, overrides in (("whole", {}), ("one layer", {"num_hidden_layers": 1}))
        }
        grown = weights_bytes(paths["whole"]) - weights_bytes(paths["one layer"])
        for which, path in paths.items():
            for engines in ("one", "split"):
                held[which, engines] = stack_bytes(path, engines, progress)
    one, two = (held["whole", engines] - held["one layer", engines] for engines in ("one", "split"))
    wanted = "wanted at most"
    yield bounded(f"{name}, one engine, for each byte of the file", "B", [one / grown], wanted, OF_FILE)
    yield bounded(f"{name}, two engines, for each byte of the file", "B", [two / grown], wanted, OF_FILE)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    found: list[Row | Absent] = []
    packed = cached_model("smollm2", cache_folder())
    if options.only not in PACKED:
        progress(f"only {options.only}")
    elif packed is None:
        found.append(Absent(PACKED, "told before", "`moonpool pull smollm2` fetches the model"))
    else:
        found += rows(PACKED, packed, progress)
    for name, (shape, overrides) in SHAPES.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="moonpool-memory-") as folder:
            path = create(shape, Path(folder) / "model", dtype="bfloat16", overrides=overrides)
            found += rows(name, path, progress)
    for name, shape in STACKS.items():
        if options.only in name:
            found += stack_rows(name, shape, progress)
    return found


def flags(parser: argparse.ArgumentParser) -> None:
    """The flag of this benchmark."""
    parser.add_argument("--only", default="", help="kinds of models with this word in their name; default: all")


if __name__ == "__main__":
    run("memory", measure, flags=flags)
