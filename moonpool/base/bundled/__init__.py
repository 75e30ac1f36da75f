"""The small checkpoint that ships with Moonpool, so that demos and tests need no download."""

from __future__ import annotations

import pathlib

__all__ = ["model_dir"]


def model_dir() -> pathlib.Path:
    """Return the folder of the bundled checkpoint (Hugging Face layout, ``LlamaForCausalLM``).

    The folder holds ``config.json``, ``model.safetensors``, ``tokenizer.json``, ``tokenizer_config.json``,
    ``generation_config.json`` and ``README.md``: how the model was made, and its figures.
    """
    return pathlib.Path(__file__).resolve().parent / "tiny"
