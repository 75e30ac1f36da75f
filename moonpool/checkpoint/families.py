"""Supported model families: architectures and their defaults; everything else is refused by name.

Defaults of absent keys are those of transformers' configuration classes. A new family is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.checkpoint.config import JsonFields
from moonpool.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Defaults of one architecture, and where its biases and norms are."""

    qkv_bias: bool | None  # None: `attention_bias` decides
    output_bias: bool | None
    qk_norm: bool
    kv_heads: int | None  # when absent; None: as many as heads
    head_dim: int | None  # when absent; None: hidden_size / heads
    mlp_bias: bool | None
    window: str  # "always": a sliding_window counts by itself; "flag": only with use_sliding_window; "none"
    max_positions: int  # when absent


FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(None, None, False, None, None, None, "none", 2048),
    "MistralForCausalLM": ModelFamily(False, False, False, 8, None, False, "always", 4096 * 32),
    "Qwen2ForCausalLM": ModelFamily(True, False, False, 32, None, False, "flag", 32768),
    "Qwen3ForCausalLM": ModelFamily(None, None, True, 32, 128, False, "flag", 32768),
}


#: Architectures that can be loaded.
ARCHITECTURES = tuple(FAMILIES)


_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def architecture_of(fields: JsonFields) -> str:
    """Return the architecture, from `architectures` or else `model_type`."""
    declared = fields.get("architectures")
    if declared is None:
        kind = fields.get("model_type")
        if kind not in _MODEL_TYPES:
            raise UnsupportedModel("model_type", f"{kind!r} is none of {', '.join(_MODEL_TYPES)}")
        return _MODEL_TYPES[kind]
    names = declared if isinstance(declared, list) else [declared]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise UnsupportedModel("architectures", f"{declared!r} is none of {', '.join(FAMILIES)}")
    return str(names[0])


def refuse_unsupported(fields: JsonFields) -> None:
    """Refuse what would change the result and is not implemented."""
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


def refuse_sliding_window(fields: JsonFields, family: ModelFamily, layers: int, positions: int) -> None:
    """Refuse a sliding window that some layer would really use.

    A window that no sequence can outgrow (`>= max_position_embeddings`) changes nothing and is let through.
    """
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        other = sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, list) else kinds
        raise UnsupportedModel("layer_types", f"{other} are not supported, only full_attention")
    if family.window == "none" or (family.window == "flag" and not fields.flag("use_sliding_window", False)):
        return
    # transformers: the class default of an absent key is 4096, null switches the window off.
    window = fields.get("sliding_window", 4096)
    if window is None or fields.positive("sliding_window", 4096) >= positions:
        return
    if family.window == "flag" and (kinds is not None or fields.number("max_window_layers", 28) >= layers):
        return
    raise UnsupportedModel("sliding_window", f"attention to the last {window} tokens only is not supported")
