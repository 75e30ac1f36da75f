"""Paged attention in plain torch, sequence by sequence, in float32: what every other implementation is compared with.

Runs on any device and any floating type. It must stay simple enough to be seen to be right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,  # [T, heads, head_dim]
    kv: Tensor,  # [blocks, kv_heads, 2, block_tokens, head_dim]
    block_tables: Tensor,  # [S, max_blocks]
    query_start: Sequence[int],  # [S + 1]
    context_lens: Sequence[int],  # [S]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
) -> None:
    """Write the attention of every query row to `out`; meaning as in `kernels.attention.paged_attention`."""
    _, kv_heads, _, block_tokens, head_dim = kv.shape
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // kv_heads
    for s, context in enumerate(context_lens):
        begin, end = query_start[s], query_start[s + 1]
        if begin == end:
            continue
        blocks = kv[block_tables[s, : -(-context // block_tokens)].long()]  # [n, kv_heads, 2, block_tokens, head_dim]
        both = blocks.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :context].to(precision)
        keys, values = both.repeat_interleave(group, dim=1)  # [heads, context, head_dim] each
        scores = torch.matmul(q[begin:end].transpose(0, 1).to(precision), keys.transpose(1, 2)) * scale
        key_position = torch.arange(context, device=q.device)
        query_position = torch.arange(context - (end - begin), context, device=q.device)
        hidden = key_position[None, :] > query_position[:, None]  # [rows, context]
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        out[begin:end] = torch.matmul(weights, values).transpose(0, 1).to(q.dtype)
