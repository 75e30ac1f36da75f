"""Pictures of Mistral Small 3.x and Ministral 3: a picture keeps its shape; each row of its cells ends with a token.

Source: PixtralImageProcessor and PixtralProcessor of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.base.pictures.base import PictureFields, PictureRule

LOW_SIDE = 512
"""Pixels of the longest side with the detail "low"."""


@dataclass(frozen=True, slots=True)
class PixtralRule(PictureRule):
    """The rule of a checkpoint; see `PictureRule`.

    Attributes:
        mark: id of `[IMG]`.
        settings: see `PictureRule`.
        cell: pixels of the side of a cell, of which the encoder makes a row.
        longest: pixels of the longest side of a larger picture, once resized.
        row_end: token behind each row of cells but the last.
        end: token behind the last.
    """

    mark: int
    settings: str
    cell: int
    longest: int
    row_end: int
    end: int

    @classmethod
    def read(cls, found: PictureFields) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: settings contradict each other, or a token is missing; names the setting.
        """
        cell = found.vision.positive("patch_size", 16) * found.whole.positive("spatial_merge_size", 2)
        mark, row_end, end = found.special("[IMG]", "[IMG_BREAK]", "[IMG_END]")
        return cls(mark, found.settings, cell, found.size.positive("longest_edge", 1024), row_end, end)

    def longest_side(self, detail: str) -> int:
        """Pixels of the longest side of a larger picture, once resized."""
        return min(self.longest, LOW_SIDE) if detail == "low" else self.longest

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """Rows and columns of cells.

        Raises:
            ValueError: the picture is too long or too high.
        """
        longest = self.longest_side(detail)
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            if not min(math.floor(width / ratio), math.floor(height / ratio)):
                raise ValueError(f"{width} x {height} pixels is too thin: one side would have none at {longest} pixels")
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return (height - 1) // self.cell + 1, (width - 1) // self.cell + 1

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture, row by row."""
        rows, columns = grid
        return [*([*[self.mark] * columns, self.row_end] * rows)[:-1], self.end]
