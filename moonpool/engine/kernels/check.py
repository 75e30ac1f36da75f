"""Argument checks that the operations share; each error begins with the argument's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    dense_from: int = 0,
    writable: bool = False,
) -> None:
    """Raise ValueError beginning with `name` unless `tensor` has this shape, type and device.

    Dimensions from `dense_from` on must be contiguous; those before may have any stride that does not overlap.
    """
    if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name}: must be {list(shape)} in {dtype}, not {list(tensor.shape)} in {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}, must be on {device}")
    if not dense(tensor, dense_from):
        raise ValueError(f"{name}: must be contiguous from dimension {dense_from} on, has strides {tensor.stride()}")
    if writable and tensor.dim() and any(stride == 0 for stride in tensor.stride()):
        raise ValueError(f"{name}: is written to, must not be expanded")


def dense(tensor: Tensor, begin: int) -> bool:
    """Return whether the dimensions from `begin` on lie one after the other, and those before do not overlap them."""
    if tensor.is_contiguous():
        return True
    size = 1
    for dim in range(tensor.dim() - 1, -1, -1):
        length, stride = tensor.shape[dim], tensor.stride(dim)
        if length > 1 and (stride != size if dim >= begin else stride < size):
            return False
        size = size * length if dim >= begin else max(size, stride * length)
    return True
