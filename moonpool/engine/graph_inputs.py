"""Inputs of captured work: one run of bytes, which one copy brings to the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.engine.kernels.to_device import ALIGNED

_PADDING = {"adapters": -1, "block_ids": -1, "slot_ids": -1, "context_lens": 1}
"""Values for rows without a sequence, 0 unless named: such rows read one pool slot and write none."""
_INT32 = ("query_start", "context_lens", "block_tables", "slot_tables")
"""The other inputs are int64."""
_Parts = Mapping[str, tuple[int, int, Sequence[int]]]
"""Begin, end and size of inputs."""
_WHOLE_TABLE = 128 << 10
"""Bytes of a table up to which all inputs are one copy: tables of long contexts are megabytes, of which a step uses
little.
"""


class GraphInputs:
    """Where the inputs of captured work lie in memory, tables behind all others.

    Args:
        sizes: of the inputs, by the names of `PackedBatch`; all tables have one size.
        least_bytes: that an input takes which is no table.
    """

    def __init__(self, sizes: Mapping[str, Sequence[int]], least_bytes: int = 0) -> None:
        self._parts: dict[str, tuple[int, int, Sequence[int]]] = {}
        self.nbytes = self._rows_bytes = 0
        for name, size in sorted(sizes.items(), key=lambda each: len(each[1])):
            length = math.prod(size) * (4 if name in _INT32 else 8)
            self._parts[name] = self.nbytes, self.nbytes + length, size
            self.nbytes += -(-max(length, least_bytes if len(size) == 1 else 0) // ALIGNED) * ALIGNED
            if len(size) == 1:
                self._rows_bytes = self.nbytes

    @property
    def names(self) -> Sequence[str]:
        """The inputs."""
        return tuple(self._parts)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the inputs in `memory`, uint8 [at least `nbytes`]."""
        return self._views(memory, self._parts)

    def send(self, values: Mapping[str, NDArray[Any]], memory: Tensor, table: tuple[int, int]) -> None:
        """Copy values to `memory` on a device, padded, without waiting for the device.

        Args:
            values: of some inputs, at most as long; tables may be wider.
            memory: as for `views`.
            table: rows and columns that captured work reads of each table, at least those in `values`. What is behind
                them may stay as it was.
        """
        rows = {name: part for name, part in self._parts.items() if len(part[2]) == 1}
        tables = {name: part for name, part in self._parts.items() if len(part[2]) > 1}
        if all(end - begin <= _WHOLE_TABLE for begin, end, _ in tables.values()):
            _copy(self._filled(self._parts, self.nbytes, values), memory[: self.nbytes])
            return
        _copy(self._filled(rows, self._rows_bytes, values), memory[: self._rows_bytes])
        for name, view in self._views(memory, tables).items():
            used = view[: table[0], : table[1]]
            _copy(self._filled({name: (0, 4 * used.numel(), used.shape)}, 4 * used.numel(), values), used)

    def _views(self, memory: Tensor, parts: _Parts) -> dict[str, Tensor]:
        return {
            name: memory[begin:end].view(torch.int32 if name in _INT32 else torch.int64).view(*size)
            for name, (begin, end, size) in parts.items()
        }

    def _filled(self, parts: _Parts, nbytes: int, values: Mapping[str, NDArray[Any]]) -> Tensor:
        """Return some inputs on the host, with padding."""
        packed = torch.empty(nbytes, dtype=torch.uint8)
        for name, view in self._views(packed, parts).items():
            array = view.numpy()
            array.fill(_PADDING.get(name, 0))
            if name in values:
                given = values[name][..., : array.shape[-1]]
                array[tuple(map(slice, given.shape))] = given
        return packed


def _copy(packed: Tensor, target: Tensor) -> None:
    """Copy bytes of the host to a device, without waiting for the device."""
    pinned = packed.pin_memory() if target.device.type == "cuda" else packed
    target.copy_(pinned.view(target.dtype).view(target.shape), non_blocking=True)
