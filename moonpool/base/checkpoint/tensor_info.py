"""Where a checkpoint's tensor lies, and how the values are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

Quantization = Literal["auto", "file", "int8", "int4", "none"]
"""Weights as an engine holds them: as the checkpoint has them ("auto": on a CPU; "file": anywhere), packed in 8 or 4
bits, or dense."""
_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
Method = Literal["scaled", "packed", "gptq", "awq", "fp4", "mxfp4", "bnb_int8", "bnb_4bit"]
_STORED_BITS: Mapping[str, float] = {
    "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I64": 64,
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5,
    "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "NVFP4": 4.5,
}  # fmt: skip
_EXACT_TYPES = frozenset({
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
})  # fmt: skip
"""Types of GGUF files whose codes and scales a packed weight has (`moonpool.engine.models.packed_files`)."""
_EXACT_METHODS = frozenset({"packed", "gptq", "awq", "fp4", "bnb_int8", "bnb_4bit"})
_EXACT_BYTES = frozenset({"I8", "F8_E4M3", "F8_E5M2"})
_INPUTS = 32
"""Products with packed weights take a multiple of so many inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFormat:
    """How some or all of a folder's weights are stored; `moonpool.engine.models.dequantise` knows the methods.

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
    def keeps_codes(self) -> bool:
        """Whether a packed weight holds this weight's codes with the same numbers, as far as headers tell."""
        method = "" if self.quantised is None else self.quantised.format.method
        if method == "mxfp4":  # all experts, with blocks of so many inputs
            return True
        if len(self.shape) != 2 or self.shape[1] % _INPUTS:
            return False
        if self.quantised is None:
            return self.dtype in _EXACT_TYPES
        return method in _EXACT_METHODS or (method == "scaled" and self.dtype in _EXACT_BYTES)

    @property
    def stored_type(self) -> str:
        """How the tensor is stored, for people."""
        return self.dtype if self.quantised is None else f"{self.quantised.format.method} ({self.dtype})"

    @property
    def stored_bytes(self) -> float:
        """Bytes of the values as stored, with their scales: exact for GGUF, of folders without the scales."""
        if self.quantised is not None:
            return sum(its.stored_bytes for _, its in self.quantised.parts.values())
        return self.elements * _STORED_BITS.get(self.dtype, 16) / 8
