"""Pictures of InternVL: squares in the arrangement nearest to the picture's shape, then the whole in one square.

Source: GotOcr2ImageProcessor and InternVLProcessor of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.fields import JsonFields

if TYPE_CHECKING:
    from moonpool.base.pictures.base import PictureTokenizer

_MARK, _BEGIN, _END = "<IMG_CONTEXT>", "<img>", "</img>"


@dataclass(frozen=True, slots=True)
class InternVLRule:
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
        components: see `PictureRule`.
    """

    mark: int
    settings: str
    rows: int
    height: int
    width: int
    squares: tuple[int, int]
    begin: int
    end: int
    components: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: PictureTokenizer, source: str
    ) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: a token is missing; names the setting.
        """
        given = JsonFields(processor, source)
        size = JsonFields(given.get("size") or {}, source)
        mark, begin, end = (tokenizer.special_id(text) for text in (_MARK, _BEGIN, _END))
        if mark is None or begin is None or end is None or mark != config.get("image_token_id", mark):
            raise UnsupportedModel("image_token_id", f"{_MARK}, {_BEGIN} or {_END} is no special token of this number")
        rows = JsonFields(config, source).positive("image_seq_length", 256)
        squares = given.positive("min_patches", 1), given.positive("max_patches", 12)
        settings = json.dumps(dict(processor), sort_keys=True)
        sides = size.positive("height", 448), size.positive("width", 448)
        return cls(mark, settings, rows, *sides, squares, begin, end)

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """Rows and columns of squares. With the detail "low" no picture is cut."""
        fewest, most = self.squares
        if detail == "low" or most == 1:
            return 1, 1
        found, least, ratio = (1, 1), float("inf"), width / height
        arrangements = [
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if fewest <= columns * rows <= most
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
