"""Products of a mixture of experts where rows stand by expert: each expert's rows by its own matrix, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class ExpertMatrices:
    """One projection of all experts of a layer.

    Attributes:
        matrices: each expert's [outputs, inputs], dense, alike, on one device.
        bias: [experts, outputs], or None.
        addresses: [experts] int64, on their device: where the matrices lie.
    """

    matrices: Sequence[Tensor]
    bias: Tensor | None = None
    addresses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError unless matrices are dense and alike."""
        first = self.matrices[0]
        for matrix in self.matrices:
            if (matrix.shape, matrix.dtype, matrix.device) != (
                first.shape,
                first.dtype,
                first.device,
            ) or not matrix.is_contiguous():
                raise ValueError(f"matrices: must be dense and all as {list(first.shape)} in {first.dtype}")
        places = [matrix.data_ptr() for matrix in self.matrices]
        self.addresses = torch.tensor(places, dtype=torch.int64).to(first.device)


@dataclass(frozen=True, slots=True)
class RowsByExpert:
    """Chosen experts' rows, one expert's behind the other's. Made on the device, which nothing waits for.

    Attributes:
        tokens: [N] int64: the token of each row.
        starts: [experts + 1] int64: expert e has the rows starts[e] up to starts[e + 1].
        places: [T, chosen] int64, rising: each token's rows.
        weights: [T, chosen] float32: their weights.
    """

    tokens: Tensor
    starts: Tensor
    places: Tensor
    weights: Tensor


def rows_by_expert(chosen: Tensor, weights: Tensor, experts: int) -> RowsByExpert:
    """Return the rows of chosen experts [T, chosen] (int64), with weights alike, in the order of experts."""
    chosen, by = chosen.sort(dim=-1)
    weights = weights.gather(1, by)
    ordered, order = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=ordered.device))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    tokens = torch.div(order, chosen.shape[1], rounding_mode="floor")
    return RowsByExpert(tokens, starts, places.view(chosen.shape), weights)
