# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The operations between the matrix products: norms with the residual, RoPE, SiLU times the gate's other half.

Each reads inputs once and writes results once. `moonpool.engine.kernels.reference` has the contracts, rounding
included.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton.tiles import padded

_SILU_CHUNK = 1024


def rms_norm(
    x: Tensor,  # [T, n], rows dense, stride(0) free
    residual: Tensor | None,  # [T, n], contiguous
    weight: Tensor,  # [n]
    eps: float,
    out: Tensor,  # [T, n], contiguous; may be x
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight; `residual`, if given, becomes x + residual and is what is normed."""
    norm(x[:, None], residual, weight, None, eps, out[:, None], centred=False, wide=False)


def norm(
    x: Tensor,  # [T, heads, n], rows dense, the other strides free
    residual: Tensor | None,  # [T, heads, n], contiguous
    weight: Tensor | None,  # [n], or [heads, n]
    bias: Tensor | None,  # [n]
    eps: float,
    out: Tensor,  # [T, heads, n], rows dense, the other strides free; may be x
    *,
    centred: bool,
    wide: bool,
) -> None:
    """See `moonpool.engine.kernels.reference.norm`, with an `out` that may lie among other heads."""
    rows, heads, size = x.shape
    if rows and heads:
        width, by_head = padded(size), weight is not None and weight.dim() > 1
        _norm[rows, heads](
            x, residual, weight, bias, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), heads, eps,
            SIZE=size, PADDED=width, CENTRED=centred, WIDE=wide, BY_HEAD=by_head, enable_fp_fusion=False,
            num_warps=min(max(width // 512, 1), 16),
        )  # fmt: skip


def rope(
    x: Tensor,  # [T, heads, D], rows dense, stride(0) free
    cos: Tensor,  # [T, D], x's type
    sin: Tensor,  # [T, D], x's type, first half negated
    out: Tensor,  # [T, heads, D], rows dense, stride(0) free; may be x
) -> None:
    """Write x * cos + roll(x, D / 2) * sin."""
    tokens, heads, head_dim = x.shape
    if tokens and heads:
        _rope[(tokens,)](
            x, cos, sin, out, x.stride(0), out.stride(0), cos.stride(0), sin.stride(0), heads,
            HALF=head_dim // 2, PADDED_HALF=padded(head_dim // 2), HEADS=min(padded(heads), 8), enable_fp_fusion=False,
        )  # fmt: skip


def silu_mul(
    gate_up: Tensor,  # [T, 2 * n], rows dense: gate, then up
    out: Tensor,  # [T, n], contiguous
) -> None:
    """Write silu(gate) * up."""
    rows, size = out.shape
    if rows and size:
        chunk = min(_SILU_CHUNK, padded(size))
        _silu_mul[rows, -(-size // chunk)](gate_up, out, gate_up.stride(0), size, CHUNK=chunk, enable_fp_fusion=False)


@triton.jit
def _norm(
    x, residual, weight, bias, out, x_row, x_head, out_row, out_head, heads, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Norm one head of a row; grid (rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PADDED)
    mask = i < SIZE
    stored = tl.load(x + row * x_row + head * x_head + i, mask=mask, other=0.0)
    if residual is not None:
        stay = residual + (row * heads + head) * SIZE + i
        stored = (stored.to(tl.float32) + tl.load(stay, mask=mask, other=0.0).to(tl.float32)).to(stored.dtype)
        tl.store(stay, stored, mask=mask)
    values = stored.to(tl.float32)
    if CENTRED:
        values = tl.where(mask, values - tl.sum(values, 0) / SIZE, 0.0)
    mean = tl.sum(values * values, 0) / SIZE
    values = values * tl.rsqrt(mean + eps)
    if not WIDE:
        values = values.to(stored.dtype).to(tl.float32)
    if weight is not None:
        place = weight + head * SIZE + i if BY_HEAD else weight + i
        scale = tl.load(place, mask=mask, other=0.0)
        values = values * (scale.to(tl.float32) if WIDE else scale.to(stored.dtype).to(tl.float32))
    if bias is not None:
        values = values + tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + head * out_head + i, values.to(stored.dtype), mask=mask)


@triton.jit
def _rope(
    x, cos, sin, out, x_stride, out_stride, cos_stride, sin_stride, heads,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate all one token's heads, HEADS at a time; grid (tokens). Both halves are read before either is written."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED_HALF)
    inside = i < HALF
    angle = cos + token * cos_stride + i
    cos_left = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    cos_right = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = sin + token * sin_stride + i
    sin_left = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    sin_right = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        at = head[:, None] * (2 * HALF) + i[None, :]
        mask = (head < heads)[:, None] & inside[None, :]
        left = tl.load(x + token * x_stride + at, mask=mask, other=0.0)
        right = tl.load(x + token * x_stride + at + HALF, mask=mask, other=0.0)
        wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
        new_left = wide_left * cos_left[None, :] + wide_right * sin_left[None, :]
        new_right = wide_right * cos_right[None, :] + wide_left * sin_right[None, :]
        tl.store(out + token * out_stride + at, new_left.to(left.dtype), mask=mask)
        tl.store(out + token * out_stride + at + HALF, new_right.to(left.dtype), mask=mask)


@triton.jit
def _silu_mul(gate_up, out, stride, size, CHUNK: tl.constexpr):
    """Compute a chunk in one row; grid (rows, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = i < size
    gate = tl.load(gate_up + row * stride + i, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + size + i, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + i, (silu * up).to(gate.dtype), mask=mask)
