"""Matrix products with weights that never change.

On CPUs oneDNN rearranges a plain weight in each call. Doing that once at load made products of one row 2.5 times faster
in bfloat16 and 1.7 times in float32, of 32 rows 1.3 and 1.5 times, of 512 rows 1.1 and 1.3 times (hidden 512, one
AVX512-bf16 core). The operators are those of torch's own compiler; where they are missing or refuse, the weight stays
plain. Few rows in float16, for which oneDNN has no fast kernel, go to `kernels.ops.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import ops

# Arrangements chosen for many rows turned out best for few rows too.
_ROWS_HINT = 512
#: Rows of every product in deterministic mode: in one shape, a row's bits depend neither on its place nor on the others
#: (held by a test; in other shapes oneDNN may divide the sums in another way).
FIXED_ROWS = 32


class Linear:
    """x [..., inputs] to x @ weight.T + bias [..., outputs], in the weight's element type."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.shape = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._bias = bias
        packed = _pack(weight) if pack else None
        self.packed = packed is not None
        self._weight = weight if packed is None else packed

    def __call__(self, x: Tensor, *, deterministic: bool = False) -> Tensor:
        """Return the product. `deterministic`: the same row gives the same bits in every batch, see FIXED_ROWS."""
        if not deterministic:
            return self._product(x)
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
        if not self.packed:
            if x.dim() == 2 and ops.few_rows_are_ours(x):
                return ops.linear(x, self._weight, self._bias)
            return functional.linear(x, self._weight, self._bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result

    def dense(self) -> Tensor:
        """Return the weight in plain form [outputs, inputs]."""
        return self._weight.to_dense() if self.packed else self._weight


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor | None:
    """Return `weight` rearranged, or None where that cannot be done."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return packed
