"""Linear layers, and how their products are computed.

Where native kernels run, weights are arranged for them (`moonpool.engine.kernels.arranged_weights`). Elsewhere oneDNN's
arrangement is used if available. A weight in codes brings its own method (`LinearWeight`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.kernels import ops
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_weight
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.deterministic import elementwise, in_tiles
from moonpool.engine.kernels.memory import WeightArena

_ROWS_HINT = 512  # arrangements chosen for many rows turned out best for few rows too


class Linear:
    """x [rows, inputs] to x @ weight.T + bias [rows, outputs], in the weight's element type.

    `gated`: the outputs are gates, then as many ups, and the result is silu(gates) * ups, [rows, outputs / 2]. The
    weight is kept only in the form that its method holds, in memory from `arena` if native kernels take the weight.
    A weight in codes multiplies rows of `dtype`. If no product takes the codes, the weight becomes dense.
    """

    def __init__(
        self,
        weight: Tensor | LinearWeight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        arena: WeightArena | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        arena = arena or WeightArena()
        if isinstance(weight, Tensor):
            self._hold(_dense_method(weight, bias, gated=gated, arena=arena), weight.shape, bias, gated=gated)
            return
        assert dtype is not None
        exact = weight.for_products()
        if exact is None:
            method = _dense_method(weight.dequantise().to(dtype), bias, gated=gated, arena=arena)
        else:
            method = exact.method(bias, dtype, gated=gated, arena=arena)
        self._hold(method, weight.shape, bias, gated=gated)

    def _hold(self, method: LinearMethod, shape: torch.Size, bias: Tensor | None, *, gated: bool) -> None:
        self.method, self.shape, self.bias, self.gated = method, shape, bias, gated
        self.panels, self.dtype, self.device = method.panels, method.dtype, method.device
        self.nbytes = method.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(
        self, x: Tensor, *, deterministic: bool = False, wide: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return the product; `wide`: as float32, rounded to the weight's type first.

        `out`: an earlier result of the same call with as many rows, whose memory may be used.
        `deterministic`: the same row gives the same bits in every batch (`moonpool.engine.kernels.deterministic`).
        """
        if self.panels is not None:
            return self.panels.product(x, wide=wide, out=out)
        result = self.apart(x, deterministic=deterministic)
        if self.gated:
            result = gated(result, deterministic=deterministic)
        return result.float() if wide else result

    @classmethod
    def arranged(cls, panels: ArrangedWeight, bias: Tensor | None) -> Linear:
        """Return the linear layer of a weight that is arranged, with its bias."""
        made, parts = cls.__new__(cls), panels.structure
        shape = torch.Size((parts.outputs, parts.inputs))
        made._hold(NativeMethod(panels, panels.nbytes), shape, bias, gated=bool(parts.gated))
        return made

    def apart(self, x: Tensor, *, deterministic: bool) -> Tensor:
        """Return a gated product before the activation: gates, then ups [rows, outputs]."""
        if self.panels is not None:
            return self.panels.apart(x)
        return in_tiles(self.method.product, x) if deterministic else self.method.product(x)

    def plain(self) -> Tensor | None:
        """Return the weight [outputs, inputs] if it is held in plain form, with a bias beside."""
        return self.method.plain()

    def dense(self) -> Tensor:
        """Return the weight in plain form [outputs, inputs], codes dequantised."""
        return self.method.dense()


class LinearMethod(ABC):
    """A weight in the form that one way of computing products holds, and these products.

    Attributes:
        dtype: of rows and results.
        device: where products are computed.
        nbytes: memory of the weight without its bias.
        panels: the weight as native kernels hold it, which then compute whole layers; None: `product` computes.
    """

    panels: ArrangedWeight | None = None

    def __init__(self, dtype: torch.dtype, device: torch.device, nbytes: int) -> None:
        self.dtype, self.device, self.nbytes = dtype, device, nbytes

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias [rows, outputs]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the weight in plain form [outputs, inputs]."""

    def plain(self) -> Tensor | None:
        """Return the weight [outputs, inputs] if it is held in plain form."""
        return None


class LinearWeight(ABC):
    """A weight [outputs, inputs] in codes, from reading to its product (`docs/extend/quantised_weights.md`)."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""

    @abstractmethod
    def dequantise(self) -> Tensor:
        """Return the numbers that the codes stand for, float32 [outputs, inputs]."""

    @abstractmethod
    def select(self, rows: Tensor | slice) -> LinearWeight:
        """Return some rows, by int64 [n] or a slice."""

    def narrow(self, begin: int, end: int) -> LinearWeight | None:
        """Return inputs `begin` up to `end` of all rows, a rank's; None: no form holds these alone."""
        del begin, end
        return None

    @abstractmethod
    def join(self, others: Sequence[LinearWeight]) -> LinearWeight | None:
        """Return the rows of `others` below this weight's as one weight; None: no form holds all exactly."""

    @abstractmethod
    def to(self, device: torch.device) -> LinearWeight:
        """Return the weight on another device."""

    @abstractmethod
    def for_products(self) -> LinearWeight | None:
        """Return the same numbers in a form that products take; None: there is none, so that the weight is dense."""

    @abstractmethod
    def method(self, bias: Tensor | None, dtype: torch.dtype, *, gated: bool, arena: WeightArena) -> LinearMethod:
        """Return what computes products with rows of `dtype`.

        A method without panels tells `arena.record(None)`, so that a later use of the arena's file reads the weight.
        """


class NativeMethod(LinearMethod):
    """Native kernels' products with an arranged weight, dense or in codes."""

    panels: ArrangedWeight

    def __init__(self, panels: ArrangedWeight, nbytes: int) -> None:
        super().__init__(panels.dtype, panels.memory.device, nbytes)
        self.panels = panels

    def product(self, x: Tensor) -> Tensor:
        return self.panels.product(x)

    def dense(self) -> Tensor:
        return self.panels.rows(torch.arange(self.panels.structure.outputs))


class PlainMethod(LinearMethod):
    """torch's products with a dense weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.dtype, weight.device, weight.nbytes)
        self._weight, self._bias = weight, bias

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def dense(self) -> Tensor:
        return self._weight

    def plain(self) -> Tensor | None:
        return self._weight


class OneDnnMethod(LinearMethod):
    """oneDNN's products with a dense weight in oneDNN's arrangement."""

    def __init__(self, weight: Tensor, reordered: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.dtype, weight.device, weight.nbytes)
        self._reordered, self._bias = reordered, bias

    def product(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self._bias, "none", [], "")
        return result

    def dense(self) -> Tensor:
        return self._reordered.to_dense()


def _dense_method(weight: Tensor, bias: Tensor | None, *, gated: bool, arena: WeightArena) -> LinearMethod:
    panels = arrange_weight(weight, bias, gated=gated, arena=arena)
    if panels is not None:
        return NativeMethod(panels, weight.nbytes)
    reordered = _onednn_reorder(weight)
    return PlainMethod(weight, bias) if reordered is None else OneDnnMethod(weight, reordered, bias)


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


def gated(both: Tensor, *, deterministic: bool) -> Tensor:
    """Return silu(gates) * ups from gates, then ups [rows, outputs]."""
    # Native and Triton's kernels compute each row alone in any case.
    alone = choose("silu_mul", both.device, both.dtype) in ("native", "triton")
    if deterministic and not alone:
        gates, ups = both.chunk(2, dim=-1)
        return elementwise(functional.silu, gates, deterministic=True) * ups
    return ops.silu_mul(both)
