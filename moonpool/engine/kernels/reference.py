"""Every operation in plain torch, in float32 (float64 for float64): what all implementations are compared with.

This module is also the contract between the dispatch (`moonpool.engine.kernels.attention`,
`moonpool.engine.kernels.ops`) and the implementations: each of `moonpool.engine.kernels.torch_ops`,
`moonpool.engine.kernels.native` and `moonpool.engine.kernels.triton.ops` has functions with these names and signatures,
as far as implemented. Arguments have been checked by the dispatch. Every element in `out` is written. The code stays
simple, so that reading the code shows correctness.

Words: T rows (tokens), S sequences, D = head_dim, G = heads / kv_heads. Query head h reads key/value head h // G. `kv`
is one layer in the pool, [blocks, kv_heads, 2 (K, V), block_size, D]; or, with one plane, latent vectors: a vector is
K, and its first elements, as many as `out` has, are V. A block is dense, the distance between two blocks is free
(`kv.stride(0)`). `kv` is in q's type and `scales` is None; or `kv` is int8 or float8_e4m3fn, and `scales` [blocks,
kv_heads, planes, block_size] float32 holds each token's factors (see `moonpool.engine.kernels.kv_quantization`): then
planes are dense, and equally far apart. A sequence's token t is slot t % block_size in block
block_tables[s, t // block_size]; entries past a sequence's blocks are never read, slots past the context never reach
the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.kind import PLAIN, AttentionKind, HeadNorms, first_seen

#: Largest magnitude of a stored value, per type of quantised KV.
QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


_AT_A_TIME = 1 << 24
"""Numbers of keys, or scores, that attention holds at a time: those of some heads, or of some rows."""


def decode_attention(
    q: Tensor,  # [S, heads, D], rows dense, stride(0) free
    kv: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,  # [S, max_blocks] int32
    context_lens: Tensor,  # [S] int32, each at least 1: the query is the last of so many tokens
    scale: float,
    out: Tensor,  # [S, heads, D or fewer], rows dense, stride(0) free
) -> None:
    """Write softmax(q k^T * scale) v for one query row per sequence to `out`."""
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    prefill_attention(q, kv, scales, block_tables, starts, context_lens, scale, out)


def prefill_attention(
    q: Tensor,  # [T, heads, D], rows dense, stride(0) free
    kv: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,  # [S, max_blocks] int32
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    out: Tensor,  # [T, heads, D or fewer], rows dense, stride(0) free
    *,
    kind: AttentionKind = PLAIN,
) -> None:
    """Write the causal attention of every query row to `out`.

    Rows query_start[s] .. query_start[s + 1] are sequence s's newest tokens: row i of n sits at position
    context_lens[s] - n + i and sees the keys up to that position. A sequence may have no rows.
    """
    _, kv_heads, planes, block_size, head_dim = kv.shape
    group, precision = q.shape[1] // kv_heads, _precision(q)
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for s, context in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        used = block_tables[s, : -(-context // block_size)].long()
        of_head = max(context, 1) * head_dim * planes
        for part in _slices(0, kv_heads, _AT_A_TIME // of_head):
            stored = kv[used, part]  # [blocks, kv_heads of the part, planes, block_size, D]
            stored = dequantize(stored, None if scales is None else scales[used, part], precision)
            both = stored.permute(2, 1, 0, 3, 4).reshape(planes, -1, len(used) * block_size, head_dim)[:, :, :context]
            keys, values = both[0], both[-1, ..., : out.shape[2]]
            heads = slice(part.start * group, part.stop * group)
            for rows in _slices(begin, end, _AT_A_TIME // (max(context, 1) * group * len(keys))):
                scores = _scores(q[rows, heads].to(precision), keys, scale)  # [heads, rows, context]
                query_position = torch.arange(rows.start, rows.stop, device=q.device) + (context - end)
                weights = _seen(scores, query_position, kind, heads)
                found = torch.matmul(weights.view(len(keys), -1, context), values)
                out[rows, heads] = found.view(*scores.shape[:2], -1).transpose(0, 1).to(q.dtype)


def _slices(begin: int, end: int, each: int) -> Iterator[slice]:
    """Return `begin` up to `end` in parts of `each`, at least 1."""
    each = max(each, 1)
    return (slice(first, min(first + each, end)) for first in range(begin, end, each))


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return q k^T * scale, [heads, rows, context], of `q` [rows, heads, D] and `keys` [kv_heads, context, D]."""
    rows, heads, head_dim = q.shape
    by_head = q.transpose(0, 1).reshape(len(keys), -1, head_dim)
    return torch.matmul(by_head, keys.transpose(1, 2)).view(heads, rows, -1) * scale


def _seen(scores: Tensor, query_position: Tensor, kind: AttentionKind, heads: slice) -> Tensor:
    """Return how much of each key the rows of these heads see, [heads, rows, context]."""
    context = scores.shape[2]
    key_position = torch.arange(context, device=scores.device)
    hidden = key_position[None, :] > query_position[:, None]  # [rows, context]
    if kind.window is not None:
        hidden |= key_position[None, :] < first_seen(query_position[:, None], kind.window, chunked=kind.chunked)
    if kind.soft_cap is not None:
        scores = torch.tanh(scores / kind.soft_cap) * kind.soft_cap
    scores = scores.masked_fill(hidden, -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks[heads].to(scores)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.softmax(scores, dim=-1)[..., :context].contiguous()


def chosen_attention(
    q: Tensor,  # [R, heads, D]
    kv: Tensor,  # one plane
    scales: Tensor | None,
    places: Tensor,  # [R, most] int32: block * block_size + slot of each key that a row sees
    numbers: Tensor,  # [R] int32: how many a row sees, the first of its places
    scale: float,
    out: Tensor,  # [R, heads, fewer than D], contiguous
    *,
    deterministic: bool,
) -> None:
    """Write softmax(q k^T * scale) v for rows that see keys anywhere in the pool. Deterministic: each row alone."""
    size, most = kv.shape[3], places.shape[1]
    for part in _slices(0, len(q), 1 if deterministic else _AT_A_TIME // (most * max(kv.shape[4], q.shape[1]))):
        tokens = places[part].long()
        unused = torch.arange(most, device=q.device) >= numbers[part, None]
        tokens = torch.where(unused, tokens[:, :1], tokens)  # another place may hold what is no number
        at = (tokens // size, 0, 0, tokens % size)
        keys = dequantize(kv[at], None if scales is None else scales[at], torch.float32)  # [rows, most, D]
        scores = torch.bmm(q[part].float(), keys.transpose(1, 2)).mul_(scale)
        seen = torch.softmax(scores.masked_fill_(unused[:, None], -torch.inf), dim=-1)
        out[part] = torch.bmm(seen, keys[..., : out.shape[2]]).to(q.dtype)


def choose_keys(
    q: Tensor,  # [T, heads, D]
    weights: Tensor,  # [T, heads] float32
    kv: Tensor,  # one plane
    scales: Tensor | None,
    block_tables: Tensor,  # [S, max_blocks] int32
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    longest: int,
    places: Tensor,  # [T, topk] int32
    numbers: Tensor,  # [T] int32
) -> None:
    """Write where in the pool the keys are that each row sees, in rising order of tokens, then 0; and how many.

    Of the keys up to a row's own those with the highest sums of weights[h] * relu(q[h] k * scale) over the heads h, as
    many as `places` has room for; of equal sums the earlier ones. No sequence has more than `longest` tokens.
    """
    del longest
    size, topk = kv.shape[3], places.shape[1]
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        table, tokens = block_tables[s].long(), torch.arange(context, device=q.device)
        at = (table[tokens // size], 0, 0, tokens % size)
        keys = dequantize(kv[at], None if scales is None else scales[at], torch.float32)[None]
        for rows in _slices(begin, end, _AT_A_TIME // (max(context, 1) * q.shape[1])):
            scores = _scores(q[rows].float(), keys, scale).relu_()
            sums = torch.bmm(weights[rows, None], scores.transpose(0, 1))[:, 0] + 0.0  # no zero below another
            numbers[rows] = torch.arange(rows.start + 1, rows.stop + 1, device=q.device) + (context - end)
            sums.masked_fill_(tokens >= numbers[rows, None], -torch.inf)
            best = sums.sort(dim=1, descending=True, stable=True).indices[:, :topk]
            numbers[rows].clamp_(max=topk)
            # Keys that a row does not see come last, also in the order of tokens.
            best = best.sort(dim=1).values
            found = (at[0] * size + at[3])[best]
            places[rows] = 0
            unused = torch.arange(best.shape[1], device=q.device) >= numbers[rows, None]
            places[rows, : best.shape[1]] = found.masked_fill(unused, 0).int()


def write_kv(
    k: Tensor,  # [T, kv_heads, D], rows dense, stride(0) free
    v: Tensor | None,  # [T, kv_heads, D], rows dense, stride(0) free; None where kv has one plane
    kv: Tensor,
    scales: Tensor | None,
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
) -> None:
    """Store T tokens' keys and values, token i in slot offsets[i] of block block_ids[i]; no slot comes twice.

    A token with block -1 is not stored. Quantised, a token's D numbers in one head and plane have a separate scale,
    their largest magnitude / QUANTIZED_MAX, and each is stored as number / scale, rounded to nearest even; zeros have
    scale 0. A token's stored values depend only on the token's numbers: they are the same whatever came before or
    beside, and in which chunks.
    """
    stays = block_ids >= 0
    if not bool(stays.all()):
        k, v, block_ids, offsets = k[stays], None if v is None else v[stays], block_ids[stays], offsets[stays]
    for plane, part in enumerate((k,) if v is None else (k, v)):
        stored = part
        if scales is not None:
            stored, scales[block_ids, :, plane, offsets] = _quantize(part.float(), kv.dtype)
        kv[block_ids, :, plane, offsets] = stored


def norm_rope_write(
    qk: Tensor,  # [T, heads + kv_heads, D], rows dense, stride(0) free
    v: Tensor | None,  # [T, kv_heads, D], rows dense, stride(0) free; None: nothing is stored
    out: Tensor,  # [T, heads, D], contiguous
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,  # cos and sin as of `rope`, [T, width]
    kv: Tensor | None,
    scales: Tensor | None,
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
) -> None:
    """Norm and rotate queries and keys; write queries to `out`, and keys with values to the pool: see `write_kv`.

    The leading elements of a head, as many as angles have, are rotated. All are rounded after each operation.
    """
    heads, found = out.shape[1], torch.empty_like(qk, memory_format=torch.contiguous_format).copy_(qk)
    if norms is not None and not norms.last:
        _norm_heads(found, heads, norms)
    if angles is not None:
        turned = found[..., : angles[0].shape[1]]
        rope(turned.clone(), *angles, turned)
    if norms is not None and norms.last:
        _norm_heads(found, heads, norms)
    out.copy_(found[:, :heads])
    if kv is not None:
        write_kv(found[:, heads:], v, kv, scales, block_ids, offsets)


def _norm_heads(qk: Tensor, heads: int, norms: HeadNorms) -> None:
    parts = ((qk[:, :heads], norms.q_weight, norms.q_bias), (qk[:, heads:], norms.k_weight, norms.k_bias))
    for part, weight, bias in parts:
        norm(part, None, weight, bias, norms.eps, part, centred=norms.centred, wide=norms.wide)


def _quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (`values` [T, kv_heads, D] as they are stored, their scales [T, kv_heads])."""
    scales = values.abs().amax(-1) / QUANTIZED_MAX[dtype]
    divisor = torch.where(scales > 0, scales, 1.0)[..., None]
    return to_stored(values / divisor, dtype), scales


def copy_blocks(
    pool: Tensor,  # [layers, blocks, ...], a block dense, strides of layers and blocks free
    source: Tensor,  # [n] int64
    target: Tensor,  # [n] int64, none twice and none in `source`
) -> None:
    """Copy block source[i] to block target[i] in every layer."""
    pool[:, target] = pool[:, source]


def rms_norm(
    x: Tensor,  # [T, n], rows dense, stride(0) free
    residual: Tensor | None,  # [T, n], contiguous
    weight: Tensor,  # [n]
    eps: float,
    out: Tensor,  # [T, n], contiguous; may be x
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight; with `residual`, `residual` becomes x + residual first and is normed.

    Source: Zhang and Sennrich 2019. Rounding as in transformers: float32 inside, rounded before `weight` multiplies.
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    precision = _precision(x)
    normed = functional.rms_norm(x.to(precision), (x.shape[-1],), None, eps).to(x.dtype)
    out.copy_(normed * weight)


def norm(
    x: Tensor,  # [T, ..., n]
    residual: Tensor | None,  # alike, contiguous
    weight: Tensor | None,  # [n], or [heads, n] of x [T, heads, n]; float32
    bias: Tensor | None,  # [n] float32
    eps: float,
    out: Tensor,  # [T, ..., n]
    *,
    centred: bool,
    wide: bool,
) -> None:
    """Write the RMS norm of x, or, if `centred`, the layer norm; with `residual`, that becomes x + residual first.

    `wide`: the weight multiplies before the result is rounded to x's type, instead of after; so does a layer norm's.
    """
    if residual is not None:
        x = residual.add_(x)
    shape, values = x.shape[-1:], x.float()
    inner = None if weight is None or weight.dim() > 1 or not wide else weight
    normed = (
        functional.layer_norm(values, shape, inner, bias, eps)
        if centred
        else functional.rms_norm(values, shape, inner, eps)
    )
    if weight is not None and inner is None:
        normed = normed * weight if wide else normed.to(x.dtype) * weight.to(x.dtype)
    out.copy_(normed)


def rope(
    x: Tensor,  # [T, heads, D], rows dense, stride(0) free
    cos: Tensor,  # [T, D], x's type
    sin: Tensor,  # [T, D], x's type, first half negated
    out: Tensor,  # [T, heads, D], rows dense, stride(0) free; may be x
) -> None:
    """Write x * cos + roll(x, D / 2) * sin. Source: Su et al. 2021, in the half-split form of `rotate_half`."""
    precision = _precision(x)
    wide, c, s = x.to(precision), cos[:, None].to(precision), sin[:, None].to(precision)
    out.copy_(torch.addcmul(wide * c, wide.roll(x.shape[-1] // 2, dims=-1), s))


def silu_mul(
    gate_up: Tensor,  # [T, 2 * n], rows dense: gate, then up
    out: Tensor,  # [T, n], contiguous
) -> None:
    """Write silu(gate) * up. Rounding as in transformers: silu's result is rounded before `up` multiplies."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(functional.silu(gate.to(_precision(gate))).to(gate.dtype) * up)


def linear(
    x: Tensor,  # [M, K], rows dense
    weight: Tensor,  # [N, K], contiguous
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], contiguous
) -> None:
    """Write x @ weight.T + bias, summed in float32."""
    precision = _precision(x)
    result = torch.matmul(x.to(precision), weight.to(precision).t())
    out.copy_(result if bias is None else result + bias.to(precision))


def expert_linear(
    x: Tensor,  # [T, K], rows dense, stride(0) free
    tokens: Tensor | None,  # [N] int64
    starts: Tensor,  # [experts + 1] int64, from 0 to N
    weights: ExpertMatrices,  # [outputs, K] of each expert
    out: Tensor,  # [N, outputs], contiguous
    *,
    deterministic: bool,
) -> None:
    """Write row tokens[i] of `x` (row i where `tokens` is None) by the matrix of the expert that row i of `out` has.

    Expert e has the rows starts[e] up to starts[e + 1]. `deterministic`: a row's bits do not depend on other rows.
    """
    del deterministic
    ends = starts.tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            rows = x[begin:end] if tokens is None else x[tokens[begin:end]]
            bias = None if weights.bias is None else weights.bias[expert]
            linear(rows, weights.matrices[expert], bias, out[begin:end])


def add_weighted(
    results: Tensor,  # [N, n], contiguous
    places: Tensor,  # [T, chosen] int64
    weights: Tensor | None,  # [T, chosen] float32
    out: Tensor,  # [T, n], contiguous
) -> None:
    """Write the sum of each token's rows places[t], in this order, times `weights`: rounded after each step."""
    out.zero_()
    for number, place in enumerate(places.unbind(1)):
        part = results[place]
        out += part if weights is None else (part * weights[:, number, None]).to(out.dtype)


def dequantize(kv: Tensor, scales: Tensor | None, precision: torch.dtype) -> Tensor:
    """Return the numbers that blocks [n, kv_heads, 2, block_size, D] stand for; `scales` have no last dimension."""
    wide = kv.to(precision)
    return wide if scales is None else wide * scales.to(precision)[..., None]


def to_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values`, already divided by their scale, in a quantised type: rounded to nearest even, saturated."""
    limit = QUANTIZED_MAX[dtype]
    values = values.clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype)


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
