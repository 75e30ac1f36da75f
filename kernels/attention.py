"""Attention over paged KV: the one entry, its argument checks, and the choice of the implementation.

Owns which implementation runs on which device and element type. It must not know models, sequences' tokens or who
filled the pool. All shapes and the pool's layout are stated at `paged_attention`.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.plan import AttentionPlan, make_plan

__all__ = ["AttentionPlan", "make_plan", "paged_attention", "selected", "write_kv"]

_log = logging.getLogger(__name__)
_said: set[tuple[str, torch.dtype]] = set()
_said_lock = threading.Lock()


def selected(device: torch.device | str, dtype: torch.dtype) -> str:
    """Return the name of the implementation for `device` and `dtype`: "cpu" or "reference"; logs each choice once."""
    kind = torch.device(device).type
    name = "cpu" if kind == "cpu" and dtype in cpu.DTYPES else "reference"
    if (kind, dtype) not in _said:
        with _said_lock:
            if (kind, dtype) not in _said:
                _said.add((kind, dtype))
                _log.info("paged attention on %s in %s: %s", kind, str(dtype).removeprefix("torch."), name)
    return name


def paged_attention(
    q: Tensor,  # [T, heads, head_dim]
    kv: Tensor,  # [blocks, kv_heads, 2, block_tokens, head_dim], contiguous
    block_tables: Tensor,  # [S, max_blocks] int32, entries past a sequence's blocks are never read
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    out: Tensor | None = None,  # [T, heads, head_dim], contiguous
    *,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v for every query row, causal, [T, heads, head_dim]; `out` when it is given.

    Rows query_start[s] .. query_start[s + 1] are sequence s's newest tokens: row i of n sits at position
    context_lens[s] - n + i and sees the keys up to its own position. Token t of a sequence is slot t % block_tokens of
    block block_tables[s, t // block_tokens]. Query head h reads key/value head h // (heads / kv_heads).

    Every element of the result is written; token slots past a sequence's context never reach it, whatever they hold.
    `plan`, from `make_plan` with the same tensors, saves repeating checks and index computations for each layer.

    Raises:
        ValueError: an argument has a wrong shape, type, device or value; the message begins with its name.
    """
    if plan is None:
        plan = make_plan(kv, block_tables, query_start, context_lens)
    _check(q, kv, out, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if selected(q.device, q.dtype) == "cpu":
        cpu.paged_attention(q, kv, plan, scale, out)
    else:
        reference.paged_attention(q, kv, block_tables, plan.query_start, plan.context_lens, scale, out)
    return out


def write_kv(
    k: Tensor,  # [T, kv_heads, head_dim]
    v: Tensor,  # [T, kv_heads, head_dim]
    kv: Tensor,  # [blocks, kv_heads, 2, block_tokens, head_dim]
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
) -> None:
    """Store the keys and values of T tokens, token i in slot offsets[i] of block block_ids[i].

    Raises:
        ValueError: an argument has a wrong shape or type; the message begins with its name.
        IndexError: a block or an offset outside the pool.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: must be [blocks, kv_heads, 2, block_tokens, head_dim], not {list(kv.shape)}")
    expected = (k.shape[0], kv.shape[1], kv.shape[4])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != expected or tensor.dtype != kv.dtype:
            raise ValueError(
                f"{name}: must be {list(expected)} in {kv.dtype}, not {list(tensor.shape)} in {tensor.dtype}"
            )
    for name, tensor in (("block_ids", block_ids), ("offsets", offsets)):
        if tensor.shape != expected[:1] or tensor.dtype != torch.int64:
            raise ValueError(f"{name}: must be [{expected[0]}] in torch.int64, not {list(tensor.shape)}")
    slots = kv.permute(2, 0, 3, 1, 4)  # [2, blocks, block_tokens, kv_heads, head_dim]
    slots[0][block_ids, offsets] = k
    slots[1][block_ids, offsets] = v


def _check(q: Tensor, kv: Tensor, out: Tensor | None, plan: AttentionPlan) -> None:
    """Check what differs between two calls with the same plan."""
    if kv.shape != plan.kv_shape:
        raise ValueError(f"plan: made for kv {list(plan.kv_shape)}, not {list(kv.shape)}")
    if not kv.is_contiguous():
        raise ValueError("kv: must be contiguous")
    if q.dim() != 3 or q.shape[0] != plan.num_rows or q.shape[2] != kv.shape[4]:
        raise ValueError(f"q: must be [{plan.num_rows}, heads, {kv.shape[4]}], not {list(q.shape)}")
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"q: its {q.shape[1]} heads are no multiple of kv's {kv.shape[1]}")
    if q.dtype != kv.dtype or q.device != kv.device:
        raise ValueError(f"q: is {q.dtype} on {q.device}, kv is {kv.dtype} on {kv.device}")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(f"out: must be a contiguous {list(q.shape)} in {q.dtype}, not {list(out.shape)}")
