"""What a family makes of pictures: the contract of rules, and what rules are read from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields


class PictureTokenizer(Protocol):
    """What a rule needs of the checkpoint's tokenizer."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of `text`."""
        ...

    def special_id(self, text: str) -> int | None:
        """Id of a special token."""
        ...


class PictureFields:
    """What a checkpoint says of pictures, read by type.

    Attributes:
        config: config.json.
        whole: the same.
        vision: the encoder's part of it.
        processor: the processor's settings.
        size: `size` of these.
        settings: all of these, as they count in digests.
        kind: `model_type`.
        tokenizer: the checkpoint's.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        tokenizer: PictureTokenizer,
        source: str,
        weights: str = "",
    ) -> None:
        """Take the files' contents; `source` names their folder in errors, `weights` is a hash of the encoder.

        Raises:
            CheckpointError: a part is no object; names the part.
        """
        self.config, self.tokenizer, self.kind = config, tokenizer, str(config.get("model_type"))
        self.whole, self.processor = JsonFields(config, source), JsonFields(processor, source)
        self.vision, self.size = self.of(self.whole, "vision_config"), self.of(self.processor, "size")
        counted = {**processor, "weights": weights} if weights else dict(processor)
        self.settings = json.dumps(counted, sort_keys=True)

    def of(self, fields: JsonFields, name: str) -> JsonFields:
        """Return an object within an object; one without fields if it is missing.

        Raises:
            CheckpointError: the value is no object; names the value.
        """
        found = fields.get(name) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{fields.source}: {name} must be an object, not {found!r}")
        return JsonFields(found, fields.source)

    def special(self, mark: str, *others: str) -> list[int]:
        """Return the ids of special tokens; the first is the one that has the encoder's rows in its place.

        Raises:
            UnsupportedModel: the tokenizer lacks one, or config.json has another number for the first.
        """
        found = [self.tokenizer.special_id(text) for text in (mark, *others)]
        ids = [token for token in found if token is not None]
        told = self.whole.get("image_token_id", self.whole.get("image_token_index"))
        if len(ids) < len(found) or told not in (None, ids[0]):
            texts = ", ".join((mark, *others))
            raise UnsupportedModel("image_token_id", f"is {told}; the tokenizer has {found} for {texts}")
        return ids


class PictureRule(ABC):
    """What a family makes of pictures.

    Attributes:
        mark: the token that stands once for each picture in a prompt, and that has rows of the encoder in its place.
        settings: all settings of the processor.
        components: M-RoPE: whether each pair of a head's turned elements turns by time (0), row (1) or column (2).
            () = by the token's place alone. With components, a grid is the rows and columns of a picture's tokens, and
            the text behind goes on as if the picture had as many tokens as its longer side.
        written: what the chat template writes for each picture, and the text with the mark that is tokenised in its
            place; None: the template writes the mark.
        added_layers: leading layers behind which the encoder's further rows are added (DeepStack).
    """

    mark: int
    settings: str
    components: tuple[int, ...] = ()
    written: tuple[str, str] | None = None
    added_layers: int = 0

    @abstractmethod
    def grid(self, width: int, height: int, detail: str) -> tuple[int, ...]:
        """How the picture is cut; decides the tokens.

        Raises:
            ValueError: the model cannot take a picture of this shape; says why.
        """

    @abstractmethod
    def tokens(self, grid: tuple[int, ...]) -> Sequence[int]:
        """Tokens of a picture; as many are `mark` as the encoder makes rows."""
