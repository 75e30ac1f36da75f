"""A layer's norms and feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.families.spec import FeedForwardSpec, NormSpec
from moonpool.engine.kernels import ops
from moonpool.engine.kernels.deterministic import elementwise
from moonpool.engine.kernels.kind import HeadNorms
from moonpool.engine.weights.linear import Linear

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


class Norm:
    """A norm with the stored weight [n], or [heads, head_dim] for a norm per head, and bias."""

    def __init__(self, spec: NormSpec, weight: Tensor | None, bias: Tensor | None = None) -> None:
        self.spec = spec
        self.weight = weight
        self._bias = bias
        self._plain = spec.plain
        self._wide = None if weight is None else weight.float() + spec.offset
        self._wide_bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return sum(part.nbytes for part in (self.weight, self._bias) if part is not None)

    @staticmethod
    def of_heads(q: Norm | None, k: Norm | None, *, last: bool) -> HeadNorms | None:
        """Return the norms of each head of queries and keys, if they have any; `last`: behind the rotation."""
        if q is None:
            return None
        centred, keys = q.spec.kind == "layer", (None, None) if k is None else (k._wide, k._wide_bias)
        parts = q._wide, keys[0], q._wide_bias, keys[1]
        return HeadNorms(*parts, q.spec.eps, centred=centred, wide=centred or q.spec.wide, last=last)

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return the norm of `x` [T, ..., n]; with `residual`, `residual` becomes x + residual first and is normed.

        `out`: where the result lies, with dense rows; None: anywhere.
        """
        if self._plain and x.dim() == 2 and out is None:
            assert self.weight is not None
            return ops.rms_norm(x, self.weight, self.spec.eps, residual=residual)
        centred = self.spec.kind == "layer"
        wide, weights = centred or self.spec.wide, (self._wide, self._wide_bias)
        return ops.norm(x, *weights, self.spec.eps, centred=centred, wide=wide, residual=residual, out=out)

    def with_mean_square(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return the RMS norm of `x` [T, n], a part of vectors whose elements' squares have the mean `mean` [T, 1].

        The weight is of this part.
        """
        assert self.spec.kind == "rms"
        assert self._wide is not None
        normed = x.float() * torch.rsqrt(mean + self.spec.eps)
        return (normed * self._wide).to(x.dtype) if self.spec.wide else normed.to(x.dtype) * self._wide.to(x.dtype)


@dataclass(slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    spec: FeedForwardSpec
    gate_up: Linear  # hidden to intermediate if the activation is silu, else to gates and ups, or ups alone
    down: Linear  # intermediate to hidden

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor, *, deterministic: bool) -> Tensor:
        """Return the network's output [T, hidden] for `x` [T, hidden]."""
        inner = self.gate_up(x, deterministic=deterministic)
        if not self.gate_up.gated:
            inner = activate(self.spec, inner, deterministic=deterministic)
        result = self.down(inner, deterministic=deterministic)
        return result.mul_(self.spec.output_factor) if self.spec.output_factor else result


def fused_gate(spec: FeedForwardSpec) -> bool:
    """Tell whether the product of gates and ups also computes the activation."""
    return spec.gated and spec.activation == "silu" and not (spec.gate_factor or spec.silu_limit)


def activate(spec: FeedForwardSpec, inner: Tensor, *, deterministic: bool) -> Tensor:
    """Return activation(gates) * ups from [T, gates and ups], or activation(ups) from [T, ups]."""
    if spec.activation == "clamped_swiglu":  # gpt-oss
        gate, up = inner.chunk(2, dim=-1)
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return (up + 1) * (gate * elementwise(torch.sigmoid, gate * spec.alpha, deterministic=deterministic))
    function = _ACTIVATIONS[spec.activation]
    if not spec.gated:
        return elementwise(function, inner, deterministic=deterministic)
    gate, up = inner.chunk(2, dim=-1)
    gate = gate * spec.gate_factor if spec.gate_factor else gate
    gate = elementwise(function, gate, deterministic=deterministic)
    if spec.silu_limit:
        gate, up = gate.clamp(max=spec.silu_limit), up.clamp(-spec.silu_limit, spec.silu_limit)
    return gate * up
