"""The files of a checkpoint: tensors as numbers, or in their codes.

Only safetensors and GGUF files are read: no data is unpickled or executed. A tensor is mapped while it is read, and not
longer, so that what was read does not count as memory; quantised rows are dequantised piece by piece, so that no second
whole tensor exists in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.base.checkpoint.gguf import is_gguf
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import GGUF_TYPES, GgufType
from moonpool.base.errors import CheckpointError
from moonpool.engine.weights.linear import LinearWeight
from moonpool.engine.weights.registry import weight_reader

_UNPACKED_ELEMENTS = 1 << 20  # of packed weights, an element of a code
_PIECE_ELEMENTS = 1 << 16  # they stay in the cache: twice as quick as sixteen times as many
_SAFETENSORS_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_GGUF_TYPES = {kind.name: kind for kind in GGUF_TYPES.values()}


class StoredTensors(Protocol):
    """One checkpoint's tensors."""

    dtypes: frozenset[str]
    """Types that can be copied."""

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """Copy a tensor into `out`, which has the same shape and may have another type.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...

    def each(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        """Yield parts [1, ...] of a tensor along its first dimension, which are not to be kept.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...

    def packed(self, name: str, info: TensorInfo) -> LinearWeight | None:
        """Return a tensor in the codes of the checkpoint; None: no codes that products take hold the tensor.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...


def stored_tensors(path: Path) -> StoredTensors:
    """Return what copies the tensors of the checkpoint `path`."""
    return GgufTensors() if is_gguf(path) else SafetensorsFiles()


class SafetensorsFiles:
    """Tensors in safetensors files."""

    dtypes = frozenset({"F32", "BF16", "F16"})

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        if info.format is None:
            out.copy_(self._read(name, info))
            return
        with _named(name, info):
            out.copy_(weight_reader(info.format).dense(self._parts(info)))

    def packed(self, name: str, info: TensorInfo) -> LinearWeight | None:
        if info.format is None:
            return None
        with _named(name, info):
            return weight_reader(info.format).packed(self._parts(info))

    def each(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        if info.format is not None:
            with _named(name, info):
                reader, parts = weight_reader(info.format), self._parts(info)
                if parts["scales"].numel() > 1:
                    yield from torch.split(reader.dense(parts), 1)
                else:  # an expert at a time: no second whole tensor in float32
                    yield from (reader.dense({**parts, "values": each}) for each in torch.split(parts["values"], 1))
            return
        shape = (1, *info.shape[1:])
        size = prod(shape) * _SAFETENSORS_TYPES[info.dtype].itemsize
        for index in range(info.shape[0]):
            yield self._read(name, replace(info, shape=shape, begin=info.begin + index * size))

    def _parts(self, info: TensorInfo) -> dict[str, Tensor]:
        return {role: self._read(name, where) for role, (name, where) in info.parts.items()}

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        kind = _SAFETENSORS_TYPES.get(info.dtype)
        if kind is None:
            raise CheckpointError(f"{info.file}: tensor {name} is stored as {info.dtype}, which torch does not have")
        stored = _mapped(name, info, (info.elements * kind.itemsize,))
        return torch.from_numpy(stored).view(kind).view(info.shape)


@contextmanager
def _named(name: str, info: TensorInfo) -> Iterator[None]:
    """Turn what stored numbers that do not belong together raise into an error that names the tensor."""
    try:
        yield
    except (RuntimeError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"{info.file}: tensor {name} cannot be dequantised: {error}") from None


class GgufTensors:
    """Tensors in one GGUF file."""

    dtypes = frozenset(_GGUF_TYPES)

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        kind, stored, width = self._stored(name, info)
        reader = weight_reader(kind)
        target = out.view(len(stored), width)
        step = _piece_rows(width, info.paired_rows)
        for begin in range(0, len(stored), step):
            piece = reader.dense({"values": torch.from_numpy(stored[begin : begin + step])})
            _copy_rows(piece, target[begin : begin + step], info.paired_rows)

    def packed(self, name: str, info: TensorInfo) -> LinearWeight | None:
        """See `StoredTensors.packed`. Rows are unpacked some at a time, as the steps in between take several bytes."""
        kind, stored, width = self._stored(name, info)
        reader, step = weight_reader(kind), max(1, _UNPACKED_ELEMENTS // width)
        packed = joined([reader.packed({"values": rows}) for rows in torch.split(torch.from_numpy(stored), step)])
        if packed is None or not info.paired_rows:
            return packed
        rows, order = torch.arange(packed.shape[0])[:, None], torch.empty(packed.shape[0], 1, dtype=torch.int64)
        _copy_rows(rows, order, info.paired_rows)
        return packed.select(order[:, 0])

    def each(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        whole = torch.empty(info.shape)
        self.copy(name, info, whole)
        yield from torch.split(whole, 1)

    def _stored(self, name: str, info: TensorInfo) -> tuple[GgufType, NDArray[np.uint8], int]:
        """Return a tensor's type, bytes [rows, bytes per row] and elements per row."""
        kind = _GGUF_TYPES[info.dtype]
        width = info.shape[-1] if len(info.shape) > 1 else 1 if kind.elements == 1 else info.shape[0]
        rows = info.elements // width
        return kind, _mapped(name, info, (rows, width // kind.elements * kind.bytes)), width


def _mapped(name: str, info: TensorInfo, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, mapped as long as something refers to them.

    Raises:
        CheckpointError: the file cannot be read, or has no such bytes.
    """
    if not prod(shape):
        return np.empty(shape, np.uint8)
    try:
        # Copied on write: torch wants memory that may be written to. A plain array is cut up faster.
        return np.asarray(np.memmap(info.file, np.uint8, mode="c", offset=info.begin, shape=shape))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None


def _piece_rows(width: int, paired_rows: int) -> int:
    """Return the rows to convert at once: whole heads, where their rows change places."""
    unit = paired_rows or 1
    return max(unit, _PIECE_ELEMENTS // width // unit * unit)


def _copy_rows(rows: Tensor, out: Tensor, paired_rows: int) -> None:
    """Copy rows; in each head of `paired_rows`, rows 0, 2, 4, ... become the first half, the others the second."""
    if not paired_rows:
        out.copy_(rows)
        return
    width = rows.shape[1]
    out.view(-1, 2, paired_rows // 2, width).copy_(rows.view(-1, paired_rows // 2, 2, width).transpose(1, 2))


def joined(weights: Sequence[LinearWeight | None]) -> LinearWeight | None:
    """Return weights as one weight, the rows one below the other; None: a weight is None, or no form holds all."""
    found = [weight for weight in weights if weight is not None]
    return found[0].join(found[1:]) if len(found) == len(weights) else None
