"""Where a tensor of a checkpoint lies, and how its values are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

Method = Literal["fp8", "mxfp4", "gptq", "awq", "packed", "int8"]


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """How the weights of one folder are stored.

    `suffixes`: ends of the names of tensors that make one weight, the first one of values, by role. `bits`: of a value.
    `block`: rows and columns that share a scale, where the shapes do not say it. `v1`: GPTQ's first format, whose zero
    points are stored less one.
    """

    method: Method
    suffixes: Mapping[str, tuple[str, ...]]
    bits: int = 8
    block: tuple[int, int] | None = None
    v1: bool = False


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """The tensors that make one weight: name and place of each, by role."""

    format: QuantisedFormat
    parts: Mapping[str, tuple[str, TensorInfo]]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: the file that holds it, its type there (for example "BF16" or "Q4_0") and its shape.

    Of GGUF files also the byte at which its data begins, and `paired_rows`: rows of a head, where those that RoPE turns
    together lie beside one another instead of half a head apart; 0 = they do not.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    paired_rows: int = 0
    quantised: QuantisedTensor | None = None
    """Of folders, a weight whose values are stored quantised; `dtype` is that of the stored values."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)
