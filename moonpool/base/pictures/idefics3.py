"""Pictures of Idefics3 and SmolVLM: a picture is resized, cut into squares, and stands behind its squares once more.

Source: Idefics3ImageProcessor and Idefics3Processor of transformers, and the same of SmolVLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from moonpool.base.errors import UnsupportedModel
from moonpool.base.pictures.base import PictureFields, PictureRule, PictureTokenizer

LONGEST_SIDE = 4096
"""Pixels to which pictures are made smaller whatever the settings are."""
_AROUND, _MARK, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class Idefics3Rule(PictureRule):
    """The rule of a checkpoint; see `PictureRule`.

    Attributes:
        mark: id of `<image>`.
        settings: see `PictureRule`.
        rows: rows that the encoder makes of a square.
        side: pixels of a square's side.
        longest: pixels of the longest side after the first resizing; None = pictures are not resized.
        splits: whether pictures are cut.
    """

    mark: int
    settings: str
    rows: int
    side: int
    longest: int | None
    splits: bool
    _tokenizer: PictureTokenizer
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, found: PictureFields) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: settings contradict each other, or a token is missing; names the setting.
        """
        vision, given = found.vision, found.processor
        patches = vision.positive("image_size", 224) // vision.positive("patch_size", 32)
        rows = patches**2 // found.whole.positive("scale_factor", 2) ** 2
        if given.positive("image_seq_len", rows) != rows:
            raise UnsupportedModel("image_seq_len", f"{given.get('image_seq_len')}, but the encoder makes {rows} rows")
        (mark,) = found.special(_MARK)
        side = found.of(given, "max_image_size").positive("longest_edge", 364)
        resized = bool(given.get("do_resize", True))
        longest = found.size.positive("longest_edge", 4 * 364) if resized else None
        splits = bool(given.get("do_image_splitting", True))
        return cls(mark, found.settings, rows, side, longest, splits, found.tokenizer)

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """Rows and columns of squares; (0, 0) = the picture is not cut. With the detail "low" no picture is."""
        if not self.splits or detail == "low":
            return 0, 0
        if self.longest is not None:
            width, height = _rescaled(width, height, self.longest)
            width, height = _bounded(width, height)
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        if width <= side and height <= side:
            return 0, 0
        return (height - side) // side + 1, (width - side) // side + 1

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture: of each square, row by row, then of the whole."""
        if grid not in self._known:
            rows, columns = grid
            marks = _MARK * self.rows
            lines = [
                "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{marks}" for column in range(columns)) + "\n"
                for row in range(rows)
            ]
            before = "".join(lines) + "\n" if lines else ""
            self._known[grid] = self._tokenizer.encode(f"{before}{_AROUND}{_WHOLE}{marks}{_AROUND}", False)
        return self._known[grid]


def _rescaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Size with the longest side of so many pixels; the other side is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _bounded(width: int, height: int) -> tuple[int, int]:
    """Size with no side longer than `LONGEST_SIDE`."""
    ratio = width / height
    if width >= height and width > LONGEST_SIDE:
        width, height = LONGEST_SIDE, int(LONGEST_SIDE / ratio)
    elif height > width and height > LONGEST_SIDE:
        width, height = int(LONGEST_SIDE * ratio), LONGEST_SIDE
    return max(width, 1), max(height, 1)
