"""What a weight format computes: numbers and codes from a checkpoint's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from moonpool.engine.weights.linear import LinearWeight

Parts = Mapping[str, Tensor]
"""A weight's tensors by role; "values" are the codes."""


class WeightReader(ABC):
    """Reads weights of one `moonpool.base.checkpoint.tensor_info.WeightFormat`, which the constructor takes.

    Both methods raise RuntimeError, IndexError, KeyError or ValueError if shapes or values do not belong together.
    """

    @abstractmethod
    def dense(self, parts: Parts) -> Tensor:
        """Return the numbers that the tensors stand for, float32, in the format's dense shape."""

    @abstractmethod
    def packed(self, parts: Parts) -> LinearWeight | None:
        """Return the weight in the tensors' codes; None: no codes that products take hold the weight."""
