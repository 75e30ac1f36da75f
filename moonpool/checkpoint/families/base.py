"""The contract of a model family: what its checkpoints say, and what their tensors are called. Torch-free.

A family is one file beside this one, with a `ModelFamily`, and an entry of `FAMILIES`; docs/extend/model_family.md
lists the steps. Readers of checkpoints and the loader of weights read the description, and nothing else, to tell
families apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moonpool.checkpoint.config import JsonFields
from moonpool.errors import UnsupportedModel


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

    def refuse_sliding_window(self, fields: JsonFields, layers: int, positions: int) -> None:
        """Refuse a sliding window that a layer would use.

        A window that no sequence can outgrow (`>= max_position_embeddings`) changes nothing and is accepted.

        Raises:
            UnsupportedModel: names the key.
        """
        kinds = fields.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
            other = (
                sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, list) else kinds
            )
            raise UnsupportedModel("layer_types", f"{other} are not supported, only full_attention")
        if self.window == "none" or (self.window == "flag" and not fields.flag("use_sliding_window", False)):
            return
        # transformers: the class default of an absent key is 4096, null switches the window off.
        window = fields.get("sliding_window", 4096)
        if window is None or fields.positive("sliding_window", 4096) >= positions:
            return
        if self.window == "flag" and (kinds is not None or fields.number("max_window_layers", 28) >= layers):
            return
        raise UnsupportedModel("sliding_window", f"attention to the last {window} tokens only is not supported")


def refuse_unsupported(fields: JsonFields) -> None:
    """Refuse options that would change the result and are not implemented.

    Raises:
        UnsupportedModel: names the key.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            method = fields.get(name)
            label = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
            raise UnsupportedModel(name, f"quantised weights ({label}) are not supported")
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel("hidden_act", f"activation {activation!r} is not supported, only silu")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor", "RoPE on a part of each head is not supported")
