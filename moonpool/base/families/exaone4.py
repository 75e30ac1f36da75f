"""EXAONE 4: norms behind both parts, windows with RoPE in three of four layers. K-EXAONE: norms before, experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    layer_kinds,
    llama_decoder,
    own_keys,
    windowed,
)
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, shared_experts
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    return _attention(fields).each(
        lambda _, layer: replace(
            layer,
            attention_norm=False,
            feed_forward_norm=False,
            attention_out_norm=True,
            feed_forward_out_norm=True,
        )
    )


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    decoder, dense = _attention(fields), int(fields.number("first_k_dense_replace", 1))
    layers, experts = len(decoder.layers), shared_experts(fields)
    default = ["dense" if index < dense else "sparse" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default, ("dense", "sparse"), "mlp_layer_types")
    return decoder.each(
        lambda index, layer: layer.with_feed_forward(experts=experts if kinds[index] == "sparse" else None)
    )


def _attention(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qk_norm=layer.norm, qkv_bias=False, output_bias=False)
    )
    if fields.get("sliding_window") is None:
        return decoder
    layers = len(decoder.layers)
    pattern = fields.get("sliding_window_pattern")
    every = pattern if isinstance(pattern, int) else 4
    default = [
        "sliding_attention" if (index + 1) % every and index < layers - 1 else "full_attention"
        for index in range(layers)
    ]
    kinds = layer_kinds(fields, layers, default)
    decoder = decoder.each(
        lambda index, layer: layer.with_attention(rope=0 if kinds[index] == "sliding_attention" else None)
    )
    return windowed(fields, decoder, kinds)


_OTHER_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the layers' kinds, as new files list them."""
    windows = found.get("windows")
    kinds = ["sliding_attention" if local else "full_attention" for local in windows] if windows else None
    return {"sliding_window": found.get("sliding_window"), "layer_types": kinds}


EXAONE4 = ModelFamily(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    decoder=_decoder,
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096},
    gguf=GgufNames(
        architecture="exaone4",
        keys={"sliding_window": "attention.sliding_window", "windows": "attention.sliding_window_pattern"},
        complete=_from_gguf,
    ),
)
EXAONE_MOE = ModelFamily(
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
    },
    names=TensorNames(correction="mlp.e_score_correction_bias"),
    other_keys=_OTHER_KEYS,
    gguf=GgufNames(
        architecture="exaone-moe",
        further_layers="nextn_predict_layers",
        keys={
            **own_keys(SHARED_EXPERT_KEYS, _OTHER_KEYS),
            "sliding_window": "attention.sliding_window",
            "windows": "attention.sliding_window_pattern",
        },
        complete=_from_gguf,
    ),
)
