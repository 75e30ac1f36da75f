"""The parts of a checkpoint that the conductor reads: name, configuration and tokenizer, but no weights."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.checkpoint import ModelConfig, Tokenizer, config_hash, load_config, model_name, resolve
from services.conductor.registry import ServedModel


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as the conductor uses it."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def load(cls, model: str) -> Checkpoint:
        """Load from a folder or hub id.

        Raises:
            CheckpointError: there is none, or it is damaged or not supported.
        """
        folder = resolve(model)
        return cls(model_name(model), load_config(folder), Tokenizer.load(folder))

    def served(self) -> ServedModel:
        """What engines must serve to join."""
        return ServedModel(self.name, config_hash(self.config), self.config.vocab_size)
