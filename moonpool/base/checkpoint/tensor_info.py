"""Where a checkpoint's tensor lies, and how the values are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

_STORED_BYTES: Mapping[str, int] = {
    "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8,
}  # fmt: skip
"""Of an element; 2 if the type is not listed."""


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
    format: WeightFormat | None = None
    """How codes stand for the numbers; None: the tensor is stored as numbers."""
    parts: Mapping[str, tuple[str, TensorInfo]] = field(default_factory=dict)
    """In folders, the tensors that make a weight in codes, by role: name and place; `dtype` is that of the codes."""
    name: str = ""
    """The tensor's name in the file, if the file has another name than the model's text part alone would."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def keeps_codes(self) -> bool:
        """Whether an engine can hold this weight's codes with the same numbers, as far as headers tell."""
        return self.format is not None and self.format.keeps_codes(self)

    @property
    def stored_type(self) -> str:
        """How the tensor is stored, for people."""
        return self.dtype if self.format is None else self.format.described(self)

    @property
    def stored_bytes(self) -> float:
        """Bytes of the values with their scales, as an engine holds them if it keeps codes."""
        return self.elements * _STORED_BYTES.get(self.dtype, 2) if self.format is None else self.format.held_bytes(self)


class WeightFormat(ABC):
    """How a checkpoint stores a weight in codes, as far as headers tell.

    `moonpool.engine.weights` has the other half, which reads the numbers. Formats are values.
    """

    @abstractmethod
    def keeps_codes(self, info: TensorInfo) -> bool:
        """Tell whether an engine can hold the codes with the same numbers."""

    @abstractmethod
    def held_bytes(self, info: TensorInfo) -> float:
        """Return the memory of a weight that is held in its codes."""

    @abstractmethod
    def described(self, info: TensorInfo) -> str:
        """Return how the tensor is stored, for people."""
