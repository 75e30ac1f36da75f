"""Pictures of Gemma 3: each is one square, and its tokens attend to each other both ways.

The decoder does so by `DecoderSpec.whole_pictures`.

Source: Gemma3ImageProcessor, Gemma3Processor and the masks of Gemma3Model in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.base.errors import UnsupportedModel
from moonpool.base.pictures.base import PictureFields, PictureRule

_PAD = "<pad>"
"""The mark where the vocabulary was cut before `<image_soft_token>`, as in GGUF files."""
_MARK, _BEGIN, _END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class Gemma3Rule(PictureRule):
    """The rule of a checkpoint; see `PictureRule`.

    Attributes:
        mark: id of `<image_soft_token>`.
        settings: see `PictureRule`.
        rows: rows that the encoder makes of a picture.
        written: see `PictureRule`.
    """

    mark: int
    settings: str
    rows: int
    written: tuple[str, str] | None = _BEGIN, f"\n\n{_BEGIN}{_MARK}{_END}\n\n"

    @classmethod
    def read(cls, found: PictureFields) -> Self:
        """Read a checkpoint's rule.

        Raises:
            CheckpointError: a setting is wrong; names the setting.
            UnsupportedModel: pictures are cut, settings contradict each other, or a token is missing; names which.
        """
        rows = found.whole.positive("mm_tokens_per_image", 256)
        told = [found.processor.positive(name, rows, null=rows) for name in ("image_seq_length", "image_seq_len")]
        if told != [rows, rows]:
            raise UnsupportedModel("image_seq_length", f"is {told[0]}, but the encoder makes {rows} rows")
        if found.processor.get("do_pan_and_scan"):
            raise UnsupportedModel("do_pan_and_scan", "parts of pictures beside the whole are not built")
        told = found.whole.get("image_token_id", found.whole.get("image_token_index"))
        cut = told is None and found.tokenizer.special_id(_MARK) is None
        text = _PAD if cut else _MARK
        mark, *_ = found.special(text, _BEGIN, _END)
        return cls(mark, found.settings, rows, (_BEGIN, f"\n\n{_BEGIN}{text}{_END}\n\n"))

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """One square, whatever the shape."""
        del width, height, detail
        return 1, 1

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture: one for each row."""
        del grid
        return [self.mark] * self.rows
