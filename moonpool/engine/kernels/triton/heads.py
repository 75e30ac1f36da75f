# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What lies between a layer's first product and attention, in one launch: norms of heads, RoPE, and the KV write.

`moonpool.engine.kernels.reference` has the contract. Numbers are rounded where the separate operations round them.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton.pool import LARGEST, quantize
from moonpool.engine.kernels.triton.tiles import padded

_ELEMENTS = 1024  # of a program: 8 heads of 128, with 8 elements a thread


class Norms(Protocol):
    """See `moonpool.engine.kernels.kind.HeadNorms`."""

    @property
    def q_weight(self) -> Tensor | None: ...
    @property
    def k_weight(self) -> Tensor | None: ...
    @property
    def q_bias(self) -> Tensor | None: ...
    @property
    def k_bias(self) -> Tensor | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def centred(self) -> bool: ...
    @property
    def wide(self) -> bool: ...
    @property
    def last(self) -> bool: ...


def norm_rope_write(
    qk: Tensor,  # [T, heads + kv_heads, D], rows dense, stride(0) free
    v: Tensor | None,  # [T, kv_heads, D], rows dense, stride(0) free; None: nothing is stored
    out: Tensor,  # [T, heads, D], contiguous
    norms: Norms | None,
    angles: tuple[Tensor, Tensor] | None,  # cos and sin [T, width], qk's type, first half of sin negated
    kv: Tensor | None,
    scales: Tensor | None,
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
) -> None:
    """Norm and rotate queries and keys; write queries to `out`, keys and values to the pool."""
    tokens, heads, head_dim = out.shape
    if not tokens:
        return
    dim, kv_heads = padded(head_dim), qk.shape[1] - heads
    together = min(padded(max(heads, kv_heads)), max(_ELEMENTS // dim, 1))
    cos, sin = (None, None) if angles is None else angles
    width, turns = (0, (0, 0)) if cos is None or sin is None else (cos.shape[1], (cos.stride(0), sin.stride(0)))
    pool, where = {"UNIT": 1, "BLOCK_SIZE": 1, "PLANE": 0, "SCALE_PLANE": 0, "FLOAT8": False, "LARGEST": 0.0}, (0, 0, 0)
    if kv is not None:
        unit, float8 = math.gcd(kv.stride(0), 16), kv.dtype == torch.float8_e4m3fn
        planes, apart = (0, 0) if scales is None else (scales.stride(2), scales.stride(0))
        where = kv.stride(0) // unit, kv.shape[0], apart
        pool = {
            "UNIT": unit, "BLOCK_SIZE": kv.shape[3], "PLANE": kv.stride(2), "SCALE_PLANE": planes,
            "FLOAT8": float8, "LARGEST": LARGEST.get(kv.dtype, 0.0),
        }  # fmt: skip
        kv = kv.view(torch.uint8) if float8 else kv
    parts, kv_parts = -(-heads // together), 0 if kv is None else -(-kv_heads // together)
    weights, norm = _norms(norms, head_dim)
    _norm_rope_write[tokens, parts + 2 * kv_parts](
        qk, v, out, *weights, cos, sin, kv, scales, block_ids, offsets,
        qk.stride(0), 0 if v is None else v.stride(0), *turns, 0.0 if norms is None else norms.eps, *where,
        QUERIES=heads, KV_HEADS=kv_heads, HEADS=together, HEAD_DIM=head_dim, PADDED_DIM=dim, WIDTH=width,
        **norm, **pool, enable_fp_fusion=False,
    )  # fmt: skip


def _norms(norms: Norms | None, head_dim: int) -> tuple[tuple[Tensor | None, ...], dict[str, int | bool]]:
    """Return weights and biases, of queries and of keys, and what is compiled for."""
    if norms is None:
        return (None,) * 4, {"NORMED": False, "WEIGHT": 0, "CENTRED": False, "WIDE": False, "LAST": False}
    weights = norms.q_weight, norms.k_weight, norms.q_bias, norms.k_bias
    by_head = norms.q_weight is not None and norms.q_weight.dim() > 1
    flags = {"CENTRED": norms.centred, "WIDE": norms.wide, "LAST": norms.last}
    return weights, {"NORMED": True, "WEIGHT": head_dim if by_head else 0, **flags}


@triton.jit
def _norm_rope_write(
    qk, v, out, q_weight, k_weight, q_bias, k_bias, cos, sin, kv, scales, block_ids, offsets,
    qk_stride, v_stride, cos_stride, sin_stride, eps, block_units, num_blocks, scale_stride,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr, WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr, WIDE: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PLANE: tl.constexpr, SCALE_PLANE: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Take some of one token's heads; grid (tokens, parts of the queries, then of the keys, then of the values)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    row = qk + token * qk_stride
    if WIDTH:
        cos += token * cos_stride
        sin += token * sin_stride
    dim = tl.arange(0, PADDED_DIM)
    if part < parts:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < QUERIES)[:, None] & (dim < HEAD_DIM)[None, :]
        values = _turned(
            row, head, mask, dim, q_weight, q_bias, cos, sin, eps, HEAD_DIM, WIDTH, NORMED, WEIGHT, CENTRED, WIDE, LAST
        )
        found = values.to(out.dtype.element_ty)
        tl.store(out + (token * QUERIES + head)[:, None] * HEAD_DIM + dim[None, :], found, mask=mask)
    elif kv is not None:
        kv_parts: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
        plane = (part - parts) // kv_parts
        head = (part - parts) % kv_parts * HEADS + tl.arange(0, HEADS)
        mask = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        if plane == 0:
            values = _turned(
                row + QUERIES * HEAD_DIM, head, mask, dim, k_weight, k_bias, cos, sin, eps,
                HEAD_DIM, WIDTH, NORMED, WEIGHT, CENTRED, WIDE, LAST,
            )  # fmt: skip
        else:
            source = v + token * v_stride + head[:, None] * HEAD_DIM + dim[None, :]
            values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        block, offset = tl.load(block_ids + token), tl.load(offsets + token)
        outside = (block < 0) | (block >= num_blocks) | (offset < 0) | (offset >= BLOCK_SIZE)
        stays = head < tl.where(outside, 0, KV_HEADS)
        mask = stays[:, None] & (dim < HEAD_DIM)[None, :]
        of_head = head * 2 + plane
        slot = kv + (block * block_units * UNIT + offset * HEAD_DIM) + of_head[:, None] * PLANE + dim[None, :]
        if scales is None:
            tl.store(slot, values.to(kv.dtype.element_ty), mask=mask)
        else:
            scale = tl.div_rn(tl.max(tl.abs(values), 1), LARGEST)
            divisor = tl.where(scale > 0, scale, 1.0)[:, None]
            stored = quantize(tl.div_rn(values, tl.broadcast_to(divisor, values.shape)), FLOAT8, LARGEST)
            tl.store(slot, stored, mask=mask)
            tl.store(scales + (block * scale_stride + offset) + of_head * SCALE_PLANE, scale, mask=stays)


@triton.jit
def _turned(
    x, head, mask, dim, weight, bias, cos, sin, eps,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr, WEIGHT: tl.constexpr, CENTRED: tl.constexpr,
    WIDE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Return some of one token's heads with norm and rotation, float32 that x's type holds: [heads, dim].

    The first WIDTH elements of a head turn, each with the one that is half of WIDTH away.
    """
    other = tl.where(dim < WIDTH // 2, dim + WIDTH // 2, tl.where(dim < WIDTH, dim - WIDTH // 2, dim))
    at = x + head[:, None] * HEAD_DIM
    values = tl.load(at + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if WIDTH:  # a second load of the same bytes, from the cache: elements do not move between threads
        others = tl.load(at + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED and not LAST:
        mean, factor = _moments(values, mask, eps, HEAD_DIM, CENTRED)
        values = _scaled(values, mean, factor, weight, bias, head, dim, mask, x, HEAD_DIM, WEIGHT, CENTRED, WIDE)
        if WIDTH:
            others = _scaled(others, mean, factor, weight, bias, head, other, mask, x, HEAD_DIM, WEIGHT, CENTRED, WIDE)
    if WIDTH:
        turns = dim < WIDTH
        c = tl.load(cos + dim, mask=turns, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + dim, mask=turns, other=0.0).to(tl.float32)[None, :]
        turned = (values * c + others * s).to(x.dtype.element_ty).to(tl.float32)
        values = tl.where(turns[None, :], turned, values)
    if NORMED and LAST:
        mean, factor = _moments(values, mask, eps, HEAD_DIM, CENTRED)
        values = _scaled(values, mean, factor, weight, bias, head, dim, mask, x, HEAD_DIM, WEIGHT, CENTRED, WIDE)
    return values


@triton.jit
def _moments(values, mask, eps, HEAD_DIM: tl.constexpr, CENTRED: tl.constexpr):
    """Return what is taken off the heads' numbers, and the factor on what is left: each [heads, 1]."""
    mean = tl.zeros_like(tl.sum(values, 1))
    if CENTRED:
        mean = tl.sum(values, 1) / HEAD_DIM
        values = tl.where(mask, values - mean[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)
    return mean[:, None], factor[:, None]


@triton.jit
def _scaled(
    values, mean, factor, weight, bias, head, dim, mask, x,
    HEAD_DIM: tl.constexpr, WEIGHT: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return heads' numbers with their norm, rounded as in `pointwise._norm`; `dim`: which elements they are."""
    dtype: tl.constexpr = x.dtype.element_ty
    if CENTRED:
        values = values - mean
    values = values * factor
    if not WIDE:
        values = values.to(dtype).to(tl.float32)
    if weight is not None:
        place = weight + head[:, None] * WEIGHT + dim[None, :]
        scale = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        values = values * (scale if WIDE else scale.to(dtype).to(tl.float32))
    if bias is not None:
        values = values + tl.load(bias + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    return tl.where(mask, values.to(dtype).to(tl.float32), 0.0)
