# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products with packed weights: codes become numbers in the product's loop. `kernels.packed` has the arithmetic.

Rows are bytes with a scale for each chunk of 32 inputs. A chunk's sum is a whole number, which tensor cores compute
from bytes; chunks are added in order, so that a row's result does not depend on the other rows. Codes that stand for
floats multiply rows as they are, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""Of `moonpool.engine.kernels.packed`, which this package does not import."""
_ROW_CHUNKS = 32
_FEW_ROWS = 16
_MIDDLE = 128
"""What is taken off codes of 8 bits, which then are bytes with a sign."""
_HALF_EVEN = tl.constexpr(1.5 * 2**23)
"""Added to a number and taken off again, rounds the number as torch does."""
_CHUNK = tl.constexpr(CHUNK)


def packed_linear(
    x: Tensor,  # [M, K], rows dense, stride(0) free
    weight: Any,  # PackedTensor [N, K], as `moonpool.engine.weights.packed.PackedWeight.for_products` gives it
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], contiguous
) -> None:
    """Write x @ weight.T + bias; see `moonpool.engine.kernels.packed.packed_linear`."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if not rows or not outputs:
        return
    chunks, part = inputs // CHUNK, min(weight.group, CHUNK)
    few = rows <= _FEW_ROWS
    tile_rows, tile_outputs = (16, 32) if few else (64, 64)
    if weight.floats:
        _packed_floats[-(-outputs // tile_outputs), -(-rows // tile_rows)](
            x, weight.codes, weight.scales, weight.values, bias, out, rows, outputs, chunks, x.stride(0),
            BITS=weight.bits, GROUP=weight.group, PART=part, GROUPS=weight.scales.shape[1],
            ROWS=tile_rows, OUTPUTS=tile_outputs, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return
    numbers = torch.empty((rows, inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    sums = torch.empty((rows, inputs // part), dtype=torch.int32, device=x.device)
    _bytes_of_rows[rows, -(-chunks // _ROW_CHUNKS)](
        x, numbers, scales, sums, x.stride(0), chunks, PART=part, CHUNKS=_ROW_CHUNKS, enable_fp_fusion=False
    )
    units, offset_units = weight.units, weight.offset_units
    values = None if weight.values is None else weight.values.to(torch.int8)
    shift = _MIDDLE if weight.bits == 8 else 0
    _packed_product[-(-outputs // tile_outputs), -(-rows // tile_rows)](
        numbers, scales, sums, weight.codes, weight.scales, units, weight.offsets, offset_units, values, bias, out,
        rows, outputs, chunks,
        BITS=weight.bits, GROUP=weight.group, PART=part, SHIFT=shift, ZERO=0 if values is not None else weight.zero,
        GROUPS=weight.scales.shape[1], UNITS=1 if units is None else units.shape[1],
        OFFSET_UNITS=1 if offset_units is None else offset_units.shape[1],
        ROWS=tile_rows, OUTPUTS=tile_outputs, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _bytes_of_rows(x, numbers, scales, sums, stride, chunks, PART: tl.constexpr, CHUNKS: tl.constexpr):
    """Compute some chunks of a row; grid (rows, chunks / CHUNKS)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    there = (chunk < chunks)[:, None] & (at >= 0)
    given = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    most = tl.max(tl.where(given != given, float("inf"), tl.abs(given)), 1)
    scale = tl.div_rn(most, tl.full((CHUNKS,), 127.0, tl.float32))
    some = (most > 1e-30) & (most < float("inf"))
    divisor = tl.where(some, scale, 1.0)[:, None] + tl.zeros((CHUNKS, _CHUNK), tl.float32)
    whole = (tl.div_rn(tl.where(some[:, None], given, 0.0), divisor) + _HALF_EVEN) - _HALF_EVEN
    tl.store(numbers + row * chunks * _CHUNK + at, whole.to(tl.int8), mask=there)
    tl.store(scales + row * chunks + chunk, scale, mask=chunk < chunks)
    parts: tl.constexpr = _CHUNK // PART
    found = tl.sum(tl.reshape(whole.to(tl.int32), (CHUNKS, parts, PART)), 2)
    to = chunk[:, None] * parts + tl.arange(0, parts)[None, :]
    tl.store(sums + row * chunks * parts + to, found, mask=(chunk < chunks)[:, None] & (to >= 0))


@triton.jit
def _packed_product(
    numbers, scales, sums, codes, weight_scales, units, offsets, offset_units, values, bias, out, rows, outputs, chunks,
    BITS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, SHIFT: tl.constexpr, ZERO: tl.constexpr,
    GROUPS: tl.constexpr, UNITS: tl.constexpr, OFFSET_UNITS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile; grid (outputs / OUTPUTS, rows / ROWS)."""
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_output, is_row = output < outputs, row < rows
    k = tl.arange(0, _CHUNK)
    parts: tl.constexpr = _CHUNK // PART
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for chunk in range(chunks):
        x = tl.load(numbers + (row * chunks + chunk)[:, None] * _CHUNK + k[None, :], mask=is_row[:, None], other=0)
        if BITS == 4:
            pair = tl.arange(0, _CHUNK // 2)
            at = codes + (output * chunks + chunk)[:, None] * (_CHUNK // 2) + pair[None, :]
            both = tl.load(at, mask=is_output[:, None], other=0)
            code = tl.interleave(both & 15, both >> 4)
        else:
            at = codes + (output * chunks + chunk)[:, None] * _CHUNK + k[None, :]
            code = tl.load(at, mask=is_output[:, None], other=0)
        if values is not None:  # noqa: SIM108  # the compiler knows one of the two
            whole = tl.load(values + code.to(tl.int32))
        else:
            whole = (code.to(tl.int16) - SHIFT).to(tl.int8)
        row_scale = tl.load(scales + row * chunks + chunk, mask=is_row, other=0.0)
        for part in tl.static_range(parts):
            some = x
            if parts > 1:
                some = tl.where((k // PART == part)[None, :], x, 0)
            found = tl.dot(some, tl.trans(whole), out_dtype=tl.int32)
            sum_ = tl.load(sums + (row * chunks + chunk) * parts + part, mask=is_row, other=0)
            if ZERO != SHIFT:
                found -= (sum_ * (ZERO - SHIFT))[:, None]
            group = (chunk * _CHUNK + part * PART) // GROUP
            scale = tl.load(weight_scales + output * GROUPS + group, mask=is_output, other=0.0).to(tl.float32)
            if units is not None:
                unit = units + output * UNITS + group // (GROUPS // UNITS)
                scale *= tl.load(unit, mask=is_output, other=0.0).to(tl.float32)
            total += found.to(tl.float32) * (row_scale[:, None] * scale[None, :])
            if offsets is not None:
                offset = tl.load(offsets + output * GROUPS + group, mask=is_output, other=0.0).to(tl.float32)
                if offset_units is not None:
                    unit = offset_units + output * OFFSET_UNITS + group // (GROUPS // OFFSET_UNITS)
                    offset *= tl.load(unit, mask=is_output, other=0.0).to(tl.float32)
                total += (row_scale * sum_.to(tl.float32))[:, None] * offset[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * outputs + output[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _packed_floats(
    x, codes, weight_scales, values, bias, out, rows, outputs, chunks, stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows that stay as they are, by codes that stand for floats; grid as `_packed_product`'s."""
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_output, is_row = output < outputs, row < rows
    k = tl.arange(0, _CHUNK)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for chunk in range(chunks):
        at = x + row[:, None] * stride + chunk * _CHUNK + k[None, :]
        given = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
        if BITS == 4:
            pair = tl.arange(0, _CHUNK // 2)
            at = codes + (output * chunks + chunk)[:, None] * (_CHUNK // 2) + pair[None, :]
            both = tl.load(at, mask=is_output[:, None], other=0)
            code = tl.interleave(both & 15, both >> 4)
        else:
            at = codes + (output * chunks + chunk)[:, None] * _CHUNK + k[None, :]
            code = tl.load(at, mask=is_output[:, None], other=0)
        weight = tl.load(values + code.to(tl.int32))
        for part in tl.static_range(_CHUNK // PART):
            some = given
            if PART < _CHUNK:
                some = tl.where((k // PART == part)[None, :], given, 0.0)
            found = tl.dot(some, tl.trans(weight), input_precision="ieee")
            group = (chunk * _CHUNK + part * PART) // GROUP
            scale = tl.load(weight_scales + output * GROUPS + group, mask=is_output, other=0.0).to(tl.float32)
            total += found * scale[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * outputs + output[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
