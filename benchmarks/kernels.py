"""Attention beside this machine's limits, and every kernel's error against float64.

`python -m benchmarks.kernels [--json]`. Ceilings are measured in the same run, right before or after each figure: bytes
read once from memory, matrix products, exponentials. Inputs are fresh random numbers, outputs NaN before each run. On a
machine with a CUDA device the GPU's figures follow. What can be told without one is in `benchmarks.kernels_errors`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.frame import Progress, Row, paired, run
from benchmarks.kernels_errors import error_rows
from kernels.attention import make_plan, paged_attention, selected
from kernels.native import library

READ_BYTES = 256 << 20
DECODE = ((1, 2048), (1, 32768), (8, 8192), (32, 2048), (32, 8192))
"""(batch, context)"""
DECODE_TARGET, PREFILL_F32, PREFILL_BF16, OVER_BUILTIN = 0.7, 0.5, 0.7, 2.5
POOL_BYTES = 1 << 30
"""Decode contexts that need more are left out."""


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


LLAMA, QWEN = Heads(32, 8, 128), Heads(14, 2, 64)


def seconds(call: Callable[[], object], at_least: float = 0.02) -> float:
    """Seconds of one call, the mean of as many as take `at_least`."""
    # One thread's own time does not count what other processes take on a busy machine.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin, times = clock(), 0
    while True:
        call()
        times += 1
        passed = clock() - begin
        if passed >= at_least:
            return passed / times


def read_bytes_per_s(memory: Tensor) -> float:
    """Bytes per second read once from memory by all threads: the best of ours and torch's sum."""
    native = library.get()
    times = [seconds(memory.sum)]
    if native is not None:
        times.append(seconds(lambda: native.read(memory)))
    return memory.nbytes / min(times)


def paged(shape: Heads, batch: int, context: int, dtype: torch.dtype, block_tokens: int = 16) -> tuple[Tensor, Tensor]:
    """A pool of random numbers, and block tables over it in no order."""
    blocks = -(-context // block_tokens)
    kv = torch.empty(batch * blocks, shape.kv_heads, 2, block_tokens, shape.head_dim, dtype=dtype)
    for part in torch.split(kv, 1024):
        part.copy_(torch.randn(part.shape))
    return kv, torch.randperm(batch * blocks).int().view(batch, blocks)


def decode_row(shape: Heads, batch: int, context: int, dtype: torch.dtype, runs: int, memory: Tensor) -> Row:
    """Decode attention's bytes of KV per second beside what can be read."""
    kv, tables = paged(shape, batch, context, dtype)
    q = torch.randn(batch, shape.heads, shape.head_dim).to(dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    plan = make_plan(kv, tables, starts, lengths)
    out = torch.empty_like(q)

    def call() -> None:
        paged_attention(q, kv, tables, starts, lengths, shape.head_dim**-0.5, out, plan=plan)

    call()
    pairs = []
    for _ in range(runs):
        before = read_bytes_per_s(memory)
        own = kv.nbytes / seconds(call)
        pairs.append((own / 1e9, (before + read_bytes_per_s(memory)) / 2 / 1e9))
    name = f"decode, {name_of(dtype)}, {shape}, batch {batch}, context {context}"
    return paired(name, "GB/s", pairs, "read from memory", target=DECODE_TARGET)


def name_of(dtype: torch.dtype) -> str:
    """Short name of a type."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One sequence's chunk after its cached prefix, with the ceilings to be measured beside it."""

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


def product_seconds_per_flop(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Seconds per floating point operation of one matrix product of torch."""
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    torch.mm(a, b, out=out)
    return seconds(lambda: torch.mm(a, b, out=out)) / (2 * rows * inner * columns)


def exponential_seconds() -> float:
    """Seconds per exponential, all threads together: the best of ours and torch's, in the cache."""
    threads = torch.get_num_threads()
    x = -torch.rand(threads, 4096) * 10
    out = torch.empty_like(x)
    times = [seconds(lambda: torch.exp(x, out=out)) / x.numel()]
    native = library.get()
    if native is not None:
        times.append(seconds(lambda: native.exponentials(x, 100)) / x.numel() / 100)
    return min(times)


def prefill_rows(case: PrefillCase, runs: int) -> list[Row]:
    """Prefill attention beside its ceiling and beside torch's built-in attention."""
    shape, dtype = case.shape, case.dtype
    kv, tables = paged(shape, 1, case.context, dtype)
    q = torch.randn(case.rows, shape.heads, shape.head_dim).to(dtype)
    starts, lengths = torch.tensor([0, case.rows], dtype=torch.int32), torch.tensor([case.context], dtype=torch.int32)
    plan, out = make_plan(kv, tables, starts, lengths), torch.empty_like(q)

    def call() -> None:
        paged_attention(q, kv, tables, starts, lengths, shape.head_dim**-0.5, out, plan=plan)

    call()
    bf16 = dtype == torch.bfloat16
    ceilings, builtin = [], []
    other = _builtin(case, q, kv, tables) if case.rows == case.context else None
    for _ in range(runs):
        own = case.flops / seconds(call)
        if bf16:  # both products at their real inner sizes, then one exponential per pair
            products = product_seconds_per_flop(2048, shape.head_dim, 2048, dtype) * 2 * shape.head_dim
            products += product_seconds_per_flop(2048, 2048, shape.head_dim, dtype) * 2 * shape.head_dim
            ceiling = 4 * shape.head_dim / (products + exponential_seconds())
        else:
            ceiling = 1 / product_seconds_per_flop(2048, 2048, 2048, dtype)
        ceilings.append((own / 1e9, ceiling / 1e9))
        if other is not None:
            builtin.append((own / 1e9, case.flops / seconds(other) / 1e9))
    name = f"prefill, {name_of(dtype)}, {shape}, {case.rows} of {case.context}"
    beside = "its products and exponentials" if bf16 else "matrix product"
    rows = [paired(name, "GFLOP/s", ceilings, beside, target=PREFILL_BF16 if bf16 else PREFILL_F32)]
    if builtin:
        rows.append(paired(name, "GFLOP/s", builtin, "torch's attention", target=OVER_BUILTIN if bf16 else None))
    return rows


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


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    memory = torch.ones(READ_BYTES // 4)
    progress(f"attention on the CPU in bfloat16: {selected('cpu', torch.bfloat16)}, {torch.get_num_threads()} threads")

    def add(row: Row) -> None:
        rows.append(row)
        progress(f"{row.name}: {row.value:.1f} {row.unit}, {row.ratio:.2f} of {row.limit_name}")

    for dtype in (torch.bfloat16, torch.float32):
        for shape in (LLAMA, QWEN):
            for batch, context in DECODE:
                nbytes = batch * context * shape.kv_heads * shape.head_dim * 2 * dtype.itemsize
                if nbytes <= (POOL_BYTES if not options.quick else POOL_BYTES // 4):
                    add(decode_row(shape, batch, context, dtype, options.runs, memory))
    for case in prefill_cases(options.quick):
        for row in prefill_rows(case, options.runs):
            add(row)
    rows += error_rows(progress)
    if torch.cuda.is_available():
        from benchmarks.kernels_gpu import gpu_rows

        rows += gpu_rows(options.runs, progress)
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own); 1 is timed by processor time")


if __name__ == "__main__":
    run("kernels", measure, flags=flags)
