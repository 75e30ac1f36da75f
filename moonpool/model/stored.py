"""Copies tensors from a checkpoint's files into memory that is there already, converted on the way.

Files are mapped. Quantised rows are dequantised piece by piece by the `gguf` package, so that no whole tensor exists in
float32 beside the one that is kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from moonpool.checkpoint.gguf_file import TENSOR_TYPES, is_gguf
from moonpool.checkpoint.weights import TensorInfo
from moonpool.errors import CheckpointError

_PIECE_ELEMENTS = 1 << 16  # they stay in the cache: twice as quick as sixteen times as many
_GGUF_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}


class StoredTensors(Protocol):
    """The tensors of one checkpoint."""

    dtypes: frozenset[str]
    """Types that can be copied."""

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """Copy a tensor into `out`, which has its shape and may have another type.

        Raises:
            CheckpointError: it cannot be read.
        """
        ...


def stored_tensors(path: Path, stack: ExitStack) -> StoredTensors:
    """Return what copies the tensors of the checkpoint `path`, until `stack` closes."""
    return GgufTensors() if is_gguf(path) else SafetensorsFiles(stack)


class SafetensorsFiles:
    """Tensors in safetensors files, which stay open until the exit stack closes."""

    dtypes = frozenset({"F32", "BF16", "F16"})

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._files: dict[Path, Any] = {}

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """See `StoredTensors.copy`."""
        try:
            if info.file not in self._files:
                self._files[info.file] = self._stack.enter_context(safe_open(info.file, framework="pt"))
            tensor: Tensor = self._files[info.file].get_tensor(name)
        except Exception as error:  # safetensors raises bare errors of its own
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        out.copy_(tensor)


class GgufTensors:
    """Tensors in one GGUF file."""

    dtypes = frozenset(_GGUF_TYPES)

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """See `StoredTensors.copy`."""
        kind = _GGUF_TYPES[info.dtype]
        width = info.shape[-1] if len(info.shape) > 1 else 1 if kind.elements == 1 else info.shape[0]
        rows = info.elements // width
        shape = (rows, width // kind.elements * kind.bytes)
        try:
            # Copied on write: torch wants memory that may be written to. A plain array is cut up faster.
            stored = np.asarray(np.memmap(info.file, np.uint8, mode="c", offset=info.begin, shape=shape))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        target = out.view(rows, width)
        step = _piece_rows(width, info.paired_rows)
        for begin in range(0, rows, step):
            piece = gguf.dequantize(stored[begin : begin + step], gguf.GGMLQuantizationType[kind.name])
            _copy_rows(torch.from_numpy(piece), target[begin : begin + step], info.paired_rows)


def _piece_rows(width: int, paired_rows: int) -> int:
    """Return the rows to convert at once: whole heads, where their rows change places."""
    unit = paired_rows or 1
    return max(unit, _PIECE_ELEMENTS // width // unit * unit)


def _copy_rows(rows: Tensor, out: Tensor, paired_rows: int) -> None:
    """Copy rows; of each head of `paired_rows`, rows 0, 2, 4, ... become its first half and 1, 3, 5, ... its second."""
    if not paired_rows:
        out.copy_(rows)
        return
    width = rows.shape[1]
    out.view(-1, 2, paired_rows // 2, width).copy_(rows.view(-1, paired_rows // 2, 2, width).transpose(1, 2))
