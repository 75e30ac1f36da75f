"""What a family makes of pictures: the contract of rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PictureTokenizer(Protocol):
    """What a rule needs of the checkpoint's tokenizer."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of `text`."""
        ...

    def special_id(self, text: str) -> int | None:
        """Id of a special token."""
        ...


class PictureRule(Protocol):
    """What a family makes of pictures."""

    @property
    def mark(self) -> int:
        """The token that the chat template writes for each picture, and that has rows of the encoder in its place."""
        ...

    @property
    def settings(self) -> str:
        """All settings of the processor."""
        ...

    @property
    def components(self) -> tuple[int, ...]:
        """M-RoPE: whether each pair of a head's turned elements turns by time (0), row (1) or column (2).

        () = by the token's place alone. With components, a grid is the rows and columns of a picture's tokens, and the
        text behind goes on as if the picture had as many tokens as its longer side.
        """
        ...

    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """How the picture is cut; decides the tokens.

        Raises:
            ValueError: the model cannot take a picture of this shape; says why.
        """
        ...

    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture; as many are `mark` as the encoder makes rows."""
        ...
