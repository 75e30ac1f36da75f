"""Quantised KV beside bfloat16: decode speed, and the change in a trained model's predictions.

`python -m benchmarks.kv_types [--json]`. Decode at batch 32 with contexts of 2,048 tokens, of one layer's attention
(from one part of a large pool to the next, so that KV comes from memory) and of whole steps, in the shapes small and
qwen2.5-0.5b, with random weights and KV. The types take turns, a few times in each run. Whole steps stand beside their
bound, too: weights and KV read once at memory's speed. Perplexity is of a trained model (SmolLM2-135M where it was
fetched, else the bundled one) over text that it was not trained on, all weights and activations in bfloat16.
"""

import argparse
import itertools
import statistics
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ceilings import read_bytes_per_s, seconds, weights_memory, working_set_bytes
from benchmarks.frame import Progress, Row, bounded, paired, run
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import ModelConfig, Tokenizer, kv_layout, load_config
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.kv.pool import KVPool
from moonpool.engine.kernels.attention import paged_attention
from moonpool.engine.kernels.plan import make_plan
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.kv_memory import StageSlices, pool_bytes

KINDS = ("int8", "fp8")
TYPES = {"auto": "bfloat16", **{kind: kind for kind in KINDS}}
SHAPES = ("small", "qwen2.5-0.5b")
BATCH, CONTEXT, BLOCK = 32, 2048, 64
TARGET = 1.2
"""Of int8, over bfloat16."""
TURNS, TURN_S = 7, 0.02
"""Of each type in a run, and seconds of one at least."""
RANDOM_BYTES = 1 << 22
TEXT = Path(__file__).parents[1] / "docs" / "adr"
WINDOW, WINDOWS, CHUNK = 1024, 8, 256
WORSE = {"int8": 1.01, "fp8": 1.03}
"""Perplexity at most, times bfloat16's."""
AGREE = {"int8": 0.05, "fp8": 0.10}
"""Share of tokens whose most likely successor is another one, at most."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Random KV for some layers, in one type.

    Attributes:
        kv, scales: see `moonpool.engine.platforms.kv_memory`; scales only where quantised.
    """

    kv: Tensor
    scales: Tensor | None
    pool: KVPool  # kept alive: its memory is theirs

    @classmethod
    def of(cls, config: ModelConfig, layers: int, blocks: int, kind: str, *, random: bool = True) -> "Pool":
        """`kind`: as --kv-cache-dtype, "auto" for bfloat16."""
        some = replace(config, decoder=replace(config.decoder, layers=config.decoder.layers[:layers]))
        pool = KVPool.create(kv_layout(some, "bfloat16", BLOCK, kind), blocks, [(0, layers)])
        kv, scales = StageSlices.of_pool(pool.parts[0], pool_bytes(pool.parts[0])).typed()
        assert isinstance(kv, Tensor), "layers are alike"
        assert scales is None or isinstance(scales, Tensor)
        if random:
            numbers = torch.randn(RANDOM_BYTES)
            stored = (numbers * 30).clamp(-127, 127).to(kv.dtype) if scales is not None else numbers.to(kv.dtype)
            for block in kv.flatten(0, 1):
                begin = int(torch.randint(RANDOM_BYTES - block.numel(), ()))
                block.view(-1).copy_(stored[begin : begin + block.numel()])
            if scales is not None:
                scales.fill_(1 / 30)
        return cls(kv, scales, pool)

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """One layer's part."""
        return self.kv[index], None if self.scales is None else self.scales[index]


def attention_call(config: ModelConfig, kind: str) -> Callable[[], None]:
    """One layer's decode attention, each time over other blocks, until the caches hold none of the first."""
    blocks = CONTEXT // BLOCK
    layout = kv_layout(config, "bfloat16", BLOCK, kind)
    parts = max(1, -(-working_set_bytes() // (BATCH * blocks * layout.slice_bytes(0))))
    kv, scales = Pool.of(config, 1, parts * BATCH * blocks, kind).layer(0)
    tables = torch.randperm(parts * BATCH * blocks).int().view(parts, BATCH, blocks)
    q = torch.randn(BATCH, config.num_heads, config.head_dim).bfloat16()
    starts, lengths = torch.arange(BATCH + 1, dtype=torch.int32), torch.full((BATCH,), CONTEXT, dtype=torch.int32)
    out, scale = torch.empty_like(q), config.head_dim**-0.5
    turns = itertools.cycle([(table, make_plan(kv, table, starts, lengths)) for table in tables])

    def call() -> None:
        table, plan = next(turns)
        paged_attention(q, kv, table, starts, lengths, scale, out, scales=scales, plan=plan)

    return call


def step_call(stage: StageModel, kind: str) -> Callable[[], None]:
    """A whole decode step, logits included."""
    config, blocks = stage.config, CONTEXT // BLOCK
    pool = Pool.of(config, config.num_layers, BATCH * blocks, kind)
    order = torch.randperm(BATCH * blocks).view(BATCH, blocks).tolist()
    parts = [(array("i", [5]).tobytes(), CONTEXT - 1, table) for table in order]

    def call() -> None:
        batch = PackedBatch.build(parts, BLOCK)
        stage.logits(stage.forward(batch.token_ids, batch, pool.kv, scales=pool.scales))

    return call


def in_turns(calls: dict[str, Callable[[], None]], runs: int) -> Iterator[dict[str, float]]:
    """Milliseconds of one call of each, the median of TURNS turns in every run: what disturbs one disturbs all."""
    for call in calls.values():
        call()
    for _ in range(runs):
        turns = [{kind: seconds(call, TURN_S) * 1e3 for kind, call in calls.items()} for _ in range(TURNS)]
        yield {kind: statistics.median(turn[kind] for turn in turns) for kind in calls}


def beside_plain(name: str, found: list[dict[str, float]]) -> Iterator[Row]:
    """Rows of what `in_turns` found."""
    for kind in KINDS:
        pairs = [(times[kind], times["auto"]) for times in found]
        title = f"{name}, {kind} KV, batch {BATCH}, context {CONTEXT}"
        target = TARGET if kind == "int8" else None
        yield paired(title, "ms", pairs, "bfloat16 KV", less_is_better=True, target=target)


def step_rows(shape: str, stage: StageModel, runs: int) -> Iterator[Row]:
    """Whole steps, beside bfloat16 and beside their bound."""
    name, memory = f"decode step, {shape}", weights_memory()
    found, speeds = [], []
    for times in in_turns({kind: step_call(stage, kind) for kind in TYPES}, runs):
        found.append(times)
        speeds.append(read_bytes_per_s(memory))
    yield from beside_plain(name, found)
    for kind, label in TYPES.items():
        nbytes = stage.weight_bytes + BATCH * CONTEXT * kv_layout(stage.config, "bfloat16", BLOCK, kind).token_bytes
        pairs = [(times[kind], nbytes / speed * 1e3) for times, speed in zip(found, speeds, strict=True)]
        yield paired(f"{name}, {label} KV", "ms", pairs, "its bytes read once from memory", less_is_better=True)


def shape_rows(shape: str, runs: int) -> Iterator[Row]:
    """One shape's attention and steps."""
    with tempfile.TemporaryDirectory(prefix="moonpool-kv-types-") as folder:
        path = create(shape, Path(folder) / "model")
        config = load_config(path)
        calls = {kind: attention_call(config, kind) for kind in TYPES}
        yield from beside_plain(f"attention, {shape}", list(in_turns(calls, runs)))
        stage = load_stage(path, config, torch.bfloat16, 0, config.num_layers)
    yield from step_rows(shape, stage, runs)


# --- what a trained model makes of it ---------------------------------------------------------------------------------


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
def predict(stage: StageModel, tokens: list[int], kind: str) -> Predictions:
    """Reads a window chunk by chunk, as prefill does: attention sees what was stored."""
    blocks = list(range(-(-len(tokens) // BLOCK)))
    pool, rows = Pool.of(stage.config, stage.config.num_layers, len(blocks), kind, random=False), []
    for begin in range(0, len(tokens), CHUNK):
        chunk = array("i", tokens[begin : begin + CHUNK]).tobytes()
        batch = PackedBatch.build([(chunk, begin, blocks)], BLOCK)
        rows.append(stage.logits(stage.forward(batch.token_ids, batch, pool.kv, scales=pool.scales)))
    logits = torch.cat(rows)[:-1]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return Predictions(losses, logits.argmax(-1))


def perplexity(found: list[Predictions]) -> float:
    """Over all windows."""
    return float(torch.cat([its.losses for its in found]).double().mean().exp())


def trained_rows(progress: Progress) -> Iterator[Row]:
    """Perplexity and changed predictions."""
    path = trained()
    config = load_config(path)
    stage = load_stage(path, config, torch.bfloat16, 0, config.num_layers)
    texts = windows(path)
    plain = [predict(stage, tokens, "auto") for tokens in texts]
    before = perplexity(plain)
    progress(f"{path.name}: perplexity {before:.4f} over {len(texts)} windows of {WINDOW} tokens with bfloat16 KV")
    for kind in KINDS:
        found = [predict(stage, tokens, kind) for tokens in texts]
        after = perplexity(found)
        others = [float((its.best != other.best).float().mean()) for its, other in zip(found, plain, strict=True)]
        progress(f"{kind} KV: perplexity {after:.4f}, {after / before - 1:+.3%}")
        name = f"{kind} KV, {path.name}"
        yield bounded(f"{name}: perplexity over bfloat16's", "", [after / before], "allowed", WORSE[kind])
        yield bounded(f"{name}: other most likely tokens", "share", [statistics.mean(others)], "allowed", AGREE[kind])


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        progress(f"{row.name}: {row.value:.4g} {row.unit}, {row.ratio:.2f} of {row.limit_name}")

    if options.threads:
        torch.set_num_threads(options.threads)
    for row in trained_rows(progress):
        add(row)
    for shape in options.shapes:
        for row in shape_rows(shape, options.runs):
            add(row)
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help=f"whose decode is timed; {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own); 1 is timed by processor time")


if __name__ == "__main__":
    run("kv_types", measure, flags=flags)
