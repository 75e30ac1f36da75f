# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Layers with a recurrent state: the convolution over the last tokens, and the scan. Never run on a GPU.

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
from moonpool.engine.kernels.triton.tiles import padded

_CONV_ROWS, _CONV_CHANNELS = 32, 128
_STATE_ELEMENTS = 8192
"""Of a program: half of the registers of four warps."""


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Where the states of a step's sequences lie, on the device; row `first` of the step is computed as row 0."""

    pool: Tensor  # [slots, elements] float32, slots apart
    before: Tensor  # [S, elements] float32: takes the states before the step
    starts: Tensor  # [S + 1] int32: rows of sequence s are starts[s] .. starts[s + 1]
    lengths: Tensor  # [S] int32: tokens with the step's
    tables: Tensor  # [S, max_blocks] int32: each block's slot
    slots: Tensor  # [rows of the step] int64: the slot of each row's block; -1: the state is not kept
    block_size: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class ScanShape:
    """The heads of a scan, and where a row has them.

    `delta`: the delta rule, with queries and keys of length 1; else values count by their step, and `skip` times the
    value is added to the result. `queries`, `keys`, `values`: the first element of each in a row. `in_turn`: head h of
    the values has key head h % key_heads, else each key head has consecutive ones. `offset`: of the scan's state within
    a sequence's.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
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
    decay: Tensor,  # [T, heads] or [T, heads, key_dim] float32, contiguous: logarithms
    step: Tensor,  # [T, heads] float32
    skip: Tensor | None,  # [heads] float32
    places: StatePlaces,
    shape: ScanShape,
    out: Tensor,  # [T, heads * value_dim], contiguous
    *,
    singles: int,
) -> None:
    """Write each row's result, and states behind blocks; `singles`: sequences with one row."""
    sequences = places.lengths.shape[0]
    key_dim, value_dim = max(padded(shape.key_dim), 16), max(padded(shape.value_dim), 16)
    width = min(value_dim, max(_STATE_ELEMENTS // key_dim, 16))
    step = step.contiguous()
    for one_row, count in ((True, singles), (False, sequences - singles)):
        if not count or not mixed.shape[0]:
            continue
        _scan[sequences, shape.heads, -(-shape.value_dim // width)](
            mixed, decay, step, skip, out, *_tensors(places), mixed.stride(0), *_numbers(places),
            shape.key_heads, shape.offset,
            HEADS=shape.heads, SHARE=shape.heads // shape.key_heads, IN_TURN=shape.in_turn,
            KEY_DIM=shape.key_dim, PADDED_KEY=key_dim, VALUE_DIM=shape.value_dim, WIDTH=width,
            QUERIES=shape.queries, KEYS=shape.keys, VALUES=shape.values, DELTA=shape.delta, FINE=decay.dim() == 3,
            ONE_ROW=one_row, ROWS=1 if one_row else CHUNK, BLOCK_SIZE=places.block_size, enable_fp_fusion=False,
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
        kept = tl.load(pool + source * pool_stride + channel * (TAPS - 1) + tap, mask=inside, other=0.0)
        tl.store(own + tap, tl.where(position > 0, kept, 0.0), mask=inside)
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
def _unit(x):
    """Return vectors of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _row(x, rows, at):
    """Return row `at` of x [n, m]."""
    return tl.sum(tl.where(rows[:, None] == at, x, 0.0), 0)


@triton.jit
def _between(q, k, past, rows, FINE: tl.constexpr, ROWS: tl.constexpr):
    """Return products [rows, earlier rows] of keys with keys and of queries with keys, faded in between."""
    earlier = rows[:, None] >= rows[None, :]
    if FINE:
        by_key = tl.zeros((ROWS, ROWS), tl.float32)
        by_query = tl.zeros((ROWS, ROWS), tl.float32)
        for at in range(ROWS):
            fade = tl.where(rows[:, None] >= at, past - _row(past, rows, at)[None, :], float("-inf"))
            faded = tl.exp(fade) * _row(k, rows, at)[None, :]
            by_key = tl.where(rows[None, :] == at, tl.sum(k * faded, 1)[:, None], by_key)
            by_query = tl.where(rows[None, :] == at, tl.sum(q * faded, 1)[:, None], by_query)
    else:
        column = tl.sum(tl.where(rows[:, None] == rows[None, :], past, 0.0), 0)  # `past` [rows, 1], as a row
        fade = tl.exp(tl.where(earlier, past - column[None, :], float("-inf")))
        turned = tl.trans(k)
        by_key = tl.dot(k, turned, input_precision="ieee") * fade
        by_query = tl.dot(q, turned, input_precision="ieee") * fade
    return by_key, by_query


@triton.jit
def _changes(v, k, by_key, taken, state, rows, ROWS: tl.constexpr):
    """Return what the delta rule adds by each row: a triangular system, solved row by row."""
    u = (v - tl.dot(k, state, input_precision="ieee")) * taken
    by_key = tl.where(rows[:, None] > rows[None, :], by_key * taken, 0.0)
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
    QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DELTA: tl.constexpr, FINE: tl.constexpr,
    ONE_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
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
    state = tl.load(pool + source * pool_stride + part, mask=in_state, other=0.0)
    state = tl.where(position > 0, state, 0.0)
    tl.store(before + seq.to(tl.int64) * before_stride + part, state, mask=in_state)
    key_head = head % key_heads if IN_TURN else head // SHARE
    rows = tl.arange(0, ROWS)
    length = position + count
    for base in range(position // ROWS * ROWS, length, ROWS):
        there = (base + rows >= position) & (base + rows < length)
        row = (begin + base - position + rows).to(tl.int64)
        in_keys = there[:, None] & is_key[None, :]
        in_values = there[:, None] & is_value[None, :]
        of_keys = row[:, None] * mixed_stride + key_head * KEY_DIM + key[None, :]
        q = tl.load(mixed + of_keys + QUERIES, mask=in_keys, other=0.0).to(tl.float32)
        k = tl.load(mixed + of_keys + KEYS, mask=in_keys, other=0.0).to(tl.float32)
        of_values = row[:, None] * mixed_stride + VALUES + head * VALUE_DIM + value[None, :]
        v = tl.load(mixed + of_values, mask=in_values, other=0.0).to(tl.float32)
        taken = tl.load(step + row * HEADS + head, mask=there, other=0.0)[:, None]
        if FINE:
            faded = tl.load(decay + (row[:, None] * HEADS + head) * KEY_DIM + key[None, :], mask=in_keys, other=0.0)
        else:
            faded = tl.load(decay + row * HEADS + head, mask=there, other=0.0)[:, None]
        if DELTA:
            q = _unit(q) * (KEY_DIM**-0.5)
            k = _unit(k)
        if ONE_ROW:
            fade = tl.trans(tl.exp(faded))  # [keys, 1]
            k_column = tl.trans(k)
            state = state * fade
            u = (v - tl.sum(k_column * state, 0)[None, :]) * taken if DELTA else v * taken
            state = state + k_column * u
            result = tl.sum(tl.trans(q) * state, 0)[None, :]
        else:
            past = tl.cumsum(faded, 0)
            end = tl.sum(faded, 0)  # of all rows
            by_key, by_query = _between(q, k, past, rows, FINE, ROWS)
            fade = tl.exp(past)
            u = _changes(v, k * fade, by_key, taken, state, rows, ROWS) if DELTA else v * taken
            result = tl.dot(q * fade, state, input_precision="ieee")
            result = tl.dot(by_query, u, result, input_precision="ieee")
            left = k * tl.exp(end[None, :] - past)
            state = state * tl.exp(end)[:, None] + tl.dot(tl.trans(left), u, input_precision="ieee")
        if skip is not None:
            result += v * tl.load(skip + head)
        to = out + row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + value[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=in_values)
        last = tl.minimum(base + ROWS, length)
        if (last % BLOCK_SIZE == 0) | (last == length):
            target = tl.load(slots + first + begin + last - 1 - position)
            if target >= 0:
                tl.store(pool + target * pool_stride + part, state, mask=in_state)
