"""Copies from the host to a device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 128
"""Each of several tensors begins at a multiple of so many bytes: kernels are compiled for aligned addresses."""


def send_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to `device`, for operations given to the device from now on.

    To a GPU, the tensor goes from pinned memory: from other memory torch would wait for all earlier GPU work.
    """
    if torch.device(device).type not in ("cpu", "meta"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def send_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """As `send_to_device`, by one copy for all tensors. Each is dense."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    begins, end = list[int](), 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    packed = torch.empty(end, dtype=torch.uint8)

    def views(memory: Tensor) -> list[Tensor]:
        parts = (memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True))
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    for place, tensor in zip(views(packed), tensors, strict=True):
        place.copy_(tensor)
    return views(send_to_device(packed, device))
