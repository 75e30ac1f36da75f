"""The small operations of a transformer's layer: argument checks, then the chosen implementation.

Meaning and rounding are those of `moonpool.engine.kernels.reference`; every element of the result is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonpool.engine.kernels import packed, reference, torch_ops
from moonpool.engine.kernels.check import dense, expect
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.packed import PackedTensor
from moonpool.engine.kernels.self_check import triton_ops

__all__ = ["add_weighted", "expert_linear", "norm", "packed_linear", "rms_norm", "rope", "silu_mul"]


def rms_norm(
    x: Tensor,  # [T, n], each row dense
    weight: Tensor,  # [n]
    eps: float,
    *,
    residual: Tensor | None = None,  # [T, n], contiguous
    out: Tensor | None = None,  # [T, n], contiguous; may be x
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight; with `residual`, `residual` becomes x + residual first and is normed.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if x.dim() != 2 or not dense(x, 1):
        raise ValueError(f"x: must be [T, n] with dense rows, not {list(x.shape)} with strides {x.stride()}")
    expect("weight", weight, x.shape[1:], x.dtype, x.device)
    if residual is not None:
        expect("residual", residual, x.shape, x.dtype, x.device)
    out = _result(out, x.shape, x)
    _implementation("rms_norm", x).rms_norm(x, residual, weight, eps, out)
    return out


def norm(
    x: Tensor,  # [T, ..., n]
    weight: Tensor | None,  # [n], or [heads, n] of x [T, heads, n]; float32
    bias: Tensor | None,  # [n] float32
    eps: float,
    *,
    centred: bool,
    wide: bool,
    residual: Tensor | None = None,  # [T, n], contiguous
    out: Tensor | None = None,  # as x, each row dense
) -> Tensor:
    """Return the norm of x; see `moonpool.engine.kernels.reference.norm`.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if residual is not None:
        expect("residual", residual, x.shape, x.dtype, x.device)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out: must be {list(x.shape)} {x.dtype}, not {list(out.shape)} {out.dtype}")
    if choose("norm", x.device, x.dtype) == "triton":
        rows = x if x.stride(-1) == 1 else x.contiguous()
        if x.dim() != 3:
            rows, result = rows.reshape(-1, 1, x.shape[-1]), out.view(-1, 1, x.shape[-1])
        else:
            result = out
        added = None if residual is None else residual.view(rows.shape)
        triton_ops().norm(rows, added, weight, bias, eps, result, centred=centred, wide=wide)
    else:
        reference.norm(x, residual, weight, bias, eps, out, centred=centred, wide=wide)
    return out


def rope(
    x: Tensor,  # [T, heads, D], each row dense
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D], first half negated
    *,
    out: Tensor | None = None,  # [T, heads, D], contiguous
) -> Tensor:
    """Return x * cos + roll(x, D / 2) * sin, rotary position embeddings in the half-split form.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if x.dim() != 3 or x.shape[2] % 2 or not dense(x, 1):
        raise ValueError(f"x: must be [T, heads, even] with dense rows, not {list(x.shape)} with strides {x.stride()}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        expect(name, tensor, (x.shape[0], x.shape[2]), x.dtype, x.device)
    out = _result(out, x.shape, x)
    _implementation("rope", x).rope(x, cos, sin, out)
    return out


def silu_mul(
    gate_up: Tensor,  # [T, 2 * n], each row dense: gate, then up
    *,
    out: Tensor | None = None,  # [T, n], contiguous
) -> Tensor:
    """Return silu(gate) * up.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not dense(gate_up, 1):
        raise ValueError(f"gate_up: must be [T, even] with dense rows, not {list(gate_up.shape)}")
    out = _result(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up)
    _implementation("silu_mul", gate_up).silu_mul(gate_up, out)
    return out


def packed_linear(
    x: Tensor,  # [M, K], each row dense
    weight: PackedTensor,  # [N, K], on x's device, as products take the weight
    bias: Tensor | None = None,  # [N]
) -> Tensor:
    """Return x @ weight.T + bias, [M, N], with the rows in bytes: the arithmetic of `moonpool.engine.kernels.packed`.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[1] or not dense(x, 1):
        raise ValueError(f"x: must be [M, {weight.shape[1]}] with dense rows, not {list(x.shape)}")
    if bias is not None:
        expect("bias", bias, weight.shape[:1], x.dtype, x.device)
    out = _result(None, (x.shape[0], weight.shape[0]), x)
    if choose("packed_linear", x.device, x.dtype) == "triton":
        triton_ops().packed_linear(x, weight, bias, out)
    else:
        packed.packed_linear(x, weight, bias, out)
    return out


def expert_linear(
    x: Tensor,  # [T, K], each row dense
    tokens: Tensor | None,  # [N] int64
    starts: Tensor,  # [experts + 1] int64, from 0 to N
    weights: ExpertMatrices,  # [outputs, K] of each expert
    *,
    deterministic: bool = False,
) -> Tensor:
    """Return the product of each row with its expert's matrix, [N, outputs]; see `reference.expert_linear`.

    `tokens`: the row of `x` that each row of the result is of; None: its own.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    outputs, inputs = weights.matrices[0].shape
    if x.dim() != 2 or x.shape[1] != inputs or not dense(x, 1) or x.dtype != weights.matrices[0].dtype:
        raise ValueError(f"x: must be [T, {inputs}] with dense rows, not {list(x.shape)} in {x.dtype}")
    expect("starts", starts, (len(weights.matrices) + 1,), torch.int64, x.device)
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    if tokens is not None:
        expect("tokens", tokens, (rows,), torch.int64, x.device)
    out = _result(None, (rows, outputs), x)
    _of_experts(x).expert_linear(x, tokens, starts, weights, out, deterministic=deterministic)
    return out


def add_weighted(
    results: Tensor,  # [N, n], contiguous
    places: Tensor,  # [T, chosen] int64
    weights: Tensor | None,  # [T, chosen] float32
) -> Tensor:
    """Return the weighted sum of each token's rows, [T, n]; see `moonpool.engine.kernels.reference.add_weighted`.

    Raises:
        ValueError: an argument has a wrong shape, stride, type or device; the message begins with the argument's name.
    """
    if results.dim() != 2 or not results.is_contiguous():
        raise ValueError(f"results: must be [N, n], contiguous, not {list(results.shape)}")
    expect("places", places, places.shape[:2], torch.int64, results.device)
    if weights is not None:
        expect("weights", weights, places.shape, torch.float32, results.device)
    out = _result(None, (places.shape[0], results.shape[1]), results)
    _of_experts(results).add_weighted(results, places, weights, out)
    return out


def _of_experts(x: Tensor) -> Any:
    if choose("expert_linear", x.device, x.dtype) == "triton":
        return triton_ops()
    return reference


def _result(out: Tensor | None, shape: Any, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    expect("out", out, shape, like.dtype, like.device, writable=True)
    return out


def _implementation(operation: str, x: Tensor) -> Any:
    name = choose(operation, x.device, x.dtype)
    if name == "native":
        return library.get()
    if name == "triton":
        return triton_ops()
    return reference if name == "reference" else torch_ops
