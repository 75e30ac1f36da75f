"""What a checkpoint needs: parameters, bytes, KV per token, and how many tokens fit a given memory.

Reads the configuration and the headers of the files only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.checkpoint.config import ModelConfig, kv_layout, resolve_dtype
from moonpool.checkpoint.formats import load_config, tensor_index
from moonpool.checkpoint.weights import TensorInfo
from moonpool.errors import InvalidRequest

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Report:
    """Sizes of one model in one element type.

    `weight_bytes` is what the weights take in memory in `dtype`, `file_bytes` what they take on disk.
    `kv_token_bytes` is the KV of one token over all layers, `kv_block_bytes` that of a block. `fit_blocks` and
    `fit_tokens` say how much KV fits beside the weights into the given memory; None when none was given.
    """

    config: ModelConfig
    dtype: str
    parameters: int
    weight_bytes: int
    file_bytes: int
    block_tokens: int
    kv_token_bytes: int
    kv_block_bytes: int
    fit_blocks: int | None = None
    fit_tokens: int | None = None


def inspect_checkpoint(
    path: Path | str, dtype: str = "auto", block_tokens: int = 64, memory_bytes: int | None = None
) -> Report:
    """Return the sizes of the checkpoint in `path`.

    Raises:
        CheckpointError: as `load_config` and `tensor_index`.
        InvalidRequest: `memory_bytes` is negative.
    """
    config = load_config(path)
    chosen = resolve_dtype(config, dtype)
    layout = kv_layout(config, chosen, block_tokens)
    tensors = tensor_index(path)
    parameters = _parameters(config, tensors)
    weight_bytes = parameters * layout.element_bytes
    blocks = None
    if memory_bytes is not None:
        if memory_bytes < 0:
            raise InvalidRequest("memory_bytes", "must not be negative")
        blocks = max(0, memory_bytes - weight_bytes) // layout.block_bytes
    return Report(
        config=config,
        dtype=chosen,
        parameters=parameters,
        weight_bytes=weight_bytes,
        file_bytes=sum(file.stat().st_size for file in sorted({info.file for info in tensors.values()})),
        block_tokens=block_tokens,
        kv_token_bytes=layout.token_bytes,
        kv_block_bytes=layout.block_bytes,
        fit_blocks=blocks,
        fit_tokens=None if blocks is None else blocks * block_tokens,
    )


def _parameters(config: ModelConfig, tensors: dict[str, TensorInfo]) -> int:
    """Count the parameters; a tied output head is the embedding and counts once, stored or not."""
    return sum(info.elements for name, info in tensors.items() if not (config.tie_word_embeddings and name == _HEAD))
