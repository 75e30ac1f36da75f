"""Attention over paged KV and KV writes: argument checks, then the chosen implementation.

All shapes and the pool's layout are stated at `paged_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.kernels import reference, torch_ops, triton
from moonpool.engine.kernels.check import dense, expect
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.kind import PLAIN, AttentionKind, HeadNorms
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.plan import AttentionPlan, make_plan, plan_of_shapes
from moonpool.engine.kernels.self_check import triton_ops

__all__ = [
    "AttentionKind", "AttentionPlan", "HeadNorms", "copy_blocks", "make_plan", "norm_rope_write", "paged_attention",
    "plan_of_shapes", "selected", "write_kv",
]  # fmt: skip


def selected(device: torch.device | str, dtype: torch.dtype) -> str:
    """Return the attention implementation's name for `device` and `dtype`; see `moonpool.engine.kernels.choice`."""
    return choose("attention", torch.device(device), dtype)


def paged_attention(
    q: Tensor,  # [T, heads, head_dim], each row dense, stride(0) free
    kv: Tensor,  # [blocks, kv_heads, planes, block_size, head_dim], as `_check_pool` says
    block_tables: Tensor,  # [S, max_blocks] int32, entries past a sequence's blocks are never read
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    out: Tensor | None = None,  # [T, heads, head_dim], contiguous
    *,
    kind: AttentionKind = PLAIN,
    scales: Tensor | None = None,  # [blocks, kv_heads, planes, block_size] float32, of quantised KV
    plan: AttentionPlan | None = None,
    deterministic: bool = False,
    value_dim: int | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v for every query row, causal, [T, heads, head_dim]; `out` if given.

    Rows query_start[s] .. query_start[s + 1] are sequence s's newest tokens: row i of n sits at position
    context_lens[s] - n + i and sees the keys up to that position. A sequence's token t is slot t % block_size in
    block block_tables[s, t // block_size]. Query head h reads key/value head h // (heads / kv_heads).

    Planes are two, K and V; or one plane with latent vectors: a vector is K, and its first `value_dim` elements are V
    (None: all), so that the result is [T, heads, value_dim]. Native kernels have two planes; Triton has both.

    `kind` adds a window, chunks, a soft cap or sinks. With a soft cap plain torch attends in place of native kernels.

    `kv` has q's type; or `kv` is int8 or float8_e4m3fn, and each number is the stored value times the token's entry in
    `scales` for this head and plane (K or V), see `moonpool.engine.kernels.kv_quantization`.

    Every element of the result is written; token slots past a sequence's context never reach the result, whatever they
    hold. `plan`, from `make_plan` with the same tensors, saves repeating checks and index computations for each layer.
    `deterministic` (with a plan: the plan's): a sequence's rows have the same bits whatever else is in the batch, for
    the same chunk borders.

    Raises:
        ValueError: an argument has a wrong shape, stride, type, device or value; the message begins with the argument's
            name.
    """
    if plan is None:
        plan = make_plan(
            kv, block_tables, query_start, context_lens,
            deterministic=deterministic, window=kind.window, chunked=kind.chunked,
        )  # fmt: skip
    if value_dim is not None and not (kv.shape[2] == 1 and 0 < value_dim <= kv.shape[4]):
        raise ValueError(f"value_dim: {value_dim} elements of a value, in kv {list(kv.shape)}")
    if out is None:
        out = torch.empty((*q.shape[:2], value_dim or q.shape[2]), dtype=q.dtype, device=q.device)
    _check(q, kv, scales, out, plan, value_dim)
    if (kind.window, kind.chunked) != (plan.window, plan.chunked) or (
        kind.sinks is not None and kind.sinks.shape != q.shape[1:2]
    ):
        raise ValueError(f"kind: {kind} does not belong to the plan's window {plan.window} and q's {q.shape[1]} heads")
    name = choose("attention", q.device, q.dtype)
    if name == "native" and native_head(kv) and kind.soft_cap is None:
        _native(q, kv, scales, block_tables, plan, scale, out, kind)
    elif name == "triton" and triton_head(kv, value_dim) and scale > 0.0:
        tables = block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous()
        triton_ops().prefill_attention(
            q, kv, scales, tables, query_start, context_lens, scale, out,
            kind=kind, max_context=plan.max_context, singles=plan.singles, deterministic=plan.deterministic,
        )  # fmt: skip
    elif name in ("native", "torch"):
        torch_ops.paged_attention(q, kv, scales, plan, scale, out, kind=kind)
    else:
        reference.prefill_attention(q, kv, scales, block_tables, query_start, context_lens, scale, out, kind=kind)
    return out


def write_kv(
    k: Tensor,  # [T, kv_heads, head_dim], each row dense
    v: Tensor | None,  # [T, kv_heads, head_dim], each row dense; None where kv has one plane
    kv: Tensor,  # [blocks, kv_heads, planes, block_size, head_dim], as `_check_pool` says
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
    *,
    scales: Tensor | None = None,  # [blocks, kv_heads, planes, block_size] float32, of quantised KV
) -> None:
    """Store T tokens' keys and values, token i in slot offsets[i] of block block_ids[i]; no slot comes twice.

    A token with block -1 is not stored. Quantised: each token has a separate scale in each head, see
    `moonpool.engine.kernels.reference.write_kv`.

    Raises:
        ValueError: an argument has a wrong shape, stride or type; the message begins with the argument's name.
        IndexError: a block or an offset outside the pool (on a GPU this is not looked at).
    """
    _check_pool(kv, scales)
    expected = (k.shape[0], kv.shape[1], kv.shape[4])
    if (v is None) != (kv.shape[2] == 1):
        raise ValueError(f"v: kv has {kv.shape[2]} planes; values are given where they are two")
    for name, tensor in (("k", k), ("v", v)):
        if tensor is not None:
            expect(name, tensor, expected, kv.dtype if scales is None else k.dtype, kv.device, dense_from=1)
    if scales is not None and not k.dtype.is_floating_point:
        raise ValueError(f"k: must be of a floating type, not {k.dtype}")
    for name, tensor in (("block_ids", block_ids), ("offsets", offsets)):
        expect(name, tensor, expected[:1], torch.int64, kv.device)
    chosen = choose("write_kv", k.device, k.dtype)
    _check_index("block_ids", block_ids, kv.shape[0], least=-1)
    _check_index("offsets", offsets, kv.shape[3])
    native = library.get() if chosen == "native" and native_head(kv) else None
    if native is not None and v is not None:
        native.write_kv(k, v, kv, scales, block_ids, offsets)
    elif chosen == "triton":
        triton_ops().write_kv(k, v, kv, scales, block_ids, offsets)
    else:
        reference.write_kv(k, v, kv, scales, block_ids, offsets)


def norm_rope_write(
    qk: Tensor,  # [T, heads + kv_heads, D], each row dense
    v: Tensor | None,  # [T, kv_heads, D], each row dense; None where nothing is stored, and then without keys
    heads: int,
    kv: Tensor | None,  # [blocks, kv_heads, 2, block_size, D], as `_check_pool` says; None: nothing is stored
    block_ids: Tensor,  # [T] int64
    offsets: Tensor,  # [T] int64
    *,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,  # cos and sin as for `moonpool.engine.kernels.ops.rope`, [T, width]
    scales: Tensor | None = None,  # [blocks, kv_heads, 2, block_size] float32, of quantised KV
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values as `write_kv` does: return queries [T, heads, D].

    One launch where Triton runs; results are those of the operations one by one.

    Raises:
        ValueError: an argument has a wrong shape, stride or type; the message begins with the argument's name.
    """
    if qk.dim() != 3 or not dense(qk, 1) or qk.shape[1] < heads or not qk.dtype.is_floating_point:
        raise ValueError(f"qk: must be [T, at least {heads}, D] with dense rows, not {list(qk.shape)} in {qk.dtype}")
    tokens, all_heads, head_dim = qk.shape
    for name, turn in zip(("cos", "sin"), angles or (), strict=False):
        if turn.dim() != 2 or turn.shape[1] % 2 or turn.shape[1] > head_dim:
            raise ValueError(f"{name}: must be [{tokens}, even, up to {head_dim}], not {list(turn.shape)}")
        expect(name, turn, (tokens, turn.shape[1]), qk.dtype, qk.device, dense_from=1)
    if (kv is None) != (v is None) or (kv is None and all_heads != heads):
        raise ValueError("v: values, keys and a pool are given together")
    if kv is not None and v is not None:
        _check_pool(kv, scales)
        expect("kv", kv, (kv.shape[0], all_heads - heads, 2, kv.shape[3], head_dim), kv.dtype, qk.device, dense_from=5)
        expect("v", v, (tokens, all_heads - heads, head_dim), qk.dtype, qk.device, dense_from=1)
        if scales is None and kv.dtype != qk.dtype:
            raise ValueError(f"kv: is {kv.dtype}, qk is {qk.dtype}")
    for name, tensor in (("block_ids", block_ids), ("offsets", offsets)):
        expect(name, tensor, (tokens,), torch.int64, qk.device)
    out = torch.empty((tokens, heads, head_dim), dtype=qk.dtype, device=qk.device)
    if choose("norm_rope_write", qk.device, qk.dtype) == "triton":
        triton_ops().norm_rope_write(qk, v, out, norms, angles, kv, scales, block_ids, offsets)
    else:
        reference.norm_rope_write(qk, v, out, norms, angles, kv, scales, block_ids, offsets)
    return out


def copy_blocks(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy block source[i] to block target[i] in every layer of `pool` [layers, blocks, ...], each block dense.

    `source` and `target` are [n] int64; no target comes twice or is a source.

    Raises:
        ValueError: an argument has a wrong shape, stride or type; the message begins with the argument's name.
        IndexError: a block outside the pool (on a GPU this is not looked at).
    """
    if pool.dim() < 3 or not dense(pool, 2):
        raise ValueError(f"pool: must be [layers, blocks, ...] with dense blocks, not {list(pool.shape)}")
    expect("source", source, source.shape[:1], torch.int64, pool.device)
    expect("target", target, source.shape, torch.int64, pool.device)
    name = choose("copy_blocks", pool.device, torch.float32)
    _check_index("source", source, pool.shape[1])
    _check_index("target", target, pool.shape[1])
    native = library.get() if name == "native" else None
    if native is not None:
        native.copy_blocks(pool, source, target)
    elif name == "triton":
        triton_ops().copy_blocks(pool, source, target)
    else:
        reference.copy_blocks(pool, source, target)


def _native(
    q: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    tables: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    kind: AttentionKind,
) -> None:
    native = library.get()
    assert native is not None
    if tables.stride(-1) != 1:
        tables = tables.contiguous()
    sinks = None if kind.sinks is None else kind.sinks.float().contiguous()
    seen = library.Seen(kind.window or 0, kind.chunked, sinks)
    if plan.decode.shape[0]:
        native.decode_attention(q, kv, scales, tables, plan.decode, scale, out, seen)
    if plan.prefill.shape[0]:
        native.prefill_attention(q, kv, scales, tables, plan.prefill, scale, out, seen)


def _check(
    q: Tensor, kv: Tensor, scales: Tensor | None, out: Tensor, plan: AttentionPlan, value_dim: int | None
) -> None:
    """Check what differs between two calls with the same plan."""
    if kv.shape != plan.kv_shape:
        raise ValueError(f"plan: made for kv {list(plan.kv_shape)}, not {list(kv.shape)}")
    _check_pool(kv, scales)
    if q.dim() != 3 or q.shape[0] != plan.num_rows or q.shape[2] != kv.shape[4]:
        raise ValueError(f"q: must be [{plan.num_rows}, heads, {kv.shape[4]}], not {list(q.shape)}")
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads are no multiple of kv's {kv.shape[1]}")
    if (scales is None and q.dtype != kv.dtype) or q.device != kv.device or not q.dtype.is_floating_point:
        raise ValueError(f"q: is {q.dtype} on {q.device}, kv is {kv.dtype} on {kv.device}")
    if not dense(q, 1):
        raise ValueError(f"q: each row must be contiguous, has strides {q.stride()}")
    expect("out", out, (*q.shape[:2], value_dim or q.shape[2]), q.dtype, q.device)


def _check_pool(kv: Tensor, scales: Tensor | None) -> None:
    """Check that blocks are dense; of quantised KV, planes are dense, and all planes of a block equally far apart."""
    if kv.dim() != 5 or kv.shape[2] not in (1, 2):
        raise ValueError(f"kv: must be [blocks, kv_heads, 1 or 2, block_size, head_dim], not {list(kv.shape)}")
    quantized = kv.dtype in reference.QUANTIZED_MAX
    if quantized != (scales is not None):
        raise ValueError(f"scales: {'needed' if quantized else 'only'} for quantised kv, which is {kv.dtype}")
    if scales is None:
        if not dense(kv, 1):
            raise ValueError(f"kv: each block must be contiguous, has strides {kv.stride()}")
        return
    expect("scales", scales, kv.shape[:4], torch.float32, kv.device, dense_from=3)
    for name, tensor in (("kv", kv), ("scales", scales)):
        apart = kv.shape[1] == 1 or tensor.stride(1) == tensor.stride(2) * kv.shape[2]
        if not dense(tensor, 3) or not apart:
            raise ValueError(f"{name}: planes must be dense and equally far apart, has strides {tensor.stride()}")


def _check_index(name: str, index: Tensor, limit: int, least: int = 0) -> None:
    if index.device.type != "cpu" or not index.numel():
        return
    native = library.loaded()
    if native is not None:
        outside = native.outside(index, least, limit)
    else:
        low, high = torch.aminmax(index)
        outside = int(low) < least or int(high) >= limit
    if outside:
        raise IndexError(f"{name}: an entry is outside {least}..{limit - 1}")


def native_head(kv: Tensor) -> bool:
    """Return whether the native kernels take such heads."""
    return kv.shape[2] == 2 and kv.shape[4] % 16 == 0 and kv.shape[4] <= library.MAX_HEAD_DIM


def triton_head(kv: Tensor, value_dim: int | None = None) -> bool:
    """Return whether Triton's kernels take such heads; of latent vectors `value_dim` elements are a value."""
    if kv.shape[2] == 2:
        return kv.shape[4] <= triton.MAX_HEAD_DIM
    return value_dim is not None and triton.takes_latent(value_dim, kv.shape[4] - value_dim)
