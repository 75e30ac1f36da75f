"""Attention to chosen keys (DeepSeek V3.2): an indexer scores all keys of a sequence, and a row sees the best ones.

On GPUs Triton scores, chooses and attends, and nothing is looked at on the host. Elsewhere torch does, and a sequence
with no more tokens than are chosen sees all of them (`moonpool.engine.kernels.attention`). In torch and in
deterministic mode, what a sequence gets depends on the sequence and its chunks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.attention import paged_attention, triton_head
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.plan import AttentionPlan, make_plan
from moonpool.engine.kernels.reference import dequantize
from moonpool.engine.kernels.self_check import triton_ops
from moonpool.engine.kernels.to_device import send_to_device

_TILE_BYTES = 32 << 20
"""Scores of some rows, or queries of some rows, that are held at a time."""


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """The sequences whose rows see all keys: arguments of `paged_attention`, and where the rows lie."""

    rows: Tensor  # [n] int64
    block_tables: Tensor  # [S, max_blocks] int32
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Where in the pool the keys lie that rows see, in rising order; R rows that see `topk` keys at most."""

    rows: Tensor | None  # [R] int64; None: all rows of the batch, in order
    places: Tensor  # [R, topk] int32: block * block_size + slot
    numbers: Tensor  # [R] int32: how many keys a row sees, the first of its places
    whole: WholeSequences | None  # sequences that are not longer; None: there are none


def choose_keys(
    q: Tensor,  # [T, heads, D]
    weights: Tensor,  # [T, heads] float32
    kv: Tensor,  # [blocks, 1, 1, block_size, D], the indexer's keys, those of the rows among them
    scales: Tensor | None,  # [blocks, 1, 1, block_size] float32, of quantised KV
    block_tables: Tensor,  # [S, max_blocks] int32
    query_start: Tensor,  # [S + 1] int32
    context_lens: Tensor,  # [S] int32
    scale: float,
    topk: int,
    *,
    plan: AttentionPlan | None = None,
    deterministic: bool = False,
) -> ChosenKeys | None:
    """Return the `topk` keys of each row with the highest sum of weights[h] * relu(q[h] k * scale) over the heads h.

    Tables, lengths and `plan` are those of `moonpool.engine.kernels.attention.paged_attention`. Of keys with the same
    sum the earlier ones are taken. Sums are computed in float32: in torch of sequences with one row together, padded to
    the longest; with `deterministic` each alone.

    Returns:
        None if no sequence has more than `topk` tokens.
    """
    if plan is None:
        plan = make_plan(kv, block_tables, query_start, context_lens, deterministic=deterministic)
    if plan.max_context <= topk:
        return None
    if choose("choose_keys", q.device, q.dtype) != "triton":
        return _by_torch(q, weights, kv, scales, block_tables, plan, scale, topk)
    places = torch.empty((len(q), topk), dtype=torch.int32, device=q.device)
    numbers = torch.empty(len(q), dtype=torch.int32, device=q.device)
    lists = block_tables, query_start, context_lens
    triton_ops().choose_keys(q, weights.contiguous(), kv, scales, *lists, scale, plan.max_context, places, numbers)
    return ChosenKeys(None, places, numbers, None)


def _by_torch(
    q: Tensor,
    weights: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    plan: AttentionPlan,
    scale: float,
    topk: int,
) -> ChosenKeys | None:
    spans, context_lens = list(pairwise(plan.query_start)), plan.context_lens
    longer = [s for s, (begin, end) in enumerate(spans) if end > begin and context_lens[s] > topk]
    if not longer:
        return None
    size, rows, places, numbers = kv.shape[3], list[Tensor](), list[Tensor](), list[Tensor]()
    for group in _groups(longer, spans, context_lens, q.shape[1:], alone=plan.deterministic):
        begins, count = [spans[s][0] for s in group], spans[group[0]][1] - spans[group[0]][0]
        lengths = [context_lens[s] for s in group]
        # One copy tells where the rows are, whose they are, and how long these are.
        told = send_to_device(torch.tensor([begins, group, lengths]), q.device)
        own = (told[0, :, None] + torch.arange(count, device=q.device)).flatten()
        tables = block_tables[told[1], : -(-max(lengths) // size)].long()  # [G, blocks]
        keys = dequantize(kv[tables], None if scales is None else scales[tables], torch.float32)
        keys = keys.view(len(group), -1, kv.shape[4])
        tokens, found = _best(q[own], weights[own], keys, told[2], scale, topk)
        rows.append(own)
        blocks = tables.repeat_interleave(count, 0).gather(1, tokens // size)
        places.append((blocks * size + tokens % size).int())
        numbers.append(found.int())
    others = [s for s in range(len(spans)) if s not in set(longer)]
    whole = _whole(others, spans, block_tables, context_lens) if others else None
    return ChosenKeys(torch.cat(rows), torch.cat(places), torch.cat(numbers), whole)


def chosen_attention(
    q: Tensor,  # [T, heads, D]
    kv: Tensor,  # [blocks, 1, 1, block_size, D]: latent vectors
    scales: Tensor | None,  # [blocks, 1, 1, block_size] float32, of quantised KV
    chosen: ChosenKeys,
    scale: float,
    value_dim: int,
    *,
    deterministic: bool,
) -> Tensor:
    """Return softmax(q k^T * scale) v over the keys that each row sees, [T, heads, value_dim].

    A value is the first `value_dim` elements of a key.
    """
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    if (whole := chosen.whole) is not None:
        tables = (whole.block_tables, whole.query_start, whole.context_lens)
        out[whole.rows] = paged_attention(
            q[whole.rows], kv, *tables, scale, scales=scales, deterministic=deterministic, value_dim=value_dim
        )
    by_triton = choose("attention", q.device, q.dtype) == "triton" and triton_head(kv, value_dim) and scale > 0.0
    ops = triton_ops() if by_triton else reference
    if chosen.rows is None:
        places, numbers = chosen.places, chosen.numbers
        ops.chosen_attention(q, kv, scales, places, numbers, scale, out, deterministic=deterministic)
        return out
    each = max(1, _TILE_BYTES // (q.shape[1] * q.shape[2] * q.element_size()))
    for first in range(0, len(chosen.rows), each):
        part = slice(first, first + each)
        rows, numbers = chosen.rows[part], chosen.numbers[part]
        found = torch.empty((len(rows), *out.shape[1:]), dtype=out.dtype, device=out.device)
        places = chosen.places[part]
        ops.chosen_attention(q[rows], kv, scales, places, numbers, scale, found, deterministic=deterministic)
        out[rows] = found
    return out


def _groups(
    longer: Sequence[int],
    spans: Sequence[tuple[int, int]],
    context_lens: Sequence[int],
    heads: Sequence[int],
    *,
    alone: bool,
) -> list[list[int]]:
    """Return sequences that are computed together: those with one row, by length, as far as keys and scores fit."""
    groups: list[list[int]] = []
    most = 0
    for s in sorted(longer, key=lambda s: (spans[s][1] - spans[s][0], context_lens[s])):
        single = spans[s][1] - spans[s][0] == 1
        if not groups or alone or not single or (len(groups[-1]) + 1) * context_lens[s] > most:
            groups.append([])
            most = _TILE_BYTES // (4 * sum(heads))
        groups[-1].append(s)
    return groups


def _best(
    q: Tensor, weights: Tensor, keys: Tensor, context_lens: Tensor, scale: float, topk: int
) -> tuple[Tensor, Tensor]:
    """Return the chosen tokens of sequences' last rows, [n, topk] int64 filled up with 0, and how many, [n].

    Args:
        q: rows [n, heads, D], as many of each sequence.
        weights: [n, heads].
        keys: of each sequence [S, tokens, D], those behind its context of any value.
        context_lens: [S] int64.
        scale: factor on products.
        topk: most keys of a row.
    """
    (sequences, context, width), heads = keys.shape, q.shape[1]
    each, turned, positions = len(q) // sequences, keys.transpose(1, 2), torch.arange(context, device=q.device)
    seen = (context_lens[:, None] - each + 1 + torch.arange(each, device=q.device)).flatten()
    tokens, numbers = [], []
    tile = len(q) if each == 1 else max(1, _TILE_BYTES // (heads * context * 4))
    for part in torch.split(torch.arange(len(q), device=q.device), tile):
        scores = torch.matmul(q[part].float().view(sequences, -1, width), turned).mul_(scale).relu_()
        sums = torch.bmm(weights[part, None], scores.view(len(part), heads, context))[:, 0]
        sums.masked_fill_(positions >= seen[part, None], -torch.inf)
        least = sums.topk(topk).values[:, -1:]
        best, equal = sums > least, (sums == least) & (sums > -torch.inf)
        best |= equal & (equal.cumsum(1) <= topk - best.sum(1, keepdim=True))
        numbers.append(best.sum(1))
        # Each chosen token goes to its place in order; all others go to a further place, which is dropped.
        places = torch.where(best, best.cumsum(1) - 1, topk)
        own = torch.zeros((len(part), topk + 1), dtype=torch.int64, device=q.device)
        tokens.append(own.scatter_(1, places, positions.expand_as(places))[:, :topk])
    return torch.cat(tokens), torch.cat(numbers)


def _whole(
    sequences: Sequence[int], spans: Sequence[tuple[int, int]], block_tables: Tensor, context_lens: Sequence[int]
) -> WholeSequences:
    device = block_tables.device
    counts = [spans[s][1] - spans[s][0] for s in sequences]
    return WholeSequences(
        send_to_device(torch.cat([torch.arange(*spans[s]) for s in sequences]), device),
        block_tables[send_to_device(torch.tensor(sequences), device)],
        send_to_device(torch.tensor([0, *counts]).cumsum(0).int(), device),
        send_to_device(torch.tensor([context_lens[s] for s in sequences], dtype=torch.int32), device),
    )
