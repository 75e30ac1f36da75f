"""The "torch" implementation: paged attention for CPUs, and the small operations of a layer in plain torch.

Attention gathers keys and values into dense copies, in float32, then batched matrix products do the work. Arguments
have been checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.kind import PLAIN, AttentionKind, first_seen
from moonpool.engine.kernels.plan import AttentionPlan, DecodeGroup, Division, PrefillItem


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `moonpool.engine.kernels.reference.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    if x.dtype == torch.float32:
        out.copy_(functional.rms_norm(x, (x.shape[-1],), weight, eps))
    else:
        torch.mul(functional.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype), weight, out=out)


def rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """See `reference.rope`; here products are rounded to the element type before they are added."""
    turned = x.roll(x.shape[-1] // 2, dims=-1)
    out.copy_(torch.addcmul(x * cos[:, None], turned, sin[:, None]))


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `moonpool.engine.kernels.reference.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)


_TILE_ROWS = 128
_WIDE = (torch.float32, torch.float64)


#: Of scores: they are written, normalised and read again, and should not leave the cache.
TILE_BYTES = 4 << 20


#: Of a group's keys and values: they should stay in the cache between being gathered and being read.
GATHER_BYTES = 8 << 20


def paged_attention(
    q: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    *,
    kind: AttentionKind = PLAIN,
    gather_bytes: int = GATHER_BYTES,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Write the attention of every query row to `out`; meaning as in `attention.paged_attention`.

    At most about `gather_bytes` of keys and values are gathered for a group of sequences, and about `tile_bytes` of
    scores are computed at once.
    """
    blocks, kv_heads, planes, block_size, head_dim = kv.shape
    if scales is not None:
        kv = _widen(kv, scales, plan, q.dtype)
    elif not kv.is_contiguous():
        kv = kv.contiguous()
    q = q.contiguous()
    pool = kv.view(blocks * kv_heads * planes, block_size * head_dim)
    division = plan.division(kv, gather_bytes)
    for group in division.decode:
        _decode(q, pool, group, division, plan.kv_shape[1], scale, out, kind)
    for item in division.prefill:
        _prefill(q, pool, item, division, plan.kv_shape[1], scale, out, kind, tile_bytes)


def _widen(kv: Tensor, scales: Tensor, plan: AttentionPlan, dtype: torch.dtype) -> Tensor:
    """Return the pool with the blocks of the batch in q's type: right everywhere, quick nowhere."""
    used = torch.tensor(sorted({block for table in plan.tables for block in table}), dtype=torch.int64)
    wide = torch.empty(kv.shape, dtype=dtype)
    wide[used] = reference.dequantize(kv[used], scales[used], torch.float32).to(dtype)
    return wide


def _decode(
    q: Tensor,
    pool: Tensor,
    group: DecodeGroup,
    division: Division,
    kv_heads: int,
    scale: float,
    out: Tensor,
    kind: AttentionKind,
) -> None:
    """Attend with one row per sequence."""
    members, (heads, head_dim) = group.members, q.shape[1:]
    gathered = _gather(pool, group.gather, division).view(-1, head_dim)
    if group.stale is not None:
        gathered.index_fill_(0, group.stale, 0.0)
    keys, values = gathered.view(division.planes, members * kv_heads, -1, head_dim).expand(2, -1, -1, -1)
    shape = (members * kv_heads, heads // kv_heads, head_dim)
    queries = (q if group.rows is None else q[group.rows]).reshape(shape).to(keys.dtype)
    if group.mask is not None and kind.soft_cap is None:
        scores = torch.baddbmm(group.mask, queries, keys.transpose(1, 2), alpha=scale)
    else:
        scores = kind.capped(torch.bmm(queries, keys.transpose(1, 2)).mul_(scale))
        if group.mask is not None:
            scores += group.mask
    result = torch.bmm(kind.softmax(scores), values[..., : out.shape[2]]).view(members, heads, -1)
    if group.rows is None:
        out.copy_(result)
    else:
        out[group.rows] = result.to(out.dtype)


def _prefill(
    q: Tensor,
    pool: Tensor,
    item: PrefillItem,
    division: Division,
    kv_heads: int,
    scale: float,
    out: Tensor,
    kind: AttentionKind,
    tile_bytes: int,
) -> None:
    """Attend with one sequence's rows, in tiles of rows and key/value heads."""
    heads, head_dim = q.shape[1:]
    share = heads // kv_heads
    gathered = _gather(pool, item.gather, division).view(division.planes, kv_heads, -1, head_dim)
    keys, values = gathered.expand(2, -1, -1, -1)
    row_bytes = share * item.context * keys.element_size()
    # With many query heads to a KV head (latent attention) a few rows are a matrix already.
    step = max(-(-16 // share), min(_TILE_ROWS, tile_bytes // row_bytes))
    together = max(1, min(kv_heads, tile_bytes // (row_bytes * step)))
    for begin in range(item.begin, item.end, step):
        rows = min(step, item.end - begin)
        seen = item.context - (item.end - begin) + rows
        first = 0
        if kind.window is not None:
            row = item.skipped + seen - rows
            first = max(0, first_seen(row, kind.window, chunked=kind.chunked) - item.skipped)
        later = _unseen(rows, seen - first, share, kind, item.skipped + first, keys.dtype)
        tile = q[begin : begin + rows].view(rows, kv_heads, share, head_dim)
        target = out[begin : begin + rows].view(rows, kv_heads, share, -1)
        for head in range(0, kv_heads, together):
            some = slice(head, head + together)
            queries = tile[:, some].transpose(0, 1).reshape(-1, rows * share, head_dim).to(keys.dtype)
            scores = kind.capped(torch.bmm(queries, keys[some, first:seen].transpose(1, 2)).mul_(scale))
            scores[:, :, scores.shape[2] - later.shape[1] :].add_(later)
            weights = kind.softmax(scores, some, rows)
            result = torch.bmm(weights, values[some, first:seen, : out.shape[2]])
            target[:, some] = result.view(-1, rows, share, out.shape[2]).transpose(0, 1)


def _gather(pool: Tensor, index: Tensor, division: Division) -> Tensor:
    """Copy the indexed rows of `pool` into a buffer that lives with the division: fresh pages cost more than copies.

    Rows with 16-bit elements come back in float32: without instructions for them, torch's 16-bit matrix products take 5
    to 40 times as long (weights by values over 600 to 2,048 tokens, AVX2).
    """
    key = (index.shape[0], pool.dtype)
    buffer = division.buffers.get(key)
    if buffer is None:
        buffer = division.buffers[key] = torch.empty((index.shape[0], pool.shape[1]), dtype=pool.dtype)
    torch.index_select(pool, 0, index, out=buffer)
    if pool.dtype in _WIDE:
        return buffer
    key = (index.shape[0], torch.float32)
    wide = division.buffers.get(key)
    if wide is None:
        wide = division.buffers[key] = torch.empty(buffer.shape, dtype=torch.float32)
    return wide.copy_(buffer)


def _unseen(rows: int, keys: int, share: int, kind: AttentionKind, begin: int, dtype: torch.dtype) -> Tensor:
    """Return the mask that hides keys from a context's last rows: [rows * share, n] with -inf, over the last n keys.

    Row i is at the place of key keys - rows + i; the first key is token `begin`. Without a window only the last `rows`
    keys can be hidden.
    """
    if kind.window is None:
        mask = torch.full((rows, rows), -torch.inf, dtype=dtype).triu_(1)
    else:
        row, key = torch.arange(keys - rows, keys)[:, None] + begin, torch.arange(keys) + begin
        hidden = (key > row) | (key < first_seen(row, kind.window, chunked=kind.chunked))
        mask = torch.zeros((rows, keys), dtype=dtype).masked_fill_(hidden, -torch.inf)
    return mask.repeat_interleave(share, 0)
