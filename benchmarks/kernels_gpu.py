"""The GPU's figures of `benchmarks.kernels`: paged attention beside copies, products and torch's flash attention.

Calls are timed by events, after warming up. Only imported where there is a CUDA device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.device import COPY_BYTES, MATRIX, device_seconds
from benchmarks.frame import Progress, Row, paired
from benchmarks.kernels_errors import error_rows
from kernels.attention import make_plan, paged_attention, selected

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
DECODE = ((32, 4096), (32, 32768), (128, 8192), (256, 4096))
"""(batch, context)"""
PREFILL = ((8192, 8192), (16384, 16384), (4096, 32768))
"""(rows, context)"""
DECODE_TARGET, PREFILL_TARGET, FLASH_TARGET = 0.85, 0.4, 0.9
_DTYPE = torch.bfloat16


def _case(batch: int, rows: int, context: int) -> tuple[Callable[[], object], Tensor, Tensor, Tensor]:
    """Attention over a paged pool: the call, the pool, its tables, the queries."""
    blocks = context // BLOCK_TOKENS
    shape = (batch * blocks, KV_HEADS, 2, BLOCK_TOKENS, HEAD_DIM)
    kv = torch.randn(shape, device="cuda", dtype=_DTYPE)
    tables = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * rows
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    q = torch.randn(batch * rows, HEADS, HEAD_DIM, device="cuda", dtype=_DTYPE)
    plan, out = make_plan(kv, tables, starts, lengths), torch.full_like(q, torch.nan)

    def call() -> object:
        return paged_attention(q, kv, tables, starts, lengths, HEAD_DIM**-0.5, out, plan=plan)

    return call, kv, tables, q


def decode_row(batch: int, context: int, runs: int) -> Row:
    """Bytes of KV per second beside a copy's bytes read and written."""
    call, kv, _, _ = _case(batch, 1, context)
    source = torch.ones(COPY_BYTES // 2, device="cuda", dtype=_DTYPE)
    target = torch.empty_like(source)
    pairs = []
    for _ in range(runs):
        own = kv.nbytes / device_seconds(call)
        pairs.append((own / 1e9, 2 * source.nbytes / device_seconds(lambda: target.copy_(source)) / 1e9))
    name = f"GPU decode, bfloat16, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, batch {batch}, context {context}"
    return paired(name, "GB/s", pairs, "copy", target=DECODE_TARGET)


def prefill_rows(rows: int, context: int, runs: int) -> list[Row]:
    """One sequence's chunk beside a matrix product; a whole prompt also beside flash attention over contiguous keys."""
    call, kv, tables, q = _case(1, rows, context)
    before = context - rows
    flops = 4 * HEAD_DIM * HEADS * (rows * before + rows * (rows + 1) / 2)
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=_DTYPE) for _ in range(2))
    products, flash = [], []
    for _ in range(runs):
        own = flops / device_seconds(call) / 1e12
        products.append((own, 2 * MATRIX**3 / device_seconds(lambda: a @ b) / 1e12))
        if not before:
            flash.append((own, flops / device_seconds(_flash(kv, tables, q)) / 1e12))
    name = f"GPU prefill, bfloat16, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {rows} of {context}"
    found = [paired(name, "TFLOP/s", products, "matrix product", target=PREFILL_TARGET)]
    if flash:
        found.append(paired(name, "TFLOP/s", flash, "torch's flash attention", target=FLASH_TARGET))
    return found


def _flash(kv: Tensor, tables: Tensor, q: Tensor) -> Callable[[], object]:
    dense = kv[tables[0].long()].permute(2, 1, 0, 3, 4).reshape(2, 1, KV_HEADS, -1, HEAD_DIM)
    keys, values = dense.repeat_interleave(HEADS // KV_HEADS, 2).contiguous()
    queries = q.transpose(0, 1)[None].contiguous()

    def call() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    return call


def gpu_rows(runs: int, progress: Progress) -> list[Row]:
    """All rows of the device."""
    progress(f"attention on {torch.cuda.get_device_name()}: {selected('cuda', _DTYPE)}")
    rows = [decode_row(batch, context, runs) for batch, context in DECODE]
    for count, context in PREFILL:
        rows += prefill_rows(count, context, runs)
    for row in rows:
        progress(f"{row.name}: {row.value:.1f} {row.unit}, {row.ratio:.2f} of {row.limit_name}")
    return rows + error_rows(progress, "cuda")
