"""An int8 copy of the output head, which finds a row's highest logit without reading the whole head.

Bytes and their errors bound each logit; only those that may be the highest are computed in full
(`native/int8_panels.cpp`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.kernels.arranged_weights import ArrangedWeight
from moonpool.engine.kernels.choice import DTYPES
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.native import library, structures
from moonpool.engine.kernels.native.library import Library

#: Rows that are looked at together at most (int8_panels.h): with more, a step waits for sums rather than for memory.
MAX_ROWS = 3
_OUTPUTS = 32  # of a panel


class Int8Head:
    """The int8 copy of a head's panels; `make_int8_head` makes the copy.

    Attributes:
        nbytes: memory taken.
        structure: the form for native code.
    """

    def __init__(self, native: Library, panels: ArrangedWeight, memory: Tensor, bounds: Tensor) -> None:
        self._native, self._panels = native, panels
        self._memory, self._bounds = memory, bounds  # kept alive
        self.nbytes = memory.nbytes + bounds.nbytes
        self.structure = structures.Int8Panels(memory.data_ptr(), *(part.data_ptr() for part in bounds))

    def highest(self, x: Tensor) -> list[int] | None:
        """Return the highest output for each row in x [M, inputs], in the head's type; among equals the first.

        None if too many outputs come close, or an output may not be finite.

        Raises:
            ValueError: x has another shape or type, or more rows than `MAX_ROWS`.
        """
        parts = self._panels.structure
        if x.dim() != 2 or x.shape[1] != parts.inputs or x.dtype != self._panels.dtype or not 1 <= len(x) <= MAX_ROWS:
            raise ValueError(
                f"x: must be [1 to {MAX_ROWS}, {parts.inputs}] in {self._panels.dtype}, not {list(x.shape)}"
            )
        tokens = torch.empty(len(x), dtype=torch.int32)
        found = self._native.highest(parts, self.structure, x.contiguous(), tokens)
        return tokens.tolist() if found else None


def int8_head_bytes(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Return the bytes for the int8 copy of a head with these outputs and inputs; 0 where there is none."""
    native = library.get()
    if native is None or dtype not in DTYPES:
        return 0
    nbytes = native.int8_panels_bytes(structures.Panels(None, None, outputs, inputs, library.TYPES[dtype], 0))
    return nbytes + _error_bounds(outputs) * 4 if nbytes else 0


def _error_bounds(outputs: int) -> int:
    """Return the numbers that bound outputs' errors: three of each, in whole panels."""
    return 3 * -(-outputs // _OUTPUTS) * _OUTPUTS


def make_int8_head(panels: ArrangedWeight, arena: WeightArena) -> Int8Head | None:
    """Return `panels` as bytes in memory from `arena`; None where that is not done, or a weight is not finite.

    In a whole file, the bytes are those that the file's writer made of the same panels.
    """
    native = library.get()
    nbytes = native.int8_panels_bytes(panels.structure) if native is not None else 0
    if native is None or not nbytes:
        return None
    memory = arena.take(nbytes)
    bounds = arena.take(_error_bounds(panels.structure.outputs) * 4).view(torch.float32).view(3, -1)
    made = Int8Head(native, panels, memory, bounds)
    if arena.whole:
        return made if arena.recorded() else None
    finite = native.make_int8(panels.structure, made.structure)
    arena.record(finite)
    return made if finite else None
