# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""An indexer's choice: sums of all keys that a row sees, and the places of the highest.

`moonpool.engine.kernels.sparse` has the contract. Lengths and tables stay on the device: launches follow from shapes
alone and can be captured. A row's sums and choice have the same bits whatever else is in the batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton import device as code
from moonpool.engine.kernels.triton.tiles import limits_of, padded, part_keys

SUM_BYTES = 32 << 20
"""Sums of some rows that are held at a time."""
_TILE, _FLOAT32_TILE = (64, 4), (16, 8)
"""Keys of a step, and a program's warps."""
_LANES = 4096  # sums that a program looks at together

_PLAIN, _FLOAT8 = tl.constexpr(code.PLAIN), tl.constexpr(code.FLOAT8)


def choose_keys(
    q: Tensor,  # [T, heads, D], rows dense, stride(0) free
    weights: Tensor,  # [T, heads] float32, contiguous
    kv: Tensor,  # [blocks, 1, 1, block_size, D]
    scales: Tensor | None,  # [blocks, 1, 1, block_size] float32, of quantised KV
    block_tables: Tensor,  # [S, max_blocks] int32
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    longest: int,
    places: Tensor,  # [T, topk] int32, contiguous
    numbers: Tensor,  # [T] int32
) -> None:
    """Write the places of the keys that each row sees, in rising order of tokens, then 0; and how many.

    `longest`: the most tokens that any sequence has (also in replays).
    """
    (tokens, heads, head_dim), block_size = q.shape, kv.shape[3]
    if not tokens:
        return
    limits, unit = limits_of(q.device), math.gcd(kv.stride(0), 16)
    stored = code.PLAIN if scales is None else code.INT8 if kv.dtype == torch.int8 else code.FLOAT8
    longest = min(longest, block_tables.shape[1] * block_size)
    keys, warps = _FLOAT32_TILE if q.dtype == torch.float32 else _TILE
    each = min(tokens, max(1, SUM_BYTES // (4 * longest)))
    sums = torch.empty((each, longest), dtype=torch.float32, device=q.device)
    lists = block_tables, query_start, context_lens
    for first in range(0, tokens, each):
        rows = min(each, tokens - first)
        part = part_keys(rows, longest, limits.processors, keys)
        numbers_of_lists = len(context_lens), block_tables.stride(0), first
        _sum_by_key[rows, -(-longest // part)](
            q, weights, kv.view(torch.uint8) if stored == code.FLOAT8 else kv, scales, *lists, sums,
            scale, *numbers_of_lists, longest, part, q.stride(0), kv.stride(0) // unit,
            0 if scales is None else scales.stride(0),
            HEADS=heads, ROWS=max(padded(heads), 16), HEAD_DIM=head_dim, PADDED_DIM=max(padded(head_dim), 16),
            BLOCK_SIZE=block_size, KEYS=keys, UNIT=unit, KV=stored, NATIVE=limits.float8, PRECISION="ieee",
            WIDE=code.INTERPRETED and q.dtype == torch.bfloat16, enable_fp_fusion=False, num_warps=warps,
        )  # fmt: skip
        _choose[(rows,)](
            sums, *lists, places, numbers, *numbers_of_lists, longest,
            TOPK=places.shape[1], BLOCK_SIZE=block_size, LANES=_LANES, enable_fp_fusion=False, num_warps=8,
        )  # fmt: skip


@triton.jit
def _seen(starts, lengths, num_seqs, row):
    """Return a row's sequence, and how many keys the row sees."""
    count = 0
    for base in range(0, num_seqs, 128):
        index = base + tl.arange(0, 128)
        begin = tl.load(starts + index, mask=index < num_seqs, other=1 << 30)
        count += tl.sum((begin <= row).to(tl.int32), 0)
    seq = count - 1
    return seq, tl.load(lengths + seq) - (tl.load(starts + seq + 1) - 1 - row)


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "first", "width", "part"),
    do_not_specialize_on_alignment=("tables", "starts", "lengths"),
)
def _sum_by_key(
    q, weights, kv, scales, tables, starts, lengths, sums,
    scale, num_seqs, table_stride, first, width, part, q_stride, block_units, scale_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, KV: tl.constexpr, NATIVE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the sums of `part` keys for one row, all heads together; grid (rows, parts)."""
    row = tl.program_id(0)
    seq, seen = _seen(starts, lengths, num_seqs, first + row)
    begin = tl.program_id(1) * part
    if begin >= seen:
        return
    heads = tl.arange(0, ROWS)
    of_row = (first + row).to(tl.int64)
    query = code._load(q + of_row * q_stride + heads * HEAD_DIM, heads < HEADS, HEAD_DIM, PADDED_DIM, True)
    if WIDE:
        query = query.to(tl.float32)
    weight = tl.load(weights + of_row * HEADS + heads, mask=heads < HEADS, other=0.0)[:, None]
    table = tables + seq.to(tl.int64) * table_stride
    to = sums + row.to(tl.int64) * width
    for start in range(begin, tl.minimum(begin + part, seen), KEYS):
        keys = start + tl.arange(0, KEYS)
        loaded = keys < seen
        block = tl.load(table + keys // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)
        inside = keys % BLOCK_SIZE
        found = code._load(kv + block * block_units * UNIT + inside * HEAD_DIM, loaded, HEAD_DIM, PADDED_DIM, True)
        found = tl.trans(code._widen(found, query.dtype, KV, NATIVE))
        scores = tl.dot(query, found, input_precision=PRECISION) * scale
        if KV != _PLAIN:
            factor = tl.load(scales + block * scale_stride + inside, mask=loaded, other=0.0)
            if KV == _FLOAT8 and not NATIVE:
                factor *= 256.0
            scores *= factor[None, :]
        total = tl.sum(tl.maximum(scores, 0.0) * weight, 0)
        tl.store(to + keys, tl.where(total == 0.0, 0.0, total), mask=loaded)  # no zero below another


@triton.jit
def _ordered(words, at, inside):
    """Return numbers of 32 bits without sign in the order of floats; 0 where nothing is loaded."""
    bits = tl.load(words + at, mask=inside, other=-1)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "first", "width"),
    do_not_specialize_on_alignment=("tables", "starts", "lengths"),
)
def _choose(
    sums, tables, starts, lengths, places, numbers, num_seqs, table_stride, first, width,
    TOPK: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Find the least sum that is chosen, 8 bits at a time, then write the places of what is chosen; grid (rows,)."""
    row = tl.program_id(0)
    seq, seen = _seen(starts, lengths, num_seqs, first + row)
    table = tables + seq.to(tl.int64) * table_stride
    of_row = (first + row).to(tl.int64)
    words = (sums + row.to(tl.int64) * width).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, LANES)
    digits = tl.arange(0, 256)
    count = tl.minimum(seen, TOPK)
    tl.store(numbers + of_row, count)
    goal = count  # how many of those that begin with `least`'s bits are chosen
    least = tl.full((), 0, tl.uint32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        found = tl.zeros((256,), tl.int32)
        for begin in range(0, seen, LANES):
            value = _ordered(words, begin + lanes, begin + lanes < seen)
            # Digit 0 may count others, too: all are at least 0.
            among = (value ^ least) >> shift >> 8 == 0
            found += tl.histogram(tl.where(among, (value >> shift) & 255, 0).to(tl.int32), 256)
        digit = tl.sum((tl.cumsum(found, 0, reverse=True) >= goal).to(tl.int32), 0) - 1
        goal -= tl.sum(tl.where(digits > digit, found, 0), 0)
        least |= digit.to(tl.uint32) << shift
    taken = 0
    equals = 0
    to = places + of_row * TOPK
    for begin in range(0, seen, LANES):
        token = begin + lanes
        inside = token < seen
        value = _ordered(words, token, inside)
        equal = (inside & (value == least)).to(tl.int32)
        chosen = inside & ((value > least) | ((equal == 1) & (equals + tl.cumsum(equal, 0) <= goal)))
        one = chosen.to(tl.int32)
        block = tl.load(table + token // BLOCK_SIZE, mask=chosen, other=0)
        tl.store(to + taken + tl.cumsum(one, 0) - 1, block * BLOCK_SIZE + token % BLOCK_SIZE, mask=chosen)
        taken += tl.sum(one, 0)
        equals += tl.sum(equal, 0)
    for begin in range(count, TOPK, LANES):
        tl.store(to + begin + lanes, 0, mask=begin + lanes < TOPK)
