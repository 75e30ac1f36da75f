"""Pictures of Qwen2-VL to Qwen3.5: a picture keeps its shape, and its tokens have rows and columns as positions.

Source: Qwen2VLImageProcessor, Qwen2VLProcessor and the positions of Qwen2_5_VLModel in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from moonpool.base.errors import UnsupportedModel
from moonpool.base.pictures.base import PictureFields, PictureRule

LOW_PIXELS = 512 * 512
"""Most pixels with the detail "low"."""
MAX_RATIO = 200
_STACKED = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True, slots=True)
class Qwen2VLRule(PictureRule):
    """The rule of a checkpoint; see `PictureRule`.

    Attributes:
        mark: id of `<|image_pad|>`.
        settings: see `PictureRule`.
        cell: pixels of the side of a cell, of which the encoder makes a row.
        fewest: pixels of a smaller picture, once resized, at least.
        most: pixels of a larger picture, once resized, at most.
        components: see `PictureRule`.
        added_layers: see `PictureRule`.
    """

    mark: int
    settings: str
    cell: int
    fewest: int
    most: int
    components: tuple[int, ...]
    added_layers: int = 0

    @classmethod
    def read(cls, found: PictureFields) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: the sections of RoPE or the mark are missing; names the setting.
        """
        given, size = found.processor, found.size
        patch = 16 if found.kind.startswith("qwen3") else 14
        cell = given.positive("patch_size", patch) * given.positive("merge_size", 2)
        if cell != found.vision.positive("patch_size", patch) * found.vision.positive("spatial_merge_size", 2):
            raise UnsupportedModel("patch_size", "the processor and the encoder have different cells")
        (mark,) = found.special("<|image_pad|>")
        fewest = given.positive("min_pixels", size.positive("shortest_edge", 56 * 56))
        most = given.positive("max_pixels", size.positive("longest_edge", 28 * 28 * 1280))
        added = found.vision.get("deepstack_visual_indexes", [8, 16, 24]) if found.kind in _STACKED else []
        if not isinstance(added, list):
            raise UnsupportedModel("deepstack_visual_indexes", f"must be a list, not {added!r}")
        return cls(mark, found.settings, cell, fewest, most, _components(found.config, found.kind), len(added))

    def most_pixels(self, detail: str) -> int:
        """Pixels of a larger picture, once resized, at most."""
        return max(self.fewest, min(self.most, LOW_PIXELS)) if detail == "low" else self.most

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """Rows and columns of cells.

        Raises:
            ValueError: the picture is too long or too high.
        """
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise ValueError(f"{width} x {height} pixels: one side may be at most {MAX_RATIO} times the other")
        cell, most = self.cell, self.most_pixels(detail)
        rows, columns = round(height / cell), round(width / cell)
        if rows * columns * cell * cell > most:
            beta = math.sqrt(height * width / most)
            return max(1, math.floor(height / beta / cell)), max(1, math.floor(width / beta / cell))
        if rows * columns * cell * cell < self.fewest:
            beta = math.sqrt(self.fewest / (height * width))
            return math.ceil(height * beta / cell), math.ceil(width * beta / cell)
        return rows, columns

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture: one for each cell."""
        rows, columns = grid
        return [self.mark] * (rows * columns)


def _components(config: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """Return by what each pair of elements turns: in sections, or since Qwen 3 in turns."""
    sections = _sections(config)
    if not kind.startswith("qwen3"):
        return tuple(component for component, pairs in enumerate(sections) for _ in range(pairs))
    found = [0] * sum(sections)
    for component in (1, 2):
        for pair in range(component, min(3 * sections[component], len(found)), 3):
            found[pair] = component
    return tuple(found)


def _sections(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many pairs of elements turn by time, row and column."""
    for part in (config.get("text_config") or {}, config):
        for name in ("rope_parameters", "rope_scaling"):
            found = (part.get(name) or {}).get("mrope_section")
            if isinstance(found, list) and len(found) == 3 and all(type(count) is int for count in found):
                return tuple(found)
    raise UnsupportedModel("mrope_section", "is missing: positions of pictures are not known")
