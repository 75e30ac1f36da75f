"""LFM2: short convolutions, and attention in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    kinds_by_kv_heads,
    layer_kinds,
    llama_decoder,
)
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, RecurrentSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(_with_width(fields))
    layers = len(decoder.layers)
    attend = fields.get("full_attn_idxs") or range(layers)
    default = ["full_attention" if index in attend else "conv" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default, ("full_attention", "conv"))
    conv = RecurrentSpec(
        "short_conv",
        fields.positive("conv_L_cache"),
        width=fields.positive("hidden_size"),
        conv_bias=fields.flag("conv_bias", False),
        bias=fields.flag("conv_bias", False),
    )

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = layer.with_attention(qk_norm=layer.norm)
        return replace(layer, recurrent=conv) if kinds[index] == "conv" else layer

    return decoder.each(kind)


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        least_sum=1e-6,
        factor=fields.number("routed_scaling_factor", 1.0),
        correction=fields.flag("use_expert_bias", True),
    )
    dense = int(fields.number("num_dense_layers"))
    return _decoder(fields).each(
        lambda index, layer: layer.with_feed_forward(experts=experts if index >= dense else None)
    )


def _with_width(fields: JsonFields) -> JsonFields:
    """Return config.json with the inner width that its rules make."""
    width = fields.positive("block_ff_dim", fields.positive("intermediate_size"))
    if fields.get("block_multiple_of") is not None and fields.flag("block_auto_adjust_ff_dim", True):
        multiple, factor = fields.positive("block_multiple_of"), fields.get("block_ffn_dim_multiplier", 1.0)
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * width) // multiple) * multiple
    return JsonFields({**fields.all(), "intermediate_size": width}, fields.source)


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of layers. Files give the inner width as the model has it."""
    return {"layer_types": kinds_by_kv_heads(found, "conv"), "block_auto_adjust_ff_dim": False}


_GGUF = GgufNames(
    architecture="lfm2",
    keys={"conv_L_cache": "shortconv.l_cache", "listed_kv_heads": "attention.head_count_kv"},
    complete=_from_gguf,
    outer={"token_embd": "embedding", "token_embd_norm": "norm", "output": "head"},
    recurrent={
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
)
LFM2 = ModelFamily(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "tie_word_embeddings": True,
    },
    names=TensorNames(
        norm="model.embedding_norm",
        attention_norm="operator_norm",
        output="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        feed_forward_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        recurrent={"inputs": ("conv.in_proj",), "conv": ("conv.conv",), "output": ("conv.out_proj",)},
    ),
    other_keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    gguf=_GGUF,
)
LFM2_MOE = ModelFamily(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 7168,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
    },
    names=replace(
        LFM2.names,
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        expert="feed_forward.experts.{expert}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    other_keys=LFM2.other_keys,
    gguf=replace(
        _GGUF,
        architecture="lfm2moe",
        keys={
            **_GGUF.keys,
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": "leading_dense_block_count",
        },
    ),
)
