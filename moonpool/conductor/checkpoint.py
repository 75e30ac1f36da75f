"""The checkpoint that a conductor serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.base.checkpoint import ModelConfig, Tokenizer, config_hash, load_config, model_name, resolve
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.pictures.base import PictureRule
from moonpool.conductor.registry import ModelIdentity


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parts of a checkpoint that the conductor uses.

    `pictures`: what the model makes of pictures; a text says why the model takes none.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    pictures: PictureRule | str = "the checkpoint has no encoder of pictures"

    @classmethod
    def load(cls, model: str, chat_template: Path | None = None) -> Checkpoint:
        """Load from a folder or hub id; `chat_template`: a file in place of the checkpoint's chat template.

        Raises:
            CheckpointError: the checkpoint is missing, damaged or not supported.
        """
        folder = resolve(model)
        tokenizer = Tokenizer.load(folder, chat_template)
        return cls(model_name(model), load_config(folder), tokenizer, read_rule(folder, lambda: tokenizer))

    def served(self) -> ModelIdentity:
        """Return what engines must serve to join."""
        return ModelIdentity(self.name, config_hash(self.config), self.config.vocab_size)
