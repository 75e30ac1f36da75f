"""Linear layers, and how their products are computed.

Where native kernels run, weights are arranged for them (`moonpool.engine.kernels.arranged_weights`). Elsewhere oneDNN's
arrangement is used if available, and packed weights are dequantised for each product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

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
