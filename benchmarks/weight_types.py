"""Packed weights beside bfloat16: how fast decode steps and prompts are, and what packing changes of predictions.

`python -m benchmarks.weight_types [--json]`. Decode steps at several batch sizes with contexts of 512 tokens, and
prompts of 512 and 2,048 tokens, logits included, with random weights. The types take turns. Perplexity is of a trained
model (SmolLM2-135M where it was fetched, else the bundled one) over text that the model was not trained on; "file" is
the file's own codes beside the same file dequantised. Decode steps of a mixture of experts stand beside the time in
which memory gives the bytes that a token reads. `--shapes small qwen2.5-0.5b` takes a quarter of an hour.
"""

import argparse
import itertools
import statistics
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.ceilings import read_bytes_per_s, seconds, weights_memory
from benchmarks.frame import Progress, Row, bounded, paired, run
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import ModelConfig, Tokenizer, kv_layout, load_config
from moonpool.base.checkpoint.formats import tensor_index
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.kv.pool import KVPool
from moonpool.base.quantization import Quantization
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.experts import MixtureOfExperts
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.native_loop import NativeLoop
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.platforms.kv_memory import StageSlices, pool_bytes

KINDS: tuple[Quantization, ...] = ("int8", "int4")
ALL: tuple[Quantization, ...] = ("none", *KINDS)
SHAPES = ("small", "qwen2.5-0.5b")
EXPERTS = "small-experts"
"""A shape whose tokens choose 8 of 64 experts."""
OF_ACTIVE = 0.8
"""Of the rate at which memory gives the weights that a token reads."""
BATCHES, CONTEXT = (1, 8, 32), 512
RUN = 128
"""Tokens of a run of the mixture."""
PROMPTS, CHUNK = (512, 2048), 512
WORSE = {"file": 1.01, "int8": 1.01, "int4": 1.15}
"""Perplexity at most, times bfloat16's."""
OF_FILE = 1.15
"""Memory of weights at most, times the file."""
AGREE = {"file": 0.08, "int8": 0.08, "int4": 0.30}
"""Share of tokens whose most likely successor is another one, at most."""
TURNS, TURN_S = 7, 0.02
"""Of each type in a run, and seconds of one at least."""
BLOCK = 64
RANDOM_BYTES = 1 << 22
TEXT = Path(__file__).parents[1] / "docs" / "adr"
WINDOW, WINDOWS, WINDOW_CHUNK = 1024, 8, 256


@dataclass(frozen=True, slots=True)
class Pool:
    """Random KV of all layers of a model, in bfloat16."""

    kv: Tensor
    pool: KVPool  # kept alive: `kv` is a view of its memory

    @classmethod
    def of(cls, config: ModelConfig, blocks: int) -> "Pool":
        pool = KVPool.create(kv_layout(config, "bfloat16", BLOCK), blocks, [(0, config.num_layers)])
        kv, _ = StageSlices.of_pool(pool.parts[0], pool_bytes(pool.parts[0])).typed()
        assert isinstance(kv, Tensor), "layers are alike"
        numbers = torch.randn(RANDOM_BYTES).to(kv.dtype)
        for block in kv.flatten(0, 1):
            begin = int(torch.randint(RANDOM_BYTES - block.numel(), ()))
            block.view(-1).copy_(numbers[begin : begin + block.numel()])
        return cls(kv, pool)


def in_turns(calls: dict[str, Callable[[], None]], runs: int) -> Iterator[dict[str, float]]:
    """Milliseconds of one call of each, the median of TURNS turns in every run: what disturbs one disturbs all."""
    for call in calls.values():
        call()
    for _ in range(runs):
        turns = [{kind: seconds(call, TURN_S) * 1e3 for kind, call in calls.items()} for _ in range(TURNS)]
        yield {kind: statistics.median(turn[kind] for turn in turns) for kind in calls}


@dataclass(frozen=True, slots=True)
class Predictions:
    """One text window.

    Attributes:
        losses: per next token, nats.
        best: the most likely next tokens.
    """

    losses: Tensor
    best: Tensor


def trained() -> Path:
    """The trained model's file or folder."""
    return cached_model("smollm2", cache_folder()) or model_dir()


def windows(path: Path) -> list[list[int]]:
    """Tokens of this project's prose, which no model has seen."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(TEXT.glob("*.md")))
    tokens = Tokenizer.load(path).encode(text)
    count = min(WINDOWS, len(tokens) // WINDOW)
    return [tokens[number * WINDOW : (number + 1) * WINDOW] for number in range(count)]


@torch.inference_mode()
def predict(stage: StageModel, tokens: list[int]) -> Predictions:
    """Read a window chunk by chunk, as prefill does: attention sees what was stored."""
    blocks = list(range(-(-len(tokens) // BLOCK)))
    pool, rows = Pool.of(stage.config, len(blocks)), []
    for begin in range(0, len(tokens), WINDOW_CHUNK):
        chunk = array("i", tokens[begin : begin + WINDOW_CHUNK]).tobytes()
        batch = PackedBatch.build([(chunk, begin, blocks)], BLOCK)
        rows.append(stage.logits(stage.forward(batch.token_ids, batch, pool.kv)))
    logits = torch.cat(rows)[:-1]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return Predictions(losses, logits.argmax(-1))


def perplexity(found: list[Predictions]) -> float:
    """Over all windows."""
    return float(torch.cat([window.losses for window in found]).double().mean().exp())


def decode_call(stage: StageModel, batch: int) -> Callable[[], None]:
    """A decode step of so many sequences."""
    blocks = CONTEXT // BLOCK
    pool = Pool.of(stage.config, batch * blocks)
    tables = torch.arange(batch * blocks).view(batch, blocks).tolist()
    parts = [(array("i", [5]).tobytes(), CONTEXT - 1, table) for table in tables]

    def call() -> None:
        packed = PackedBatch.build(parts, BLOCK)
        stage.logits(stage.forward(packed.token_ids, packed, pool.kv))

    return call


def prompt_call(stage: StageModel, tokens: int) -> Callable[[], None]:
    """A prompt of so many tokens in chunks, with the logits of its last one."""
    blocks = list(range(tokens // BLOCK))
    pool = Pool.of(stage.config, len(blocks))
    chunk = array("i", [7] * CHUNK).tobytes()

    def call() -> None:
        for begin in range(0, tokens, CHUNK):
            packed = PackedBatch.build([(chunk, begin, blocks)], BLOCK)
            hidden = stage.forward(packed.token_ids, packed, pool.kv)
        stage.logits(hidden[-1:])

    return call


def speed_rows(shape: str, options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Steps and prompts of one shape."""
    with tempfile.TemporaryDirectory(prefix="moonpool-weight-types-") as folder:
        path = create(shape, Path(folder) / "model", dtype="bfloat16")
        config = load_config(path)
        stages = {
            kind: load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(kind)) for kind in ALL
        }
    progress(
        f"{shape}: weights of {', '.join(f'{stage.weight_bytes >> 20} MiB ({kind})' for kind, stage in stages.items())}"
    )
    work: dict[str, Callable[[StageModel], Callable[[], None]]] = {
        **{f"decode step, batch {batch}": partial(decode_call, batch=batch) for batch in BATCHES},
        **{f"prompt of {tokens}": partial(prompt_call, tokens=tokens) for tokens in PROMPTS},
    }
    for name, make in work.items():
        found = list(in_turns({kind: make(stage) for kind, stage in stages.items()}, options.runs))
        for kind in KINDS:
            pairs = [(times[kind], times["none"]) for times in found]
            yield paired(f"{name}, {shape}, {kind}", "ms", pairs, "bfloat16 weights", less_is_better=True)


def expert_rows(options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Decode steps of one sequence through a mixture of experts, beside the bytes that such a step reads."""
    with tempfile.TemporaryDirectory(prefix="moonpool-weight-types-") as folder:
        path = create(EXPERTS, Path(folder) / "model", dtype="bfloat16")
        config = load_config(path)
        kinds: tuple[Quantization, ...] = ("none", "int8")
        stages = {
            kind: load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(kind))
            for kind in kinds
        }
    memory = weights_memory()
    for kind, stage in stages.items():
        progress(f"experts, {kind}: {stage.weight_bytes >> 20} MiB, {active_bytes(stage) >> 20} MiB a token")
        call, pairs = expert_call(stage), []
        call()
        for _ in range(options.runs):
            before = read_bytes_per_s(memory)
            own = active_bytes(stage) / seconds(call, 0.3)
            pairs.append((own / 1e9, max(before, read_bytes_per_s(memory)) / 1e9))
        yield paired(
            f"decode step, batch 1, experts, {kind}",
            "GB/s",
            pairs,
            "its active bytes at memory's rate",
            target=OF_ACTIVE,
        )


def active_bytes(stage: StageModel) -> int:
    """Weights that a step of one sequence reads: of experts the chosen ones, of the embedding next to nothing."""
    found = stage.weight_bytes - (stage.embedding.nbytes if stage.embedding is not None else 0)
    for layer in stage.layers:
        assert isinstance(layer.feed_forward, MixtureOfExperts)
        spec = layer.feed_forward.spec
        each = layer.feed_forward.experts[0].nbytes
        found -= (spec.count - spec.chosen) * each
    return found


def expert_call(stage: StageModel) -> Callable[[], None]:
    """A further step of a run, as decode computes them, with another token, and so other experts, each time."""
    pool = Pool.of(stage.config, -(-RUN // BLOCK))
    tokens = itertools.cycle(
        torch.randperm(stage.config.vocab_size, generator=torch.Generator().manual_seed(1)).tolist()
    )
    chosen, runs = array("i", [0]), list[NativeLoop]()
    address, _ = chosen.buffer_info()

    def begun() -> NativeLoop:
        batch = PackedBatch.build([(array("i", [next(tokens)]).tobytes(), 0, list(range(-(-RUN // BLOCK))))], BLOCK)
        stage.forward(batch.token_ids, batch, pool.kv)
        run = stage.native_run(batch, pool.kv, RUN - 1, address)
        assert run is not None
        return run

    def step(number: int) -> None:
        if number % (RUN - 1) == 0:
            runs[:] = [begun()]
        chosen[0] = next(tokens)
        runs[0].go_on()

    numbers = itertools.count()
    return lambda: step(next(numbers))


def trained_rows(options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Perplexity and changed predictions."""
    path = trained()
    config = load_config(path)
    texts = windows(path)

    def stage(kind: Quantization, path: Path = path) -> StageModel:
        return load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(kind))

    dense = stage("none")
    plain = [predict(dense, tokens) for tokens in texts]
    before = perplexity(plain)
    progress(f"{path.name}: perplexity {before:.4f} over {len(texts)} windows with bfloat16 weights")
    quantised = any(info.format is not None for info in tensor_index(path).values())
    for kind in (*(("file",) if quantised else ()), *KINDS):
        packed = stage(kind)
        if kind == "file":
            share = packed.weight_bytes / sum(
                file.stat().st_size for file in {tensor.file for tensor in tensor_index(path).values()}
            )
            yield bounded(f"{path.name}: memory of weights over the file", "", [share], "allowed", OF_FILE)
        found = [predict(packed, tokens) for tokens in texts]
        after = perplexity(found)
        others = [float((window.best != other.best).float().mean()) for window, other in zip(found, plain, strict=True)]
        name = f"{kind}, {path.name}"
        progress(f"{name}: perplexity {after:.4f}, {after / before - 1:+.3%}; {mean(others):.2%} other predictions")
        yield bounded(f"{name}: perplexity over bfloat16's", "", [after / before], "allowed", WORSE[kind])
        yield bounded(f"{name}: other most likely tokens", "share", [mean(others)], "allowed", AGREE[kind])
        if kind == "int4" and options.beside is not None:
            theirs = perplexity([predict(stage("none", options.beside), tokens) for tokens in texts])
            yield bounded(f"{name}: perplexity over {options.beside.name}'s", "", [after / theirs], "allowed", 1.0)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    if options.threads:
        torch.set_num_threads(options.threads)
    sources = [
        trained_rows(options, progress),
        expert_rows(options, progress),
        *(speed_rows(shape, options, progress) for shape in options.shapes),
    ]
    for source in sources:
        for row in source:
            rows.append(row)
            progress(f"{row.name}: {row.value:.4g} {row.unit}, {row.ratio:.2f} of {row.limit_name}")
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES[:1]), help=f"that are timed; {', '.join(SHAPES)}")
    parser.add_argument("--beside", type=Path, help="the trained model in 4 bits by llama.cpp, as Q4_K_M, a GGUF file")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own); 1 is timed by processor time")


if __name__ == "__main__":
    run("weight_types", measure, flags=flags)
