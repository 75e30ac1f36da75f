"""The contract of a model family: what its checkpoints say, and what their tensors are called. Torch-free.

A family is one file beside this one, with a `ModelFamily`, and an entry of `FAMILIES`; docs/extend/model_family.md
lists the steps. Readers of checkpoints and the loader of weights read the description, and nothing else, to tell
families apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of tensors in a Hugging Face checkpoint; of a layer's tensors between `layer` and .weight or .bias."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{index}."
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    post_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNames:
    """How GGUF files name the family and its tensors."""

    architecture: str
    """Value of `general.architecture`."""
    paired_rows: bool = False
    """Whether the file's q and k have rows that RoPE turns together beside one another. llama.cpp's converter reorders
    them so for the llama architecture only; Hugging Face has them half a head apart."""
    outer: Mapping[str, str] = field(
        default_factory=lambda: {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
    )
    """Field of `TensorNames` by GGUF's name, for tensors outside layers."""
    layer: Mapping[str, str] = field(
        default_factory=lambda: {
            "attn_norm": "input_norm",
            "attn_q": "q",
            "attn_k": "k",
            "attn_v": "v",
            "attn_q_norm": "q_norm",
            "attn_k_norm": "k_norm",
            "attn_output": "output",
            "ffn_norm": "post_norm",
            "ffn_gate": "gate",
            "ffn_up": "up",
            "ffn_down": "down",
        }
    )
    """Field of `TensorNames` by GGUF's name, for tensors of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture. Defaults of absent keys are those of transformers' configuration class."""

    architecture: str
    """Name in `architectures` of config.json."""
    model_type: str
    """Name in `model_type` of config.json."""
    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None: `attention_bias` says."""
    output_bias: bool | None = None
    """Whether the output projection has a bias; None: `attention_bias` says."""
    mlp_bias: bool | None = None
    """Whether the MLP has biases; None: `mlp_bias` says."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before RoPE."""
    kv_heads: int | None = None
    """KV heads if the key is absent; None: as many as heads."""
    head_dim: int | None = None
    """Head size if the key is absent; None: hidden_size / heads."""
    window: Literal["none", "always", "flag"] = "none"
    """When `sliding_window` counts: never, always, or with `use_sliding_window`."""
    max_positions: int
    """`max_position_embeddings` if the key is absent."""
    names: TensorNames = TensorNames()
    gguf: GgufNames | None = None
    """None: no GGUF file is of this family."""
