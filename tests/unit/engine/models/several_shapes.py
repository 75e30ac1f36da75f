"""A checkpoint whose layers differ in the shape of their KV, and which computes what its source does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from moonpool.base.checkpoint import ModelConfig, load_config


def with_repeated_heads(source: Path, folder: Path) -> ModelConfig:
    """Write a float32 checkpoint to `folder`, and return its configuration, which no config.json can say.

    Layers with odd numbers have each KV head of `source` twice.
    """
    config = load_config(source)
    weights = load_file(source / "model.safetensors")
    for index in range(1, config.num_layers, 2):
        for name in ("k_proj", "v_proj"):
            tensor = f"model.layers.{index}.self_attn.{name}.weight"
            heads = weights[tensor].view(config.num_kv_heads, config.head_dim, -1)
            weights[tensor] = heads.repeat_interleave(2, dim=0).flatten(0, 1).contiguous()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors")
    decoder = config.decoder.each(
        lambda index, layer: layer.with_attention(num_kv_heads=config.num_kv_heads * (1 + index % 2))
    )
    return replace(config, decoder=decoder)
