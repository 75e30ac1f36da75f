"""Products with arranged weights beside memory and the best matrix product, and a whole decode step beside memory.

Calls go from one weight copy to the next, so that few rows read from memory and not from a cache.
"""

import itertools
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ceilings import Shape, product_flops, read_bytes_per_s, seconds, working_set_bytes
from benchmarks.frame import Absent, Row, paired
from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_weight
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel

SIDES = ((896, 1152), (896, 9728), (4864, 896), (512, 2816))
"""(inputs, outputs): matrices of the shapes qwen2.5-0.5b and small."""
FEW, MANY = (1, 2, 8, 14), 512
"""Rows: bound by memory, and by arithmetic."""
OF_MEMORY, OF_PRODUCT = 0.85, 0.85
LAYERS, VOCAB = 8, 32000
"""Of the stage whose decode step is timed, in qwen2.5-0.5b's shape: its weights do not fit into a cache."""
BLOCK, CONTEXT = 16, 128
BATCHES = (1, 8, 32)


def product_rows(dtype: torch.dtype, best: Shape, runs: int, memory: Tensor) -> Iterator[Row | Absent]:
    """Few rows beside memory, and many beside the best matrix product of torch."""
    short = str(dtype).removeprefix("torch.")
    for inputs, outputs in SIDES:
        name = f"product, {short}, {inputs} to {outputs}"
        copies = _copies(inputs, outputs, dtype)
        if not copies:
            yield Absent(name, "read from memory", "there are no native kernels here")
            continue
        nbytes = inputs * outputs * dtype.itemsize
        for rows in FEW:
            pairs = []
            for _ in range(runs):
                before = read_bytes_per_s(memory)
                own = nbytes / _seconds(copies, rows)
                pairs.append((own / 1e9, max(before, read_bytes_per_s(memory)) / 1e9))
            target = OF_MEMORY if rows == 1 else None
            yield paired(f"{name}, {rows} rows", "GB/s", pairs, "read from memory", target=target)
        pairs = []
        for _ in range(runs):
            before = product_flops(best, dtype)
            own = 2 * MANY * inputs * outputs / _seconds(copies, MANY)
            pairs.append((own / 1e9, max(before, product_flops(best, dtype)) / 1e9))
        yield paired(f"{name}, {MANY} rows", "GFLOP/s", pairs, "the best matrix product", target=OF_PRODUCT)


def _copies(inputs: int, outputs: int, dtype: torch.dtype) -> list[ArrangedWeight]:
    arena, weight = WeightArena(), torch.randn(outputs, inputs).to(dtype)
    count = -(-working_set_bytes() // weight.nbytes)
    made = (arrange_weight(weight, None, gated=False, arena=arena) for _ in range(count))
    return [panels for panels in made if panels is not None]


def _seconds(copies: list[ArrangedWeight], rows: int) -> float:
    """Of one product."""
    x, turns = torch.randn(rows, copies[0].structure.inputs).to(copies[0].dtype), itertools.cycle(copies)
    return seconds(lambda: next(turns).product(x), at_least=0.1)


def step_rows(runs: int, memory: Tensor) -> Iterator[Row]:
    """Weights that decode steps of a whole stage read per second, logits included, beside memory."""
    with tempfile.TemporaryDirectory(prefix="moonpool-step-") as folder:
        overrides = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB}
        path = create("qwen2.5-0.5b", Path(folder) / "model", overrides=overrides)
        stage = load_stage(path, load_config(path), torch.bfloat16, 0, LAYERS)
    for batch in BATCHES:
        pairs = []
        for _ in range(runs):
            before = read_bytes_per_s(memory)
            own = stage.weight_bytes / _step_seconds(stage, batch)
            pairs.append((own / 1e9, max(before, read_bytes_per_s(memory)) / 1e9))
        target = OF_MEMORY if batch == 1 else None
        yield paired(f"decode step, bfloat16, batch {batch}", "GB/s", pairs, "read from memory", target=target)


def _step_seconds(stage: StageModel, batch: int) -> float:
    config, blocks = stage.config, CONTEXT // BLOCK
    pool = torch.zeros(LAYERS, batch * blocks, config.num_kv_heads, 2, BLOCK, config.head_dim, dtype=torch.bfloat16)
    token = array("i", [5]).tobytes()
    parts = [(token, CONTEXT - 1, range(i * blocks, (i + 1) * blocks)) for i in range(batch)]

    def step() -> None:
        packed = PackedBatch.build(parts, BLOCK)
        stage.logits(stage.forward(packed.token_ids, packed, pool))

    step()
    return seconds(step, at_least=0.3)
