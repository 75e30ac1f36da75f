"""Where a checkpoint's tensor lies, and how the values are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

Quantization = Literal["auto", "file", "int8", "int4", "none"]
"""Weights as an engine holds them: as the checkpoint has them, packed in 8 or 4 bits, or dense."""
_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
Method = Literal["scaled", "packed", "gptq", "awq", "fp4", "mxfp4", "bnb_int8", "bnb_4bit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFormat:
    """How some or all of a folder's weights are stored; `moonpool.models.dequantise` knows the methods.

    Attributes:
        method: how the dense weight is computed.
        values: name endings for the tensor with the values.
        dtypes: types of that tensor; a `.weight` of another type is not quantised.
        parts: name endings for further tensors, by role.
        optional: roles of tensors that may be absent.
        bits: bits per value; 0: told by the shapes.
        group: inputs that share a scale; 0: all.
        block: outputs and inputs that share a scale, if the shapes do not tell.
        v1: GPTQ's first format, which stores zero points less one.
        divided: the tensor's scale divides the other scales, instead of multiplying them.
        targets: compressed-tensors' patterns of the modules that are stored so; none: all.
    """

    method: Method
    values: tuple[str, ...]
    dtypes: frozenset[str]
    parts: Mapping[str, tuple[str, ...]]
    optional: frozenset[str] = frozenset()
    bits: int = 8
    group: int = 0
    block: tuple[int, int] | None = None
    v1: bool = False
    divided: bool = False
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """The tensors that make one weight: each tensor's name and place, by role; the tensor with values is "values"."""

    format: QuantisedFormat
    parts: Mapping[str, tuple[str, TensorInfo]]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: file, type there (for example "BF16" or "Q4_0"), shape, first byte.

    GGUF files also have `paired_rows`: rows in a head, if rows that RoPE turns together lie beside one another instead
    of half a head apart; 0 = they do not.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    paired_rows: int = 0
    quantised: QuantisedTensor | None = None
    """In folders, a weight with quantised values; `dtype` is that of the stored values."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint holds codes instead of numbers."""
        return self.quantised is not None or self.dtype not in _NUMBERS

    @property
    def stored_type(self) -> str:
        """How the tensor is stored, for people."""
        return self.dtype if self.quantised is None else f"{self.quantised.format.method} ({self.dtype})"
