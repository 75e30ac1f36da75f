# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Device code for paged attention: one kernel for decode and prefill, and one that joins a split's parts.

The algorithm is FlashAttention's running softmax (Dao et al. 2022) with FlashDecoding's split along the keys, in base
2: scores are multiplied with scale * log2(e) once, and `exp2` is the instruction that GPUs have. Arguments of kernels
are pointers and numbers on the device, which Python's types cannot say; constants are in capitals, Triton's habit.

A tile's rows are (token, query head of the key/value head), so that grouped heads share every loaded key. Key tiles
begin at multiples of KEYS from a sequence's first token, whatever the batch: with equal tiles, a row's result does not
depend on what else is computed. Masked and unmasked steps run the same arithmetic; a step in which a row sees no key
leaves the row unchanged, bit by bit.

No instruction of a single vendor is used; `moonpool.engine.kernels.triton.attention` shapes the launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moonpool.engine.kernels.triton import interpreter
from moonpool.engine.kernels.triton.variants import JOINED, MANY, PART, ROW_EACH, SINGLES

#: How KV is stored.
PLAIN, INT8, FLOAT8 = 0, 1, 2
SLIDING, CHUNKED = 1, 2

_PLAIN, _INT8, _FLOAT8 = tl.constexpr(PLAIN), tl.constexpr(INT8), tl.constexpr(FLOAT8)
_CHUNKED = tl.constexpr(CHUNKED)
_PART, _JOINED = tl.constexpr(PART), tl.constexpr(JOINED)
_ROW_EACH, _SINGLES, _MANY = tl.constexpr(ROW_EACH), tl.constexpr(SINGLES), tl.constexpr(MANY)


@triton.jit
def _find(starts, num_seqs, tile, TOKENS: tl.constexpr):
    """Return the sequence that `tile` belongs to, when s has the tiles from starts[s] // TOKENS + s on.

    Each sequence thereby has at least the needed tiles, and no scan over the lengths is needed.
    """
    count = 0
    for base in range(0, num_seqs, 128):
        index = base + tl.arange(0, 128)
        begin = tl.load(starts + index, mask=index < num_seqs, other=1 << 30)
        count += tl.sum((begin // TOKENS + index <= tile).to(tl.int32), 0)
    return count - 1


@triton.jit
def _place(starts, lengths, num_seqs, tile, TOKENS: tl.constexpr, WHICH: tl.constexpr):
    """Return (sequence, the sequence's first row in q, the tile's first row within, rows for this launch, context)."""
    if WHICH == _MANY:
        seq = _find(starts, num_seqs, tile, TOKENS)
        begin = tl.load(starts + seq)
        rows = tl.load(starts + seq + 1) - begin
        first = (tile - begin // TOKENS - seq) * TOKENS
        if rows == 1:
            rows = 0
    else:
        seq = tile
        first = 0
        begin = tile
        rows = 1
        if WHICH == _SINGLES:
            begin = tl.load(starts + seq)
            if tl.load(starts + seq + 1) - begin != 1:
                rows = 0
    return seq, begin, first, rows, tl.load(lengths + seq)


@triton.jit
def _widen(stored, DTYPE: tl.constexpr, KV: tl.constexpr, NATIVE: tl.constexpr):
    """Return stored keys or values in the type of the products; float8 without NATIVE comes out / 256."""
    if KV == _FLOAT8:
        if NATIVE:
            half = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            # e4m3's bits lie in float16's, sign aside; the exponents' biases differ by 8. Exact, subnormals too.
            bits = stored.to(tl.int16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = half.to(DTYPE)
    else:
        wide = stored.to(DTYPE)
    return wide


@triton.jit
def _blocks(table, start, high, ENTRY: tl.constexpr, KEYS: tl.constexpr):
    """Return a tile's entry of the table if the tile is one dense run, or each key's entry; 0 from `high` on."""
    keys = start if ENTRY % KEYS == 0 else start + tl.arange(0, KEYS)
    return tl.load(table + keys // ENTRY, mask=keys < high, other=0)


@triton.jit
def _step(
    start, high, q, q_rest, seen, base, scales, block, block_units, scale_stride, scale, squeeze, window,
    m, l, acc,  # noqa: E741
    HEAD_DIM: tl.constexpr, PLANE: tl.constexpr, SCALE_PLANE: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, KV: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, start + KEYS) into the running maximum, sum and weighted values of all rows.

    MASKED: rows see different keys, or fewer than all; those from `high` on, which no row sees, are not even loaded.
    REST: of a single plane, the elements of a key behind those that are its value; `q_rest` has them of the queries.
    ENTRY: tokens of an entry of the table, BLOCK_SIZE; or 1: entries are tokens' places, block * BLOCK_SIZE + slot.
    """
    keys = start + tl.arange(0, KEYS)
    loaded = keys < high
    inside = keys % BLOCK_SIZE
    if ENTRY == 1:
        inside = block % BLOCK_SIZE
        block = block // BLOCK_SIZE
    block = block.to(tl.int64)
    if ENTRY % KEYS == 0:
        at = block * block_units * UNIT + (start % BLOCK_SIZE) * HEAD_DIM + tl.arange(0, KEYS) * HEAD_DIM
    else:
        at = block * block_units * UNIT + inside * HEAD_DIM
    k = _load(base + at, loaded, HEAD_DIM - REST, PADDED_DIM, MASKED)
    v = k if REST else _load(base + PLANE + at, loaded, HEAD_DIM, PADDED_DIM, MASKED)
    scores = tl.dot(q, tl.trans(_widen(k, q.dtype, KV, NATIVE)), input_precision=PRECISION)
    if REST:
        rest = _load(base + (HEAD_DIM - REST) + at, loaded, REST, PADDED_REST, MASKED)
        scores = tl.dot(q_rest, tl.trans(_widen(rest, q.dtype, KV, NATIVE)), scores, input_precision=PRECISION)
    if KV != _PLAIN:
        k_scale, v_scale = _scales(scales + block * scale_stride + inside, loaded, KV, NATIVE, SCALE_PLANE)
        scores *= k_scale
    if CAPPED:
        scores = _tanh(scores * squeeze)
    if MASKED:
        scores = tl.where(keys[None, :] < seen[:, None], scores, float("-inf"))
    if WINDOWED:
        scores = tl.where(keys[None, :] >= _first_seen(seen, window, WINDOWED)[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without keys so far stays at l = 0
    p = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    keep = tl.exp2(m - shift)
    l = tl.fma(l, keep, tl.sum(p, 1))  # noqa: E741
    if KV != _PLAIN:
        p *= v_scale
    acc = tl.dot(p.to(q.dtype), _widen(v, q.dtype, KV, NATIVE), acc * keep[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def _load(tokens, loaded, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Return SIZE elements from each of `tokens` on, zeros behind them; MASKED: of `loaded` tokens alone."""
    dims = tl.arange(0, PADDED)
    places = tokens[:, None] + dims[None, :]
    if MASKED:
        found = tl.load(places, mask=loaded[:, None] & (dims < SIZE)[None, :], other=0)
    elif PADDED != SIZE:
        found = tl.load(places, mask=(dims < SIZE)[None, :], other=0)
    else:
        found = tl.load(places)
    return found


@triton.jit
def _first_seen(seen, window, WINDOWED: tl.constexpr):
    """Return the first key of rows that would see the keys below `seen` without a window."""
    if WINDOWED == _CHUNKED:
        return (seen - 1) // window * window
    return seen - window


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent: near 0 by the series, where one minus nearly one would have few digits."""
    square = x * x
    series = x + x * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    return tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit
def _scales(at, loaded, KV: tl.constexpr, NATIVE: tl.constexpr, SCALE_PLANE: tl.constexpr):
    """Return the factors for keys and values, one for each key."""
    k_scale = tl.load(at, mask=loaded, other=0.0)[None, :]
    v_scale = tl.load(at + SCALE_PLANE, mask=loaded, other=0.0)[None, :]
    if KV == _FLOAT8 and not NATIVE:
        k_scale *= 256.0
        v_scale *= 256.0
    return k_scale, v_scale


@triton.jit
def _attend(
    begin, end, low, high, q, q_rest, seen, base, scales, table, block_units, scale_stride, scale, squeeze, window,
    HEAD_DIM: tl.constexpr, PLANE: tl.constexpr, SCALE_PLANE: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, KV: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MANY_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return (maximum, sum, weighted values) of the rows over the keys [begin, end), as float32.

    Every row sees the keys below `low`, none sees `high` and above. With one token per tile, the two differ by one and
    the mask costs next to nothing beside the loads, so that a single loop with one pipeline suffices. So with a window,
    which begins for the first row `window` keys before `low`: steps before that are not taken.
    """
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    if WINDOWED:
        begin = tl.maximum(begin, tl.maximum(_first_seen(low, window, WINDOWED), 0) // KEYS * KEYS)
    border = begin
    # The table is read one step ahead: the pipelined loads' addresses must not wait for the table.
    block = _blocks(table, begin, high, ENTRY, KEYS)
    if MANY_ROWS and not WINDOWED:
        border = tl.maximum(tl.minimum(low // KEYS * KEYS, end), begin)
        for start in range(begin, border, KEYS):
            ahead = _blocks(table, start + KEYS, high, ENTRY, KEYS)
            m, l, acc = _step(  # noqa: E741
                start, high, q, q_rest, seen, base, scales, block, block_units, scale_stride, scale, squeeze, window,
                m, l, acc,
                HEAD_DIM, PLANE, SCALE_PLANE, PADDED_DIM, REST, PADDED_REST, BLOCK_SIZE, ENTRY, KEYS, UNIT, KV, NATIVE,
                PRECISION, CAPPED, WINDOWED, False,
            )  # fmt: skip
            block = ahead
    for start in range(border, end, KEYS):
        ahead = _blocks(table, start + KEYS, high, ENTRY, KEYS)
        m, l, acc = _step(  # noqa: E741
            start, high, q, q_rest, seen, base, scales, block, block_units, scale_stride, scale, squeeze, window,
            m, l, acc,
            HEAD_DIM, PLANE, SCALE_PLANE, PADDED_DIM, REST, PADDED_REST, BLOCK_SIZE, ENTRY, KEYS, UNIT, KV, NATIVE,
            PRECISION, CAPPED, WINDOWED, True,
        )  # fmt: skip
        block = ahead
    return m, l, acc


@triton.jit
def _join(m, l, acc, m_part, l_part, acc_part):  # noqa: E741
    """Return the sums over two runs of keys. Products and sums are spelt out: both callers must round alike."""
    m_new = tl.maximum(m, m_part)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - shift)
    new = tl.exp2(m_part - shift)
    return m_new, tl.fma(l_part, new, l * old), tl.fma(acc_part, new[:, None], acc * old[:, None])


@triton.jit
def _sink(at, m, l, acc):  # noqa: E741
    """Return the sums with a further score for each row, the head's sink, which has no value."""
    score = tl.load(at).to(tl.float32) * 1.4426950408889634
    m_new = tl.maximum(m, score)
    keep = tl.exp2(m - m_new)
    return m_new, tl.fma(l, keep, tl.exp2(score - m_new)), acc * keep[:, None]


# What changes from batch to batch must not compile anew for multiples of 16, as integers and addresses do.
@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "split_keys", "window"),
    do_not_specialize_on_alignment=("tables", "starts", "lengths"),
)
def attention(
    q, kv, scales, tables, starts, lengths, sinks, out, parts, stats,
    scale, squeeze, window, num_seqs, q_stride, out_stride, block_units, table_stride, scale_stride, split_keys,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PLANE: tl.constexpr, SCALE_PLANE: tl.constexpr,
    PADDED_DIM: tl.constexpr, REST: tl.constexpr, PADDED_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, KV: tl.constexpr,
    NATIVE: tl.constexpr, WHICH: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Attend with one tile's rows to one key/value head's keys; grid (tiles, kv_heads, parts).

    A tile has TOKENS tokens times GROUP query heads, padded to ROWS. `scale` includes log2(e); CAPPED, scores times
    `squeeze` become their hyperbolic tangent before. WINDOWED: SLIDING, a row sees the last `window` keys; CHUNKED, the
    keys of the row's own chunk of `window` keys; 0, all. Blocks are block_units * UNIT elements apart: a constant
    factor tells the compiler how wide loads may be. A head's keys and values are PLANE elements apart, their scales
    SCALE_PLANE. PART writes `parts` [tiles, kv_heads, parts, TOKENS * GROUP, elements of a value] and `stats` [..., 2]
    (maximum, sum).

    REST: there is one plane, whose vectors are the keys; a value is a vector without its last REST elements. The grid
    then has groups of query heads in place of key/value heads, and all groups read the same vectors.
    """
    # A sequence's last tiles have most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq, q_begin, first, count, context = _place(starts, lengths, num_seqs, tile, TOKENS, WHICH)
    if first >= count:
        return
    high = tl.maximum(context - count + tl.minimum(first + TOKENS, count), 0)
    begin = 0
    end = high
    if SPLIT == _PART:
        begin = tl.program_id(2) * split_keys
        end = tl.minimum(begin + split_keys, high)
        if begin >= end:
            return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    token = first + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (token < count)
    seen = tl.where(valid, context - count + token + 1, 0)
    low = tl.maximum(context - count + first + 1, 0)
    mask = valid[:, None] & (dims < HEAD_DIM - REST)[None, :]
    in_row = head * GROUP + rows % GROUP
    at = (q_begin + token).to(tl.int64)
    begin_of_row = q + at * q_stride + in_row * HEAD_DIM
    query = _load(begin_of_row, valid, HEAD_DIM - REST, PADDED_DIM, True)
    query_rest = query
    if REST:
        query_rest = _load(begin_of_row + (HEAD_DIM - REST), valid, REST, PADDED_REST, True)
    if WIDE:
        query = query.to(tl.float32)
        query_rest = query_rest.to(tl.float32)
    base = kv + head * (2 * PLANE)
    table = tables + seq.to(tl.int64) * table_stride
    if KV != _PLAIN:
        scales += head * (2 * SCALE_PLANE)
    if SPLIT == _JOINED:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)  # noqa: E741
        acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
        for part in range(0, high, split_keys):
            m_part, l_part, acc_part = _attend(
                part, tl.minimum(part + split_keys, high), low, high,
                query, query_rest, seen, base, scales, table, block_units, scale_stride, scale, squeeze, window,
                HEAD_DIM, PLANE, SCALE_PLANE, PADDED_DIM, REST, PADDED_REST, BLOCK_SIZE, ENTRY, KEYS, UNIT, KV, NATIVE,
                PRECISION, CAPPED, WINDOWED, TOKENS > 1, ROWS,
            )  # fmt: skip
            m, l, acc = _join(m, l, acc, m_part, l_part, acc_part)  # noqa: E741
    else:
        m, l, acc = _attend(  # noqa: E741
            begin, end, low, high, query, query_rest, seen, base, scales, table, block_units, scale_stride,
            scale, squeeze, window,
            HEAD_DIM, PLANE, SCALE_PLANE, PADDED_DIM, REST, PADDED_REST, BLOCK_SIZE, ENTRY, KEYS, UNIT, KV, NATIVE,
            PRECISION, CAPPED, WINDOWED, TOKENS > 1, ROWS,
        )  # fmt: skip
    if SPLIT == _PART:
        slot = (tile * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        slots = slot * (TOKENS * GROUP) + rows
        tl.store(parts + slots[:, None] * (HEAD_DIM - REST) + dims[None, :], acc, mask=mask)
        tl.store(stats + slots * 2, m, mask=valid)
        tl.store(stats + slots * 2 + 1, l, mask=valid)
    else:
        if sinks is not None:
            m, l, acc = _sink(sinks + head * GROUP + rows % GROUP, m, l, acc)  # noqa: E741
        acc = acc / tl.where(l > 0, l, 1.0)[:, None]  # a row that sees no key is zero
        to = out + (at * out_stride + in_row * (HEAD_DIM - REST))[:, None] + dims[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=("num_seqs", "split_keys", "num_parts"), do_not_specialize_on_alignment=("starts", "lengths")
)
def join_parts(
    starts, lengths, sinks, out, parts, stats, num_seqs, out_stride, split_keys, num_parts,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WHICH: tl.constexpr,
    WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write WIDTH elements of a tile's rows from what `attention` left with PART; grid (tiles, kv_heads, widths).

    Parts are joined in their order, as `attention` does with SPLIT = JOINED; AHEAD parts are loaded together, since
    single loads would wait out the memory's latency for each.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _, q_begin, first, count, context = _place(starts, lengths, num_seqs, tile, TOKENS, WHICH)
    if first >= count:
        return
    high = tl.maximum(context - count + tl.minimum(first + TOKENS, count), 0)
    rows = tl.arange(0, ROWS)
    dims = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    token = first + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (token < count)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    used = tl.cdiv(high, split_keys)
    slot = (tile * tl.num_programs(1) + head).to(tl.int64) * num_parts
    for part in range(0, used, AHEAD):
        for ahead in tl.static_range(AHEAD):
            inside = (part + ahead) * (TOKENS * GROUP) + rows
            there = valid & (inside < used * (TOKENS * GROUP))
            slots = slot * (TOKENS * GROUP) + inside
            m_part = tl.load(stats + slots * 2, mask=there, other=float("-inf"))
            l_part = tl.load(stats + slots * 2 + 1, mask=there, other=0.0)
            wide = there[:, None] & (dims < HEAD_DIM)[None, :]
            acc_part = tl.load(parts + slots[:, None] * HEAD_DIM + dims[None, :], mask=wide, other=0.0)
            m, l, acc = _join(m, l, acc, m_part, l_part, acc_part)  # noqa: E741
    if sinks is not None:
        m, l, acc = _sink(sinks + head * GROUP + rows % GROUP, m, l, acc)  # noqa: E741
    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    at = (q_begin + token).to(tl.int64) * out_stride + (head * GROUP + rows % GROUP) * HEAD_DIM
    tl.store(out + at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


#: Whether this process interprets kernels: bfloat16 is an integer to it, and products are made in float32 (WIDE).
INTERPRETED = not isinstance(attention, triton.JITFunction)
if INTERPRETED:
    interpreter.mend()
