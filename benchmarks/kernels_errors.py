"""Largest error of every kernel against float64, per type and shape class, on fresh random inputs.

Outputs are NaN before each run, so what is not written shows. Errors are
relative to the largest magnitude of the exact result.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.frame import Progress, Row, bounded
from moonpool.engine.kernels import kv_quantization, ops, reference
from moonpool.engine.kernels.arranged_weights import arrange_weight
from moonpool.engine.kernels.attention import paged_attention, write_kv
from moonpool.engine.kernels.memory import WeightArena

ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Results are rounded once or twice to their type; bfloat16's weights are rounded too."""
ALLOWED_QUANTIZED = {torch.int8: 0.03, torch.float8_e4m3fn: 0.12}
"""Against attention over the numbers before they were quantised."""
CLASSES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 17), (1, 700), (1, 2048)],
    "prompt": [(300, 300), (7, 7)],
    "chunk after prefix": [(64, 700), (3, 1100)],
    "mixed": [(1, 40), (50, 600), (1, 513), (130, 130)],
}
HEADS = ((64, 14, 2), (80, 4, 4), (96, 6, 1), (128, 16, 1), (128, 32, 8))
"""(head_dim, heads, kv_heads)"""


def error_rows(progress: Progress, device: str = "cpu") -> list[Row]:
    """The table."""
    generator = torch.Generator().manual_seed(torch.seed() % (1 << 31))
    rows = []
    for name, worst, allowed in _errors(generator, device):
        rows.append(bounded(f"error, {name}", "of the largest", [worst], "allowed", allowed))
    misses = [row.name for row in rows if not row.met]
    progress(
        f"errors against float64: {len(rows)} classes, {', '.join(misses) or 'all'} {'MISSED' if misses else 'met'}"
    )
    return rows


def _errors(generator: torch.Generator, device: str) -> Iterator[tuple[str, float, float]]:
    for dtype, allowed in ALLOWED.items():
        short = str(dtype).removeprefix("torch.")
        for name, sequences in CLASSES.items():
            for head_dim, heads, kv_heads in HEADS:
                worst = attention_error(generator, device, sequences, head_dim, heads, kv_heads, dtype, None)
                yield f"attention, {name}, {short}, {heads}/{kv_heads} heads of {head_dim}", worst, allowed
        for operation, worst in _small_errors(generator, device, dtype):
            yield f"{operation}, {short}", worst, allowed
    for stored, allowed in ALLOWED_QUANTIZED.items():
        worst = attention_error(generator, device, CLASSES["mixed"], 128, 8, 2, torch.bfloat16, stored)
        yield f"attention over {str(stored).removeprefix('torch.')} KV, mixed, bfloat16", worst, allowed


def relative(ours: Tensor, exact: Tensor) -> float:
    """Largest error over the exact result's largest magnitude; infinite when something was not written."""
    worst = float((ours.double().cpu() - exact).abs().max() / exact.abs().max())
    return worst if worst == worst else float("inf")


def attention_error(
    generator: torch.Generator,
    device: str,
    sequences: list[tuple[int, int]],
    head_dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    stored: torch.dtype | None,
) -> float:
    """Error of one mixed batch, its KV written by `write_kv` block after block."""
    block_size = 16
    used = [-(-total // block_size) for _, total in sequences]
    order = torch.randperm(sum(used) + 2, generator=generator)
    kv, scales = _pool(len(order), kv_heads, block_size, head_dim, dtype, stored, device)
    tables = torch.zeros(len(used), max(used), dtype=torch.int32)
    dense = []
    for s, (_, total) in enumerate(sequences):
        tables[s, : used[s]] = order[sum(used[:s]) : sum(used[: s + 1])]
        both = torch.randn(2, total, kv_heads, head_dim, generator=generator).to(dtype)
        position = torch.arange(total)
        where = (tables[s, position // block_size].long().to(device), (position % block_size).to(device))
        write_kv(both[0].to(device), both[1].to(device), kv, *where, scales=scales)
        dense.append(both.double())
    counts = torch.tensor([0, *(rows for rows, _ in sequences)]).cumsum(0).int()
    q = torch.randn(int(counts[-1]), heads, head_dim, generator=generator).to(dtype)
    lengths = torch.tensor([total for _, total in sequences], dtype=torch.int32)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    batch = tables.to(device), counts.to(device), lengths.to(device)
    paged_attention(q.to(device), kv, *batch, head_dim**-0.5, out, scales=scales)
    exact = torch.cat([_exact(q[counts[s] : counts[s + 1]], both, head_dim**-0.5) for s, both in enumerate(dense)])
    return relative(out, exact)


def _pool(
    blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    device: str,
) -> tuple[Tensor, Tensor | None]:
    if stored is None:
        return torch.full((blocks, kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype, device=device), None
    size = kv_quantization.slice_bytes(kv_heads, block_size, head_dim)
    slices = torch.full((blocks, size), 255, dtype=torch.uint8, device=device)
    return kv_quantization.views(slices, stored, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim)


def _exact(q: Tensor, both: Tensor, scale: float) -> Tensor:
    rows, heads = q.shape[:2]
    keys, values = both.transpose(1, 2).repeat_interleave(heads // both.shape[2], dim=1)
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    hidden = torch.ones(rows, keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - rows + 1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.matmul(weights, values).transpose(0, 1)


def _small_errors(generator: torch.Generator, device: str, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def compare(operation: Callable[..., Tensor], exact: Callable[..., None], out: Tensor, *inputs: Tensor) -> float:
        expected = torch.empty(out.shape, dtype=torch.float64)
        exact(*(tensor.double() for tensor in inputs), expected)
        return relative(operation(*(tensor.to(device) for tensor in inputs), out.to(device)), expected)

    for rows in (1, 7, 300):
        nan = torch.full((rows, 896), torch.nan, dtype=dtype)
        yield (
            f"rms_norm, {rows} rows",
            compare(
                lambda x, w, out: ops.rms_norm(x, w, 1e-6, out=out),
                lambda x, w, out: reference.rms_norm(x, None, w, 1e-6, out),
                nan, draw(rows, 896), draw(896),
            ),
        )  # fmt: skip
        yield (
            f"silu_mul, {rows} rows",
            compare(lambda x, out: ops.silu_mul(x, out=out), reference.silu_mul, nan, draw(rows, 1792)),
        )
        heads = torch.full((rows, 7, 128), torch.nan, dtype=dtype)
        yield (
            f"rope, {rows} rows",
            compare(
                lambda x, c, s, out: ops.rope(x, c, s, out=out), reference.rope,
                heads, draw(rows, 7, 128), draw(rows, 128), draw(rows, 128),
            ),
        )  # fmt: skip
    weight, bias = draw(300, 896), draw(300)
    panels = arrange_weight(weight, bias, gated=False, arena=WeightArena()) if device == "cpu" else None
    if panels is None:
        return
    for rows in (1, 5, 16, 40):
        yield (
            f"product, {rows} rows",
            compare(
                lambda x, out: out.copy_(panels.product(x)),
                lambda x, out: reference.linear(x, weight.double(), bias.double(), out),
                torch.full((rows, 300), torch.nan, dtype=dtype), draw(rows, 896),
            ),
        )  # fmt: skip
