"""Building blocks of a layer: linear layers, rotary position embeddings, norms, feed-forward networks.

Where native kernels run, weights are arranged for them (`moonpool.engine.kernels.arranged_weights`). Elsewhere oneDNN's
arrangement is used if available, and packed weights are dequantised for each product. Source of the embeddings: Su et
al. 2021 (RoFormer), in the half-split form of transformers' `rotate_half`; Llama-3 scaling as in transformers'
`_compute_llama3_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.families.spec import FeedForwardSpec, NormSpec, RopeScaling, RopeSpec
from moonpool.engine.kernels import ops
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_packed, arrange_weight
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.packed import bytes_of_rows
from moonpool.engine.models.packed import PackedWeight

# Arrangements chosen for many rows turned out best for few rows too.
_ROWS_HINT = 512


#: Rows of oneDNN's products in deterministic mode: in one shape, a row's bits depend neither on its place nor on the
#: others (held by a test; in other shapes it may divide the sums in another way). The native ones need no such thing.
FIXED_ROWS = 32


_VECTOR = 64
"""Elements of which torch's operations on vectors take a whole number."""
_ONE_THREAD = (1 << 15) - 1
"""Elements that torch does not divide among threads."""


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function` of the rows of `x` [T, ...], FIXED_ROWS at a time, the last ones filled up with zeros."""
    filled = -x.shape[0] % FIXED_ROWS
    padded = torch.cat((x, x.new_zeros((filled, *x.shape[1:])))) if filled else x
    return torch.cat([function(tile) for tile in torch.split(padded, FIXED_ROWS)])[: x.shape[0]]


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor, *, deterministic: bool = True) -> Tensor:
    """Return `function` of each element of `x` [T, ...].

    On a CPU, torch computes the last elements of a thread's part one by one, with other bits than vectors give.
    `deterministic`: the bits depend on the row alone, not on the row's place.
    """
    if not deterministic or x.device.type != "cpu" or not x.numel():
        return function(x)
    flat = x.flatten(1)
    width = flat.shape[1]
    wide = functional.pad(flat, (0, -width % _VECTOR))
    parts = [function(part) for part in torch.split(wide, max(1, _ONE_THREAD // wide.shape[1]))]
    return torch.cat(parts)[:, :width].reshape(x.shape)


_DEQUANTISED_OUTPUTS = 4096
"""Outputs of a packed weight that the torch path dequantises at a time."""


class Linear:
    """x [rows, inputs] to x @ weight.T + bias [rows, outputs], in the weight's element type.

    `gated`: the outputs are gates, then as many ups, and the result is silu(gates) * ups, [rows, outputs / 2]. The
    weight is kept only in arranged form, in memory from `arena`. A packed weight multiplies rows of `dtype` in bytes,
    or as they are if codes stand for floats (`moonpool.engine.kernels.packed`). If products do not take the weight, it
    becomes dense.
    """

    def __init__(
        self,
        weight: Tensor | PackedWeight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        arena: WeightArena | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = weight.shape
        self.gated = gated
        self.bias = bias
        self._weight: Tensor | PackedWeight | None = None
        self._reordered = False
        arena = arena or WeightArena()
        if isinstance(weight, PackedWeight):
            assert dtype is not None
            self.dtype, self.device = dtype, weight.codes.device
            packed = weight.for_products()
            weight = weight.dequantise().to(dtype) if packed is None else packed
        if isinstance(weight, PackedWeight):
            self.panels = arrange_packed(weight, bias, self.dtype, gated=gated, arena=arena)
            self._weight = weight if self.panels is None else None
        else:
            self.dtype, self.device = weight.dtype, weight.device
            self.panels = arrange_weight(weight, bias, gated=gated, arena=arena)
            if self.panels is None:
                reordered = _onednn_reorder(weight)
                self._reordered = reordered is not None
                self._weight = weight if reordered is None else reordered
        its = weight if self.panels is None or isinstance(weight, Tensor) else self.panels.memory
        self.nbytes = its.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(
        self, x: Tensor, *, deterministic: bool = False, wide: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return the product; `wide`: as float32, rounded to the weight's type first.

        `out`: an earlier result of the same call with as many rows, whose memory may be used.
        `deterministic`: the same row gives the same bits in every batch, see FIXED_ROWS.
        """
        if self.panels is not None:
            return self.panels.product(x, wide=wide, out=out)
        result = in_tiles(self._product, x) if deterministic else self._product(x)
        if self.gated:
            result = gated(result, deterministic=deterministic)
        return result.float() if wide else result

    @classmethod
    def arranged(cls, panels: ArrangedWeight, bias: Tensor | None) -> Linear:
        """Return the linear layer of a weight that is arranged, with its bias."""
        its, parts = cls.__new__(cls), panels.structure
        its.shape, its.gated, its.bias = torch.Size((parts.outputs, parts.inputs)), bool(parts.gated), bias
        its._weight, its._reordered, its.panels = None, False, panels
        its.dtype, its.device = panels.dtype, panels.memory.device
        its.nbytes = panels.nbytes + (0 if bias is None else bias.nbytes)
        return its

    def apart(self, x: Tensor, *, deterministic: bool) -> Tensor:
        """Return a gated product before the activation: gates, then ups [rows, outputs]."""
        if self.panels is not None:
            return self.panels.apart(x)
        return in_tiles(self._product, x) if deterministic else self._product(x)

    def plain(self) -> Tensor | None:
        """Return the weight [outputs, inputs] if it is held in plain form, with a bias beside."""
        return None if self._reordered or not isinstance(self._weight, Tensor) else self._weight

    def dense(self) -> Tensor:
        """Return the weight in plain form [outputs, inputs], a packed weight dequantised."""
        if self.panels is not None:
            return self.panels.rows(torch.arange(self.shape[0]))
        assert self._weight is not None
        if isinstance(self._weight, PackedWeight):
            return self._weight.dequantise().to(self.dtype)
        return self._weight.to_dense() if self._reordered else self._weight

    def _product(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        if isinstance(self._weight, PackedWeight):
            return self._packed_product(x, self._weight)
        if not self._reordered:
            return functional.linear(x, self._weight, self.bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return result

    def _packed_product(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if choose("linear", x.device, x.dtype) == "triton":
            return ops.packed_linear(x, weight, self.bias)
        rows = x.float()
        if not weight.floats:
            numbers, scales = bytes_of_rows(x)
            rows = numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
        parts = []
        for begin in range(0, weight.outputs, _DEQUANTISED_OUTPUTS):
            outputs = slice(begin, begin + _DEQUANTISED_OUTPUTS)
            bias = None if self.bias is None else self.bias[outputs].float()
            parts.append(functional.linear(rows, weight.select(outputs).dequantise(), bias).to(self.dtype))
        return torch.cat(parts, dim=1)


def gated(both: Tensor, *, deterministic: bool) -> Tensor:
    """Return silu(gates) * ups from gates, then ups [rows, outputs]."""
    # Native and Triton's kernels compute each row alone in any case.
    alone = choose("silu_mul", both.device, both.dtype) in ("native", "triton")
    if deterministic and not alone:
        gates, ups = both.chunk(2, dim=-1)
        return elementwise(functional.silu, gates, deterministic=True) * ups
    return ops.silu_mul(both)


@torch.inference_mode()
def _onednn_reorder(weight: Tensor) -> Tensor | None:
    """Return `weight` in oneDNN's arrangement, or None if not possible."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if choose("linear", weight.device, weight.dtype) == "triton":  # interpreted kernels read it
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return packed


TABLE = 8192
"""Leading positions with kept angles: a step's look-up takes a fifth of the time."""


class RopeTable:
    """Angles for one rotary embedding table in one element type, for at least `positions` positions."""

    def __init__(self, rope: RopeSpec, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._frequencies = inverse_frequencies(rope).to(device)
        self._dtype = dtype
        kept = self._computed(torch.arange(min(TABLE, positions), device=device))
        self._kept = torch.stack(kept)  # [2, positions, width]: one look-up for both

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and *signed* sin for `positions` [T], each [T, width], computed in float32.

        The first half of sin is negated, as `moonpool.engine.kernels.ops.rope` requires.
        """
        # Elsewhere than on a CPU, looking at a position would wait for the device.
        if positions.device.type != "cpu" or int(positions.numpy().max()) >= self._kept.shape[1]:
            return self._computed(positions)
        cos, sin = self._kept.index_select(1, positions)
        return cos, sin

    def ahead(self, positions: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cos and signed sin, each [N, width], for `positions` [T] (on a CPU) and the positions after them.

        Row `turns[i]` belongs to `positions[i]`, and up to `steps` rows follow for the next positions; `turns` [T]
        int64.
        """
        if int(positions.max()) + steps < self._kept.shape[1]:
            return self._kept[0], self._kept[1], positions.clone()
        later = positions[:, None] + torch.arange(steps + 1)
        return *self._computed(later.flatten()), torch.arange(len(positions)) * (steps + 1)

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return what queries at `positions` [T] are multiplied with, [T, 1, 1]; None if 1."""
        if self._rope.by_length is None:
            return None
        beta, length = self._rope.by_length
        positions = positions + self._rope.length_from
        steps = torch.div(positions, length, rounding_mode="floor").float()
        factors = 1 + beta * elementwise(torch.log1p, steps[:, None, None])
        return factors.to(self._dtype)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = (elementwise(turn, angles) * self._rope.magnitude for turn in (torch.cos, torch.sin))
        return torch.cat((cos, cos), dim=-1).to(self._dtype), torch.cat((-sin, sin), dim=-1).to(self._dtype)


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Return the angle per position for each pair of elements, float32 [width / 2]."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return (_yarn if scaling.kind == "yarn" else _llama3)(frequencies, scaling)


def _yarn(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep the frequencies for the ramp's first pairs, divide those for the last pairs by `factor`."""
    low, high = scaling.ramp
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the low frequencies down by `factor`, keep the high ones, go over smoothly between."""
    original = scaling.original_max_position_embeddings
    low_wavelength = original / scaling.low_freq_factor
    high_wavelength = original / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > low_wavelength, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * slowed / scaling.factor + smooth * slowed
    medium = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(medium, between, slowed)


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

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of `x` [T, ..., n]; with `residual`, `residual` becomes x + residual first and is normed."""
        if self._plain and x.dim() == 2:
            assert self.weight is not None
            return ops.rms_norm(x, self.weight, self.spec.eps, residual=residual)
        if residual is not None:
            x = residual.add_(x)
        shape, eps = (x.shape[-1],), self.spec.eps
        by_head = self._wide is not None and self._wide.dim() > 1
        weight = None if by_head else self._wide
        if self.spec.kind == "layer":
            normed = functional.layer_norm(x.float(), shape, weight, self._wide_bias, eps)
        elif self.spec.wide or self._wide is None:
            normed = functional.rms_norm(x.float(), shape, weight, eps)
        else:
            return functional.rms_norm(x.float(), shape, None, eps).to(x.dtype) * self._wide.to(x.dtype)
        if by_head:
            assert self._wide is not None
            normed = normed * self._wide
        return normed.to(x.dtype)


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
        return self.down(inner, deterministic=deterministic)


def fused_gate(spec: FeedForwardSpec) -> bool:
    """Whether the product of gates and ups also computes the activation."""
    return spec.gated and spec.activation == "silu"


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
    return elementwise(function, gate, deterministic=deterministic) * up


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
