# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Layers with a recurrent state: the convolution over the last tokens, and the scan.

A program has a part of one sequence's state for itself, from the sequence's first row to its last: some channels of the
convolution, or some value elements of a head. So it reads the state before the step, goes over the rows, and writes the
state behind each block. Nothing is looked at on the host: places follow from lengths and tables on the device.

Rows of a prompt are computed CHUNK together, at absolute positions: a row has the same bits whatever else is in the
batch. `moonpool.engine.models.recurrent` has the arithmetic in plain torch, and the meaning of states.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moonpool.engine.kernels.triton import CHUNK
from moonpool.engine.kernels.triton import device as code
from moonpool.engine.kernels.triton.tiles import limits_of, padded

_CONV_ROWS, _CONV_CHANNELS = 16, 64
_ONE_ROW, _ROWS = (8192, 8), (4096, 4)
"""Elements of the state that a program holds, and its warps: for sequences with one row, and with several."""
_MORE_WARPS = 8
"""Warps for several rows where a program has more to hold: keys of more than 128 elements, or a decay of each."""


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Where the states of a step's sequences lie, on the device; row `first` of the step is computed as row 0."""

    pool: Tensor  # [slots, elements] float32, slots apart
    before: Tensor  # [S, elements] float32: takes the states before the step, or what a convolution needs of them
    starts: Tensor  # [S + 1] int32: rows of sequence s are starts[s] .. starts[s + 1]
    lengths: Tensor  # [S] int32: tokens with the step's
    tables: Tensor  # [S, max_blocks] int32: each block's slot
    slots: Tensor  # [rows of the step] int64: the slot of each row's block; -1: the state is not kept
    block_size: int
    first: int = 0
    keep: bool = True
    """Whether the scan's states before the step are wanted, too."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """The heads of a scan, and where a row has them.

    `delta`: the delta rule, with queries and keys of length 1; else values count by their step, and `skip` times the
    value is added to the result. `scaled`: queries are divided by the root of `key_dim`. `queries`, `keys`, `values`:
    the first element of each in a row. `in_turn`: head h of the values has key head h % key_heads, else each key head
    has consecutive ones. `offset`: of the scan's state within a sequence's.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    scaled: bool
    in_turn: bool
    queries: int
    keys: int
    values: int
    offset: int


def convolve(
    x: Tensor,  # [T, channels], rows dense
    weight: Tensor,  # [channels, taps], contiguous
    bias: Tensor | None,  # [channels]
    places: StatePlaces,
    out: Tensor,  # [T, channels], contiguous
    *,
    silu: bool,
    one_row: bool,
) -> None:
    """Write each row's convolution with the rows before, and keep the last inputs as the states' first elements.

    `silu`: the result's SiLU. `one_row`: every sequence has one row.
    """
    channels, taps = weight.shape
    sequences = places.lengths.shape[0]
    if not x.shape[0]:
        return
    width = min(padded(channels), _CONV_CHANNELS)
    _convolve[sequences, -(-channels // width)](
        x, weight, bias, out, *_tensors(places), x.stride(0), *_numbers(places), channels,
        TAPS=taps, ROWS=1 if one_row else _CONV_ROWS, WIDTH=width, BLOCK_SIZE=places.block_size, SILU=silu,
        enable_fp_fusion=False,
    )  # fmt: skip


def scan(
    mixed: Tensor,  # [T, channels], contiguous: queries, keys and values
    decay: Tensor,  # [T, heads] or [T, heads, key_dim] float32: logarithms
    step: Tensor | None,  # [T, heads] float32; None: ones
    skip: Tensor | None,  # [heads] float32
    places: StatePlaces,
    shape: ScanShape,
    out: Tensor,  # [T, heads * value_dim], contiguous
    *,
    singles: int | None,
) -> None:
    """Write each row's result, and states behind blocks; `singles`: sequences with one row, if the host knows."""
    sequences = places.lengths.shape[0]
    key_dim, value_dim = max(padded(shape.key_dim), 16), max(padded(shape.value_dim), 16)
    decay, step = decay.contiguous(), None if step is None else step.contiguous()
    fine = decay.dim() == 3
    counts = (1, 1) if singles is None else (singles, sequences - singles)
    for one_row, count in zip((True, False), counts, strict=True):
        if not count or not mixed.shape[0]:
            continue
        elements, warps = _ONE_ROW if one_row else _ROWS
        if not one_row and (fine or key_dim > 128):
            warps = _MORE_WARPS
        width = min(value_dim, max(elements // key_dim, 16))
        _scan[sequences, shape.heads, -(-shape.value_dim // width)](
            mixed, decay, step, skip, out, *_tensors(places), mixed.stride(0), *_numbers(places),
            shape.key_heads, shape.offset,
            HEADS=shape.heads, SHARE=shape.heads // shape.key_heads, IN_TURN=shape.in_turn,
            KEY_DIM=shape.key_dim, PADDED_KEY=key_dim, VALUE_DIM=shape.value_dim, WIDTH=width,
            QUERIES=shape.queries, KEYS=shape.keys, VALUES=shape.values, DELTA=shape.delta,
            SCALED=shape.scaled, FINE=fine,
            ONE_ROW=one_row, ROWS=1 if one_row else CHUNK, BLOCK_SIZE=places.block_size, KEEP=places.keep,
            PRECISION="tf32x3" if limits_of(mixed.device).thirds else "ieee", WIDE=code.INTERPRETED,
            enable_fp_fusion=False, num_warps=warps, num_stages=1,
        )  # fmt: skip


def _tensors(places: StatePlaces) -> tuple[Tensor, ...]:
    return places.pool, places.before, places.starts, places.lengths, places.tables, places.slots


def _numbers(places: StatePlaces) -> tuple[int, ...]:
    return places.pool.stride(0), places.before.stride(0), places.tables.stride(0), places.first


@triton.jit
def _sequence(starts, lengths, tables, seq, table_stride, first, BLOCK_SIZE: tl.constexpr):
    """Return (first row, rows, position of the first row, slot of the state before if that is not 0)."""
    begin = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - begin
    position = tl.load(lengths + seq) - count
    slot = tl.load(tables + seq.to(tl.int64) * table_stride + tl.maximum(position - 1, 0) // BLOCK_SIZE)
    return begin - first, count, position, slot.to(tl.int64)


@triton.jit(
    do_not_specialize=("table_stride", "first"), do_not_specialize_on_alignment=("starts", "lengths", "tables", "slots")
)
def _convolve(
    x, weight, bias, out, pool, before, starts, lengths, tables, slots,
    x_stride, pool_stride, before_stride, table_stride, first, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve WIDTH channels of a sequence; grid (sequences, parts of channels)."""
    seq = tl.program_id(0)
    begin, count, position, source = _sequence(starts, lengths, tables, seq, table_stride, first, BLOCK_SIZE)
    if count == 0:
        return
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    # The state is copied first: a slot may be written while later rows still need the state before the step.
    own = before + seq.to(tl.int64) * before_stride + channel * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):
        kept = pool + source * pool_stride + channel * (TAPS - 1) + tap
        begun = channel < tl.where(position > 0, channels, 0)
        tl.store(own + tap, tl.load(kept, mask=begun, other=0.0), mask=inside)
    tl.debug_barrier()
    for at in range(0, count, ROWS):
        row = at + tl.arange(0, ROWS)
        there = row < count
        last = there & (((position + row + 1) % BLOCK_SIZE == 0) | (row == count - 1))
        target = tl.load(slots + first + begin + row, mask=last, other=-1)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for tap in tl.static_range(TAPS):
            index = row - (TAPS - 1) + tap
            new = (there & (index >= 0))[:, None] & inside[None, :]
            places = (begin + index).to(tl.int64)[:, None] * x_stride + channel[None, :]
            value = tl.load(x + places, mask=new, other=0.0).to(tl.float32)
            if TAPS > 1:
                old = (there & (index < 0))[:, None] & inside[None, :]
                value += tl.load(own[None, :] + (index + TAPS - 1)[:, None], mask=old, other=0.0)
            total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
            if tap > 0:
                to = pool + target[:, None] * pool_stride + (channel * (TAPS - 1) + tap - 1)[None, :]
                tl.store(to, value, mask=(target >= 0)[:, None] & inside[None, :])
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = total.to(out.dtype.element_ty).to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
        to = out + (begin + row).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _keep(to, state, mask, KEEP: tl.constexpr):
    """Write a state, if it is wanted."""
    if KEEP:
        tl.store(to, state, mask=mask)


@triton.jit
def _ones(there):
    """Return a column with 1 where rows are there."""
    return tl.where(there, 1.0, 0.0)[:, None]


@triton.jit
def _wide(x, WIDE: tl.constexpr):
    """Return x in float32 where interpreted kernels multiply; else as it is."""
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Return a @ b for float32 `b`; of bfloat16 `a`, in three parts of `b`, which together keep float32's digits."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    else:
        total = tl.dot(a.to(tl.float32), b, input_precision=PRECISION)
    return total


@triton.jit
def _row(x, rows, at):
    """Return row `at` of x [n, m]."""
    return tl.sum(tl.where(rows[:, None] == at, x, 0.0), 0)


@triton.jit
def _as_row(x, rows):
    """Return [1, n] of a column [n, 1]."""
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x, 0.0), 0)[None, :]


@triton.jit
def _faded_products(q, k, past, rows, ROWS: tl.constexpr):
    """Return products of keys and of queries [rows, n] with keys of earlier rows, each element faded in between."""
    by_key = tl.zeros((ROWS, ROWS), tl.float32)
    by_query = tl.zeros((ROWS, ROWS), tl.float32)
    for at in range(ROWS):
        fade = tl.where(rows[:, None] >= at, past - _row(past, rows, at)[None, :], float("-inf"))
        faded = tl.exp(fade) * _row(k, rows, at)[None, :]
        by_key = tl.where(rows[None, :] == at, tl.sum(k * faded, 1)[:, None], by_key)
        by_query = tl.where(rows[None, :] == at, tl.sum(q * faded, 1)[:, None], by_query)
    return by_key, by_query


@triton.jit
def _changes(u, by_key, rows, ROWS: tl.constexpr):
    """Return what the delta rule adds by each row: the solution of a triangular system, row by row."""
    by_key = tl.where(rows[:, None] > rows[None, :], by_key, 0.0)
    for at in range(1, ROWS):
        earlier = tl.sum(tl.trans(_row(by_key, rows, at)[None, :]) * u, 0)
        u = tl.where(rows[:, None] == at, u - earlier[None, :], u)
    return u


@triton.jit(
    do_not_specialize=("table_stride", "first"), do_not_specialize_on_alignment=("starts", "lengths", "tables", "slots")
)
def _scan(
    mixed, decay, step, skip, out, pool, before, starts, lengths, tables, slots,
    mixed_stride, pool_stride, before_stride, table_stride, first, key_heads, offset,
    HEADS: tl.constexpr, SHARE: tl.constexpr, IN_TURN: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr,
    FINE: tl.constexpr,
    ONE_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Scan WIDTH value elements of a head over a sequence's rows; grid (sequences, heads, parts of values).

    ONE_ROW: of sequences with one row, else of those with several.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    begin, count, position, source = _sequence(starts, lengths, tables, seq, table_stride, first, BLOCK_SIZE)
    if count == 0:
        return
    if (count == 1) != ONE_ROW:
        return
    key = tl.arange(0, PADDED_KEY)
    value = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_key = key < KEY_DIM
    is_value = value < VALUE_DIM
    in_state = is_key[:, None] & is_value[None, :]
    part = offset + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    begun = is_key[:, None] & (value < tl.where(position > 0, VALUE_DIM, 0))[None, :]
    state = tl.load(pool + source * pool_stride + part, mask=begun, other=0.0)
    _keep(before + seq.to(tl.int64) * before_stride + part, state, in_state, KEEP)
    key_head = head % key_heads if IN_TURN else head // SHARE
    rows = tl.arange(0, ROWS)
    length = position + count
    for base in range(position // ROWS * ROWS, length, ROWS):
        there = (base + rows >= position) & (base + rows < length)
        row = (begin + base - position + rows).to(tl.int64)
        in_keys = there[:, None] & is_key[None, :]
        in_values = there[:, None] & is_value[None, :]
        of_keys = row[:, None] * mixed_stride + key_head * KEY_DIM + key[None, :]
        q = _wide(tl.load(mixed + of_keys + QUERIES, mask=in_keys, other=0.0), WIDE)
        k = _wide(tl.load(mixed + of_keys + KEYS, mask=in_keys, other=0.0), WIDE)
        of_values = row[:, None] * mixed_stride + VALUES + head * VALUE_DIM + value[None, :]
        v = tl.load(mixed + of_values, mask=in_values, other=0.0).to(tl.float32)
        taken = _ones(there) if step is None else tl.load(step + row * HEADS + head, mask=there, other=0.0)[:, None]
        if FINE:
            faded = tl.load(decay + (row[:, None] * HEADS + head) * KEY_DIM + key[None, :], mask=in_keys, other=0.0)
        else:
            faded = tl.load(decay + row * HEADS + head, mask=there, other=0.0)[:, None]
        wide_q = q.to(tl.float32)
        wide_k = k.to(tl.float32)
        # Factors of rows: length 1 of queries and keys, where the delta rule wants that.
        of_q = tl.full((ROWS, 1), KEY_DIM**-0.5 if SCALED else 1.0, tl.float32)
        of_k = tl.full((ROWS, 1), 1.0, tl.float32)
        if DELTA:
            of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + 1e-6)[:, None] * of_q
            of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + 1e-6)[:, None]
        if ONE_ROW:
            column = tl.trans(wide_k * of_k)
            state = state * tl.trans(tl.exp(faded))
            u = (v - tl.sum(column * state, 0)[None, :]) * taken if DELTA else v * taken
            state = state + column * u
            result = tl.sum(tl.trans(wide_q * of_q) * state, 0)[None, :]
        else:
            end = tl.sum(faded, 0)[None, :]  # of all rows
            if FINE:
                past = tl.cumsum(faded, 0)
                by_key, by_query = _faded_products(wide_q * of_q, wide_k * of_k, past, rows, ROWS)
                left = wide_k * tl.exp(end - past)
                q = wide_q * tl.exp(past)
                k = wide_k * tl.exp(past)
            else:
                # No cumsum: of a column, Triton 3.6 computes wrong sums, or fails to compile.
                past = tl.sum(tl.where(rows[:, None] >= rows[None, :], _as_row(faded, rows), 0.0), 1)[:, None]
                # Products of stored queries and keys are exact; what changes a row's are factors of the row.
                fade = tl.where(rows[:, None] >= rows[None, :], past - _as_row(past, rows), float("-inf"))
                fade = tl.exp(fade) * _as_row(of_k, rows)
                by_key = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fade * of_k
                by_query = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fade * of_q
                left = k
                of_q = of_q * tl.exp(past)
                taken_k = of_k * tl.exp(past)
            u = v * taken
            if DELTA:
                known = _product(k, state, PRECISION) * (of_k if FINE else taken_k)
                u = _changes(u - known * taken, by_key * taken, rows, ROWS)
            result = _product(q, state, PRECISION) * of_q
            result = tl.dot(by_query, u, result, input_precision=PRECISION)
            added = u * of_k if FINE else u * of_k * tl.exp(end - past)
            state = state * tl.trans(tl.exp(end)) + _product(tl.trans(left), added, PRECISION)
        if skip is not None:
            result += v * tl.load(skip + head)
        to = out + row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + value[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=in_values)
        last = tl.minimum(base + ROWS, length)
        if (last % BLOCK_SIZE == 0) | (last == length):
            target = tl.load(slots + first + begin + last - 1 - position)
            if target >= 0:
                tl.store(pool + target * pool_stride + part, state, mask=in_state)
