"""Matrix products with weights that never change, arranged once, at load.

Where native kernels run, weights lie in their panels (`kernels.panels`). Elsewhere they lie as oneDNN wants them, which
rearranges a plain weight in each call; its operators are those of torch's own compiler, and where they are missing or
refuse, the weight stays plain.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import ops
from kernels.memory import Arena
from kernels.panels import Panels, arrange

# Arrangements chosen for many rows turned out best for few rows too.
_ROWS_HINT = 512
#: Rows of oneDNN's products in deterministic mode: in one shape, a row's bits depend neither on its place nor on the
#: others (held by a test; in other shapes it may divide the sums in another way). The native ones need no such thing.
FIXED_ROWS = 32


class Linear:
    """x [rows, inputs] to x @ weight.T + bias [rows, outputs], in the weight's element type.

    `gated`: the outputs are gates, then as many ups, and the result is silu(gates) * ups, [rows, outputs / 2].
    The weight is not kept: what is kept is its arrangement, in memory from `arena`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, arena: Arena | None = None
    ) -> None:
        self.shape = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.panels: Panels | None = arrange(weight, bias, gated=gated, arena=arena or Arena())
        self._bias = bias
        self._gated = gated
        self._weight: Tensor | None = None
        self._packed = False
        if self.panels is None:
            packed = _pack(weight)
            self._packed = packed is not None
            self._weight = weight if packed is None else packed

    def __call__(
        self, x: Tensor, *, deterministic: bool = False, wide: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return the product; `wide`: as float32, after it was rounded to the weight's type.

        `out`: a result of the same call with as many rows, of which the memory may be used.
        `deterministic`: the same row gives the same bits in every batch, see FIXED_ROWS.
        """
        if self.panels is not None:
            return self.panels.product(x, wide=wide, out=out)
        result = self._in_tiles(x) if deterministic else self._product(x)
        if self._gated:
            result = ops.silu_mul(result)
        return result.float() if wide else result

    def dense(self) -> Tensor:
        """Return the weight in plain form [outputs, inputs]."""
        if self.panels is not None:
            return self.panels.rows(torch.arange(self.shape[0]))
        assert self._weight is not None
        return self._weight.to_dense() if self._packed else self._weight

    def _in_tiles(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        result = x.new_empty((rows, self.shape[0]))
        padded = x.new_zeros((FIXED_ROWS, x.shape[1]))
        for begin in range(0, rows, FIXED_ROWS):
            count = min(FIXED_ROWS, rows - begin)
            tile = x[begin : begin + count]
            if count < FIXED_ROWS:
                padded[:count] = tile
                tile = padded
            result[begin : begin + count] = self._product(tile)[:count]
        return result

    def _product(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor | None:
    """Return `weight` as oneDNN arranges it, or None where that cannot be done."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return packed
