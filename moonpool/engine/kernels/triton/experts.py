# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Mixtures of experts: all chosen experts' products in one launch, and the weighted sums.

Which rows an expert has is known on the device alone: grids follow from shapes, as those of attention do, so that no
launch waits. `moonpool.engine.kernels.reference` has the contracts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton import device as code
from moonpool.engine.kernels.triton.tiles import padded

_MANY_ROWS = 32
"""Rows of an expert, on average, from which tiles have many."""
_CHUNK = 1024


def expert_linear(
    x: Tensor,  # [T, K], rows dense, stride(0) free
    tokens: Tensor | None,  # [N] int64
    starts: Tensor,  # [experts + 1] int64
    weights: Any,  # ExpertMatrices [N, K]
    out: Tensor,  # [N, outputs], contiguous
    *,
    deterministic: bool,
) -> None:
    """Write each row of `x` by its expert's matrix; see `moonpool.engine.kernels.reference.expert_linear`."""
    rows, outputs = out.shape
    experts, inputs = len(weights.matrices), x.shape[1]
    if not rows or not outputs:
        return
    many = not deterministic and rows >= _MANY_ROWS * experts and x.dtype != torch.float32
    tile_rows, tile_outputs, tile_inputs = (64, 128, 64) if many else (16, 64, 64)
    _expert_product[rows // tile_rows + experts, -(-outputs // tile_outputs)](
        x, tokens, starts, weights.addresses, weights.bias, out, experts, outputs, x.stride(0),
        INPUTS=inputs, ROWS=tile_rows, OUTPUTS=tile_outputs, STEP=tile_inputs,
        WIDE=code.INTERPRETED and x.dtype == torch.bfloat16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def add_weighted(
    results: Tensor,  # [N, n], contiguous
    places: Tensor,  # [T, chosen] int64
    weights: Tensor | None,  # [T, chosen] float32
    out: Tensor,  # [T, n], contiguous
) -> None:
    """Write the weighted sum of each token's rows; see `moonpool.engine.kernels.reference.add_weighted`."""
    tokens, size = out.shape
    if tokens and size:
        chunk = min(_CHUNK, padded(size))
        _add_weighted[tokens, -(-size // chunk)](
            results, places, weights, out, size, CHOSEN=places.shape[1], CHUNK=chunk, enable_fp_fusion=False
        )


@triton.jit(do_not_specialize=("experts",))
def _expert_product(
    x, tokens, starts, addresses, bias, out, experts, outputs, stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one expert's rows; grid (rows / ROWS + experts, outputs / OUTPUTS).

    Expert e has the tiles from starts[e] // ROWS + e on: at least as many as its rows need.
    """
    tile = tl.program_id(0)
    found = 0
    for base in range(0, experts, 128):
        index = base + tl.arange(0, 128)
        begins = tl.load(starts + index, mask=index < experts, other=1 << 40)
        found += tl.sum((begins // ROWS + index <= tile).to(tl.int32), 0)
    expert = found - 1
    begin = tl.load(starts + expert)
    first = (tile - begin // ROWS - expert) * ROWS
    count = tl.load(starts + expert + 1) - begin
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < count
    at = begin + row
    token = at
    if tokens is not None:
        token = tl.load(tokens + at, mask=is_row, other=0)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = output < outputs
    weight = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, STEP):
        k = start + tl.arange(0, STEP)
        there = (k < INPUTS)[None, :]
        rows = tl.load(x + token[:, None] * stride + k[None, :], mask=is_row[:, None] & there, other=0.0)
        columns = tl.load(weight + output[:, None] * INPUTS + k[None, :], mask=is_output[:, None] & there, other=0.0)
        if WIDE:
            rows = rows.to(tl.float32)
            columns = columns.to(tl.float32)
        total = tl.dot(rows, tl.trans(columns), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + expert * outputs + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + at[:, None] * outputs + output[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _add_weighted(results, places, weights, out, size, CHOSEN: tl.constexpr, CHUNK: tl.constexpr):
    """Sum a chunk of one token's rows, each step rounded; grid (tokens, chunks)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = i < size
    total = tl.zeros((CHUNK,), tl.float32)
    for number in tl.static_range(CHOSEN):
        place = tl.load(places + token * CHOSEN + number)
        part = tl.load(results + place * size + i, mask=mask, other=0.0)
        if weights is not None:
            part = (part.to(tl.float32) * tl.load(weights + token * CHOSEN + number)).to(part.dtype)
        total = (total + part.to(tl.float32)).to(part.dtype).to(tl.float32)
    tl.store(out + token * size + i, total.to(out.dtype.element_ty), mask=mask)
