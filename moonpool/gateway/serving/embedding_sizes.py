"""To which sizes embeddings may be cut: models trained for that (Matryoshka) keep most of the meaning in front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from moonpool.base.checkpoint import load_config, resolve
from moonpool.base.errors import InvalidRequest, MoonpoolError
from moonpool.base.families.fields import read_json

WhichSizes = Literal["auto", "any", "none"]


@dataclass(frozen=True, slots=True)
class EmbeddingSizes:
    """Sizes to which embeddings may be cut.

    Attributes:
        most: the model's size; 0: embeddings are not cut.
        listed: the sizes that the model was trained for; () = any up to `most`.
    """

    most: int = 0
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: str, which: WhichSizes) -> Self:
        """The sizes of a checkpoint, by `is_matryoshka` and `matryoshka_dimensions` of its `config.json`, as in vLLM.

        Args:
            model: the checkpoint.
            which: "auto": as the checkpoint says; "any": any size, whatever it says; "none": none.
        """
        if which == "none":
            return cls()
        try:
            path = resolve(model)
            file = Path(path) / "config.json"
            settings = read_json(file) if file.exists() else {}
            listed = settings.get("matryoshka_dimensions")
            told = bool(settings.get("is_matryoshka")) or isinstance(listed, list)
            if which == "auto" and not told:
                return cls()
            sizes = listed if isinstance(listed, list) and which == "auto" else []
            config = load_config(path)
            size = config.hidden_size if config.pooling is None else config.pooling.size(config.hidden_size)
            return cls(size, tuple(size for size in sizes if type(size) is int))
        except MoonpoolError:  # whoever reads the weights says what is wrong
            return cls()

    def check(self, dimensions: int) -> None:
        """Check a size that a request asks for.

        Raises:
            InvalidRequest: embeddings are not cut to it; names `dimensions`.
        """
        if not self.most:
            wrong = "this model is not said to be trained for shorter embeddings (is_matryoshka of its config.json)"
            raise InvalidRequest("dimensions", f"{wrong}; --set embedding_dimensions=any cuts them anyway")
        if self.listed and dimensions not in self.listed:
            raise InvalidRequest("dimensions", f"must be one of {', '.join(map(str, self.listed))}")
        if not 1 <= dimensions <= self.most:
            raise InvalidRequest("dimensions", f"must be in [1, {self.most}]")


WHOLE = EmbeddingSizes()
"""Embeddings are not cut."""


def cut(embedding: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first values of an embedding, scaled to length 1 again; None: all as they are."""
    if dimensions is None or dimensions >= len(embedding):
        return embedding
    kept = embedding[:dimensions]
    length = math.sqrt(sum(value * value for value in kept))
    return [value / length for value in kept] if length else kept
