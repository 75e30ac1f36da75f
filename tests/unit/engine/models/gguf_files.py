"""Small checkpoints to be written as GGUF files."""

from pathlib import Path
from typing import Any

from moonpool.engine.models.random_checkpoint import create

#: Rows of a whole number of blocks of every type.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPES = {
    "llama": ("tiny-llama", WIDE),
    "qwen2": ("tiny-qwen2", WIDE),
    "qwen3": ("tiny-qwen3", {**WIDE, "head_dim": 128}),  # the only one that transformers reads from GGUF
    "qwen3moe": (
        "small-experts",
        {
            **WIDE,
            "num_attention_heads": 4,
            "head_dim": 64,
            "vocab_size": 512,
            "num_experts": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,  # as transformers takes for granted, and 8 experts for a token
            "tie_word_embeddings": True,
        },
    ),
}


def make_folder(architecture: str, folder: Path, **overrides: Any) -> Path:
    """A random checkpoint as a Hugging Face folder, float32."""
    shape, wide = SHAPES[architecture]
    return create(shape, folder, seed=11, dtype="float32", overrides={**wide, **overrides})
