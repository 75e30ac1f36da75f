"""Mistral and Ministral. GGUF files have the llama architecture, Ministral 3's have mistral3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.families.base import GgufNames, ModelFamily, class_sizes, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qkv_bias=False, output_bias=False).with_feed_forward(bias=False)
    )
    layers = len(decoder.layers)
    return windowed(fields, decoder, layer_kinds(fields, layers, ["sliding_attention"] * layers))


def _by_length(fields: JsonFields) -> DecoderSpec:
    """Ministral 3: queries grow with their position (as in Llama 4)."""
    decoder = _decoder(fields)
    rope = JsonFields(fields.get("rope_scaling") or fields.get("rope_parameters"), f"{fields.source}: rope_parameters")
    beta = rope.number("llama_4_scaling_beta", 0.0)
    length = rope.positive("original_max_position_embeddings", fields.positive("max_position_embeddings"))
    return replace(decoder, ropes=(replace(decoder.ropes[0], by_length=(beta, length) if beta else None),))


def _gguf_rope(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return what the files spread over several keys."""
    scaling = found.get("rope_scaling") or {"rope_type": "default"}
    scale, beta = found.get("yarn_log_multiplier", 0.0), found.get("temperature_scale", 0.0)
    further = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}
    return {"rope_scaling": {**scaling, **further}, "sliding_window": None}


MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    model_type="mistral",
    decoder=_decoder,
    sizes=class_sizes(32000, 4096, 14336, 32, 32),
    defaults={
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 4096 * 32,
    },
)
MINISTRAL = ModelFamily(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    decoder=_decoder,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
MINISTRAL3 = ModelFamily(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    decoder=_by_length,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    gguf=GgufNames(
        architecture="mistral3",
        paired_rows=True,
        keys={
            "temperature_scale": "attention.temperature_scale",
            "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
        },
        complete=_gguf_rope,
    ),
)  # fmt: skip
