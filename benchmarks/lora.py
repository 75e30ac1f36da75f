"""LoRA adapters beside the base model: what they cost decode steps and prompts.

`python -m benchmarks.lora [--shape qwen2.5-0.5b] [--json]`. Decode steps at several batch sizes with contexts of 512
tokens, and a prompt of 512 tokens, logits included, random weights in bfloat16. Steps without an adapter, with one
adapter for all sequences, and with a different adapter (up to 8, then in turns) for each sequence take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.frame import Progress, Row, paired, run
from benchmarks.weight_types import BLOCK, Pool, in_turns
from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.engine.models.batch import BatchLoras, PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.lora import StageLora, load_lora
from moonpool.engine.models.random_checkpoint import create, create_lora
from moonpool.engine.models.stage import StageModel

BATCHES, CONTEXT, PROMPT = (1, 8, 32), 512, 512
ADAPTERS, RANK = 8, 16
"""Adapters of this rank on all projections."""


def step_call(stage: StageModel, parts: Sequence[tuple[int, int]], loras: Sequence[StageLora]) -> Callable[[], None]:
    """A step of sequences, each (position, tokens), that take turns through `loras`; none: the base model."""
    each = -(-max(start + tokens for start, tokens in parts) // BLOCK)
    pool = Pool.of(stage.config, len(parts) * each)
    packed = [
        (array("i", [5] * tokens).tobytes(), start, range(i * each, (i + 1) * each))
        for i, (start, tokens) in enumerate(parts)
    ]

    def call() -> None:
        batch = PackedBatch.build(packed, BLOCK)
        if loras:
            of = [loras[i % len(loras)] for i in range(len(parts))]
            batch.loras = BatchLoras(of, batch.query_start.tolist(), "cpu")
        hidden = stage.forward(batch.token_ids, batch, pool.kv)
        stage.logits(hidden[batch.last_rows])

    return call


def flags(parser: argparse.ArgumentParser) -> None:
    """The shape."""
    parser.add_argument(
        "--shape", default="qwen2.5-0.5b", help="named shape of moonpool.engine.models.random_checkpoint"
    )


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for row in lora_rows(options, progress):
        rows.append(row)
        progress(f"{row.name}: {row.value:.4g} {row.unit}, {row.ratio:.2f} of {row.limit_name}")
    return rows


def lora_rows(options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Steps with and without adapters."""
    with tempfile.TemporaryDirectory(prefix="moonpool-lora-") as folder:
        path = create(options.shape, Path(folder) / "model", dtype="bfloat16")
        config = load_config(path)
        stage = load_stage(path, config, torch.bfloat16, 0, config.num_layers)
        loras = []
        for seed in range(ADAPTERS):
            adapter = create_lora(Path(folder) / f"lora{seed}", config, seed, rank=RANK)
            loras.append(load_lora(adapter, read_adapter(adapter).id, config, stage.layers, 0, max_rank=RANK))
    progress(f"{options.shape}: weights of {stage.weight_bytes >> 20} MiB, an adapter of {loras[0].nbytes >> 20}")
    work = {f"decode step, batch {batch}": [(CONTEXT - 1, 1)] * batch for batch in BATCHES}
    work[f"prompt of {PROMPT}"] = [(0, PROMPT)]
    for name, parts in work.items():
        calls = {"none": step_call(stage, parts, ()), "one adapter": step_call(stage, parts, loras[:1])}
        if len(parts) > 1:
            calls["an adapter each"] = step_call(stage, parts, loras)
        found = list(in_turns(calls, options.runs))
        for kind in list(calls)[1:]:
            pairs = [(times[kind], times["none"]) for times in found]
            yield paired(f"{name}, {kind}", "ms", pairs, "no adapter", less_is_better=True)


if __name__ == "__main__":
    run("lora", measure, flags=flags)
