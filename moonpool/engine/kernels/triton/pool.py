# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Writes into the paged pool: new keys and values, plain or quantised, and copies of whole blocks.

`moonpool.engine.kernels.reference` has the contracts. Here, slots outside the pool (a negative block, say, for the
padding of a captured graph) are skipped: a kernel cannot raise.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton.tiles import padded

#: Largest magnitude of a stored value.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_CHUNK_BYTES = 16384  # per `copy_blocks` program: 128 threads with 8 loads of 16 bytes each


def write_kv(
    k: Tensor,  # [T, kv_heads, D], rows dense, stride(0) free
    v: Tensor | None,  # [T, kv_heads, D], rows dense, stride(0) free; None where kv has one plane
    kv: Tensor,
    scales: Tensor | None,
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
) -> None:
    """Store T tokens' keys and values, token i in slot offsets[i] of block block_ids[i]."""
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    unit, planes = math.gcd(kv.stride(0), 16), kv.shape[2]
    v = k if v is None else v
    where = (k.stride(0), v.stride(0), kv.stride(0) // unit, kv.shape[0])
    shape = {
        "UNIT": unit, "HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": kv.shape[3], "PLANES": planes,
        "enable_fp_fusion": False,
    }  # fmt: skip
    if scales is None:
        _write[(tokens,)](k, v, kv, block_ids, offsets, *where, **shape, PADDED=padded(kv_heads * head_dim))
    else:
        float8 = kv.dtype == torch.float8_e4m3fn
        _write_quantized[tokens, kv_heads, planes](
            k, v, kv.view(torch.uint8) if float8 else kv, scales, block_ids, offsets, *where, scales.stride(0),
            PLANE=kv.stride(2), SCALE_PLANE=scales.stride(2), **shape,
            PADDED_DIM=padded(head_dim), FLOAT8=float8, LARGEST=LARGEST[kv.dtype],
        )  # fmt: skip


def copy_blocks(
    pool: Tensor,  # [layers, blocks, ...], a block dense, strides of layers and blocks free
    source: Tensor,  # [n] int64
    target: Tensor,  # [n] int64, none twice and none in `source`
) -> None:
    """Copy block source[i] to block target[i] in every layer."""
    layers, blocks = pool.shape[:2]
    copies, size = source.shape[0], math.prod(pool.shape[2:]) * pool.element_size()
    if not copies or not layers or not size:
        return
    strides = [stride * pool.element_size() for stride in pool.stride()[:2]]
    # Bytes are bytes: they are moved in the widest words in which blocks begin and end.
    width = math.gcd(8, size, pool.data_ptr(), *strides)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    flat = pool.as_strided((layers, blocks, size // pool.element_size()), (*pool.stride()[:2], 1))
    chunk = min(_CHUNK_BYTES // width, padded(size // width))
    _copy[copies, -(-size // width // chunk), layers](
        flat.view(word), source, target, strides[0] // width, strides[1] // width, size // width, blocks,
        CHUNK=chunk, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _write(
    k, v, kv, block_ids, offsets, k_stride, v_stride, block_units, num_blocks,
    UNIT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PLANES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values; grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + token)
    offset = tl.load(offsets + token)
    if (block < 0) | (block >= num_blocks) | (offset < 0) | (offset >= BLOCK_SIZE):
        return
    i = tl.arange(0, PADDED)
    mask = i < HEADS * HEAD_DIM
    # [kv_heads, planes, block_size, head_dim] within the block
    head = i // HEAD_DIM * (PLANES * BLOCK_SIZE * HEAD_DIM)
    slot = block * block_units * UNIT + offset * HEAD_DIM + head + i % HEAD_DIM
    tl.store(kv + slot, tl.load(k + token * k_stride + i, mask=mask), mask=mask)
    if PLANES == 2:
        tl.store(kv + slot + BLOCK_SIZE * HEAD_DIM, tl.load(v + token * v_stride + i, mask=mask), mask=mask)


@triton.jit
def quantize(x, FLOAT8: tl.constexpr, LARGEST: tl.constexpr):
    """Return `x`, float32, in the pool's type: to nearest even, saturated. Float8 as bits, on any device."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if FLOAT8:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # From 2^-6 on: 3 bits of mantissa stay, a carry may raise the exponent; the exponents' biases differ by 120.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below, steps of 2^-9: adding and taking away 1.5 * 2^23 rounds to whole numbers.
        small = ((tl.abs(x) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
        code = tl.where(magnitude < 0x3C800000, small, normal)
        stored = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        stored = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    return stored


@triton.jit
def _write_quantized(
    k, v, kv, scales, block_ids, offsets, k_stride, v_stride, block_units, num_blocks, scale_stride,
    PLANE: tl.constexpr, SCALE_PLANE: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PLANES: tl.constexpr, PADDED_DIM: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store one head's key or value for one token, and the scale; grid (tokens, kv_heads, planes)."""
    token = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1) * PLANES + tl.program_id(2)
    block = tl.load(block_ids + token)
    offset = tl.load(offsets + token)
    if (block < 0) | (block >= num_blocks) | (offset < 0) | (offset >= BLOCK_SIZE):
        return
    source = k + token * k_stride
    if tl.program_id(2) == 1:
        source = v + token * v_stride
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < HEAD_DIM
    numbers = tl.load(source + tl.program_id(1) * HEAD_DIM + dims, mask=inside, other=0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(numbers), 0), LARGEST)
    divisor = tl.where(scale > 0, scale, 1.0)
    stored = quantize(tl.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape)), FLOAT8, LARGEST)
    slot = block * block_units * UNIT + plane * PLANE + offset * HEAD_DIM
    tl.store(kv + slot + dims, stored, mask=inside)
    tl.store(scales + block * scale_stride + plane * SCALE_PLANE + offset, scale)


@triton.jit
def _copy(pool, source, target, layer_stride, block_stride, size, num_blocks, CHUNK: tl.constexpr):
    """Copy a chunk of one block in one layer; grid (copies, chunks, layers)."""
    begin = tl.load(source + tl.program_id(0))
    end = tl.load(target + tl.program_id(0))
    if (begin < 0) | (begin >= num_blocks) | (end < 0) | (end >= num_blocks):
        return
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = i < size
    layer = pool + tl.program_id(2).to(tl.int64) * layer_stride
    tl.store(layer + end * block_stride + i, tl.load(layer + begin * block_stride + i, mask=mask), mask=mask)
