"""The checkpoint that a conductor serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.base.checkpoint import ModelConfig, Tokenizer, config_hash, load_config, model_name, resolve
from moonpool.conductor.registry import ModelIdentity


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parts of a checkpoint that the conductor uses."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def load(cls, model: str, chat_template: Path | None = None) -> Checkpoint:
        """Load from a folder or hub id; `chat_template`: a file in place of the checkpoint's chat template.

        Raises:
            CheckpointError: the checkpoint is missing, damaged or not supported.
        """
        folder = resolve(model)
        return cls(model_name(model), load_config(folder), Tokenizer.load(folder, chat_template))

    def served(self) -> ModelIdentity:
        """Return what engines must serve to join."""
        return ModelIdentity(self.name, config_hash(self.config), self.config.vocab_size)
