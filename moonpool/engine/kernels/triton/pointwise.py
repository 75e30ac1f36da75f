# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The operations between the matrix products: RMS norm with the residual, RoPE, SiLU times the gate's other half.

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
    rows, size = x.shape
    if rows:
        width = padded(size)
        _rms_norm[(rows,)](
            x, residual, weight, out, x.stride(0), eps, SIZE=size, PADDED=width, enable_fp_fusion=False,
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
def _rms_norm(x, residual, weight, out, x_stride, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Norm one row; grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    mask = i < SIZE
    stored = tl.load(x + row * x_stride + i, mask=mask, other=0.0)
    if residual is not None:
        stay = residual + row * SIZE + i
        stored = (stored.to(tl.float32) + tl.load(stay, mask=mask, other=0.0).to(tl.float32)).to(stored.dtype)
        tl.store(stay, stored, mask=mask)
    wide = stored.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / SIZE
    normed = (wide * tl.rsqrt(mean + eps)).to(stored.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, scaled.to(stored.dtype), mask=mask)


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
