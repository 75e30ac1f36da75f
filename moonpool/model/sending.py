"""What the host sends to the device of a step, without waiting until it is there."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`, for what is given to the device from now on.

    To a GPU it goes from pinned memory: from other memory torch would wait for all work that the GPU was given before.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
