"""Pictures of InternVL: squares in the arrangement nearest to the picture's shape, then the whole in one square.

Source: GotOcr2ImageProcessor and InternVLProcessor of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.base.errors import UnsupportedModel
from moonpool.base.pictures.base import PictureFields, PictureRule

MAX_ROWS = 1 << 16
"""Tokens of a picture that a checkpoint may ask for."""


@dataclass(frozen=True, slots=True)
class InternVLRule(PictureRule):
    """The rule of a checkpoint; see `PictureRule`.

    Attributes:
        mark: id of `<IMG_CONTEXT>`.
        settings: see `PictureRule`.
        rows: rows that the encoder makes of a square.
        height: pixels of a square.
        width: pixels of a square.
        squares: fewest and most squares of a picture, without the whole.
        begin: token before a picture.
        end: token behind it.
    """

    mark: int
    settings: str
    rows: int
    height: int
    width: int
    squares: tuple[int, int]
    begin: int
    end: int

    @classmethod
    def read(cls, found: PictureFields) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: a token is missing, or pictures are too large; names the setting.
        """
        mark, begin, end = found.special("<IMG_CONTEXT>", "<img>", "</img>")
        rows = found.whole.positive("image_seq_length", 256)
        squares = found.processor.positive("min_patches", 1), found.processor.positive("max_patches", 12)
        if rows * (squares[1] + 1) > MAX_ROWS:
            why = f"{squares[1]} squares of {rows} tokens and the whole are more than {MAX_ROWS} tokens"
            raise UnsupportedModel("max_patches", why)
        sides = found.size.positive("height", 448), found.size.positive("width", 448)
        return cls(mark, found.settings, rows, *sides, squares, begin, end)

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """Rows and columns of squares. With the detail "low" no picture is cut."""
        fewest, most = self.squares
        if detail == "low" or most == 1:
            return 1, 1
        found, least, ratio = (1, 1), float("inf"), width / height
        arrangements = [
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most // columns + 1)
            if fewest <= columns * rows
        ]
        for columns, rows in sorted(arrangements, key=lambda each: each[0] * each[1]):
            difference = abs(ratio - columns / rows)
            # Of arrangements equally near, more squares only for larger pictures.
            large = width * height > 0.5 * self.height * self.width * columns * rows
            if difference < least or (difference == least and large):
                found, least = (rows, columns), difference
        return found

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture: as many for each square, and once more for the whole where it is cut."""
        rows, columns = grid
        squares = rows * columns
        return [self.begin, *[self.mark] * (self.rows * (squares + (squares > 1))), self.end]
