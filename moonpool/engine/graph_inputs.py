"""Inputs of captured work: one run of bytes, which one copy brings to the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.engine.kernels.to_device import ALIGNED

_PADDING = {"block_ids": -1, "slot_ids": -1, "context_lens": 1}
"""Values for rows without a sequence, 0 unless named: such rows read one pool slot and write none."""
_INT32 = ("query_start", "context_lens", "block_tables", "slot_tables")
"""The other inputs are int64."""


class GraphInputs:
    """Where the inputs of captured work lie in memory.

    Args:
        sizes: of the inputs, by the names of `PackedBatch`.
        least_bytes: that an input takes which is no table.
    """

    def __init__(self, sizes: Mapping[str, Sequence[int]], least_bytes: int = 0) -> None:
        self._parts: dict[str, tuple[int, int, Sequence[int]]] = {}
        self.nbytes = 0
        for name, size in sizes.items():
            length = math.prod(size) * (4 if name in _INT32 else 8)
            self._parts[name] = self.nbytes, self.nbytes + length, size
            self.nbytes += -(-max(length, least_bytes if len(size) == 1 else 0) // ALIGNED) * ALIGNED

    @property
    def names(self) -> Sequence[str]:
        """The inputs."""
        return tuple(self._parts)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the inputs in `memory`, uint8 [at least `nbytes`]."""
        return {
            name: memory[begin:end].view(torch.int32 if name in _INT32 else torch.int64).view(*size)
            for name, (begin, end, size) in self._parts.items()
        }

    def send(self, values: Mapping[str, NDArray[Any]], memory: Tensor) -> None:
        """Copy values to `memory` on a device, padded, without waiting for the device.

        Args:
            values: of some inputs, at most as long; tables may be wider.
            memory: as for `views`.
        """
        packed = torch.empty(self.nbytes, dtype=torch.uint8)
        for name, view in self.views(packed).items():
            array = view.numpy()
            array.fill(_PADDING.get(name, 0))
            if name in values:
                given = values[name][..., : array.shape[-1]]
                array[tuple(map(slice, given.shape))] = given
        pinned = packed.pin_memory() if memory.device.type == "cuda" else packed
        memory[: self.nbytes].copy_(pinned, non_blocking=True)
