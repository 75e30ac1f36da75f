"""Attention and products beside this machine's ceilings, and every kernel's error against float64.

`python -m benchmarks.kernels [--json]`. Ceilings (`benchmarks.ceilings`) are measured right before and after a figure,
and the higher one counts. Decode's calls go from one part of a large pool to the next, so that its KV comes from memory
and not from a cache; where memory is too small for that, the figure is left out. Inputs are random, outputs NaN before
each run. GPUs are measured by `tools.gpu_check`.
"""

import argparse
import itertools
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ceilings import (
    Shape,
    best_shape,
    beyond_caches,
    exponential_seconds,
    product_flops,
    read_bytes_per_s,
    seconds,
    weights_memory,
    working_set_bytes,
)
from benchmarks.frame import Absent, Progress, Row, paired, run
from benchmarks.kernels_errors import error_rows
from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_weight
from moonpool.engine.kernels.attention import paged_attention, selected
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.plan import make_plan
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


DECODE = ((1, 2048), (1, 32768), (8, 8192), (32, 2048), (32, 8192))
"""(batch, context)"""
DECODE_TARGET, PREFILL_F32, PREFILL_BF16, OVER_BUILTIN = 0.7, 0.5, 0.7, 2.5
POOL_BYTES = 1 << 30
"""Decode contexts that need more are left out."""
RANDOM_ELEMENTS = 1 << 22
"""Random numbers that a pool is filled with, again and again: drawing as many as a pool has takes seconds."""


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


LLAMA, QWEN = Heads(32, 8, 128), Heads(14, 2, 64)


def paged(
    shape: Heads, parts: int, batch: int, context: int, dtype: torch.dtype, block_size: int = 16
) -> tuple[Tensor, Tensor]:
    """A pool of random numbers, and block tables [parts, batch, blocks] over it in no order."""
    blocks = -(-context // block_size)
    kv = torch.empty(parts * batch * blocks, shape.kv_heads, 2, block_size, shape.head_dim, dtype=dtype)
    random = torch.randn(RANDOM_ELEMENTS).to(dtype)
    for piece in torch.split(kv.view(-1), RANDOM_ELEMENTS):
        piece.copy_(random[: piece.numel()])
    return kv, torch.randperm(parts * batch * blocks).int().view(parts, batch, blocks)


def decode_row(shape: Heads, batch: int, context: int, dtype: torch.dtype, runs: int, memory: Tensor) -> Row | Absent:
    """Decode attention's bytes of KV per second beside what can be read from memory."""
    nbytes = kv_bytes(shape, batch, context, dtype)
    parts = max(1, -(-working_set_bytes() // nbytes))
    kv, tables = paged(shape, parts, batch, context, dtype)
    q = torch.randn(batch, shape.heads, shape.head_dim).to(dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    turns = itertools.cycle([(table, make_plan(kv, table, starts, lengths)) for table in tables])

    def call() -> None:
        table, plan = next(turns)
        paged_attention(q, kv, table, starts, lengths, shape.head_dim**-0.5, out, plan=plan)

    call()
    name = f"decode, {name_of(dtype)}, {shape}, batch {batch}, context {context}"
    if not beyond_caches(kv.nbytes):
        return Absent(name, "read from memory", f"{kv.nbytes >> 20} MiB of KV may come from a cache")
    pairs = []
    for _ in range(runs):
        before = read_bytes_per_s(memory)
        own = nbytes / seconds(call)
        pairs.append((own / 1e9, max(before, read_bytes_per_s(memory)) / 1e9))
    return paired(name, "GB/s", pairs, "read from memory", target=DECODE_TARGET)


def kv_bytes(shape: Heads, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes of KV that one decode attention call reads."""
    return batch * context * shape.kv_heads * shape.head_dim * 2 * dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    """Short name of a type."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One sequence's chunk after the cached prefix, with the ceilings to be measured beside."""

    shape: Heads
    rows: int
    context: int
    dtype: torch.dtype

    @property
    def pairs(self) -> float:
        """(query, key) pairs that are seen, over all heads."""
        before = self.context - self.rows
        return self.shape.heads * (self.rows * before + self.rows * (self.rows + 1) / 2)

    @property
    def flops(self) -> float:
        """Of both matrix products."""
        return 4 * self.shape.head_dim * self.pairs


def prefill_rows(case: PrefillCase, product: Shape, runs: int) -> list[Row]:
    """Prefill attention beside the best matrix product, an estimate from its own parts, and torch's attention."""
    shape, dtype = case.shape, case.dtype
    kv, (tables,) = paged(shape, 1, 1, case.context, dtype)
    q = torch.randn(case.rows, shape.heads, shape.head_dim).to(dtype)
    starts, lengths = torch.tensor([0, case.rows], dtype=torch.int32), torch.tensor([case.context], dtype=torch.int32)
    plan, out = make_plan(kv, tables, starts, lengths), torch.full_like(q, torch.nan)

    def call() -> None:
        paged_attention(q, kv, tables, starts, lengths, shape.head_dim**-0.5, out, plan=plan)

    call()
    bf16 = dtype == torch.bfloat16
    products, estimates, builtin = [], [], []
    other = _builtin(case, q, kv, tables) if case.rows == case.context else None
    for _ in range(runs):
        before = product_flops(product, dtype)
        own = case.flops / seconds(call) / 1e9
        products.append((own, max(before, product_flops(product, dtype)) / 1e9))
        if bf16:
            estimates.append((own, parts_flops(shape.head_dim, dtype) / 1e9))
        if other is not None:
            builtin.append((own, case.flops / seconds(other) / 1e9))
    name = f"prefill, {name_of(dtype)}, {shape}, {case.rows} of {case.context}"
    rows = [paired(name, "GFLOP/s", products, "the best matrix product", target=None if bf16 else PREFILL_F32)]
    if estimates:
        rows.append(paired(name, "GFLOP/s", estimates, "its products and exponentials", target=PREFILL_BF16))
    if builtin:
        rows.append(paired(name, "GFLOP/s", builtin, "torch's attention", target=OVER_BUILTIN if bf16 else None))
    return rows


def parts_flops(head_dim: int, dtype: torch.dtype) -> float:
    """An estimate, not a ceiling: torch's products at attention's shapes, then an exponential per (query, key) pair."""
    per_pair = 2 * head_dim / product_flops((2048, head_dim, 2048), dtype)
    per_pair += 2 * head_dim / product_flops((2048, 2048, head_dim), dtype)
    return 4 * head_dim / (per_pair + exponential_seconds())


def _builtin(case: PrefillCase, q: Tensor, kv: Tensor, tables: Tensor) -> Callable[[], object]:
    """Torch's attention over contiguous keys and values, one of each per query head."""
    shape = case.shape
    dense = kv[tables[0].long()].permute(2, 1, 0, 3, 4).reshape(2, shape.kv_heads, -1, shape.head_dim)
    keys, values = dense.repeat_interleave(shape.heads // shape.kv_heads, 1)[:, None]
    queries = q.transpose(0, 1)[None].contiguous()
    return lambda: scaled_dot_product_attention(queries, keys, values, is_causal=True)


def prefill_cases(quick: bool) -> list[PrefillCase]:
    """What is measured; long contexts with fewer heads or rows, as they take long."""
    few = Heads(4, 1, 128)
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        cases += [PrefillCase(few, 2048, 2048, dtype), PrefillCase(few, 1024, 8192, dtype)]
        if not quick:
            cases += [PrefillCase(Heads(7, 1, 64), 2048, 2048, dtype), PrefillCase(few, 8192, 8192, dtype)]
            cases += [PrefillCase(few, 512, 32768, dtype)]
    return cases


def sentence(row: Row | Absent) -> str:
    """What a row says, in words; a ceiling that is beaten is named as none."""
    if isinstance(row, Absent):
        return f"not measured, {row.reason}"
    spread = "one run" if row.spread is None else f"spread {row.spread:.0%}"
    text = f"{row.value:.1f} {row.unit} ({spread}), {row.ratio:.2f} of {row.limit_name}"
    if row.met is False:
        text += f"; misses its target of {row.target:g}"
    if row.ratio > 1 and row.limit_name in ("read from memory", "the best matrix product"):
        text += "; above the ceiling, which therefore is none"
    return text


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row | Absent] = []
    memory = torch.ones(working_set_bytes() // 4)
    progress(f"attention on the CPU in bfloat16: {selected('cpu', torch.bfloat16)}, {torch.get_num_threads()} threads")

    def add(row: Row | Absent) -> None:
        rows.append(row)
        progress(f"{row.name}: {sentence(row)}")

    for dtype in (torch.bfloat16, torch.float32):
        for shape in (LLAMA, QWEN):
            for batch, context in DECODE:
                if kv_bytes(shape, batch, context, dtype) <= (POOL_BYTES if not options.quick else POOL_BYTES // 4):
                    add(decode_row(shape, batch, context, dtype, options.runs, memory))
    shapes = {dtype: best_shape(dtype) for dtype in (torch.float32, torch.bfloat16)}
    progress(f"the best matrix products: {', '.join(f'{name_of(key)} {value}' for key, value in shapes.items())}")
    for case in prefill_cases(options.quick):
        for row in prefill_rows(case, shapes[case.dtype], options.runs):
            add(row)
    weights = weights_memory()
    products = (product_rows(dtype, best, options.runs, weights) for dtype, best in shapes.items())
    for product in itertools.chain(*products, step_rows(options.runs, weights)):
        add(product)
    rows += error_rows(progress)
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own); 1 is timed by processor time")


if __name__ == "__main__":
    run("kernels", measure, flags=flags)
