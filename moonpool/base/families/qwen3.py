"""Qwen 3, dense and with experts; Mellum 2: with windows that have RoPE of their own, too."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.qwen2 import qwen_window, sparse_layer
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qk_norm=layer.norm).with_feed_forward(bias=False)
    )
    return qwen_window(fields, decoder)


def _experts(fields: JsonFields) -> ExpertsSpec:
    return ExpertsSpec(
        fields.positive("num_experts", fields.positive("num_local_experts")),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "softmax",
        normalised=fields.flag("norm_topk_prob", False),
    )


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = _experts(fields)
    return _decoder(fields).each(
        lambda index, layer: layer.with_feed_forward(experts=experts if sparse_layer(fields, index) else None)
    )


def _mellum_decoder(fields: JsonFields) -> DecoderSpec:
    decoder, experts = llama_decoder(fields, rope_kind="full_attention"), _experts(fields)
    layers, local = (
        len(decoder.layers),
        read_rope(fields, decoder.layers[0].attention.head_dim, kind="sliding_attention"),
    )
    kinds = layer_kinds(fields, layers, ["full_attention"] * layers)
    inner = layer_kinds(fields, layers, ["sparse"] * layers, ("sparse", "dense"), key="mlp_layer_types")
    decoder = replace(decoder, ropes=(*decoder.ropes, local)).each(
        lambda index, layer: layer.with_attention(
            qk_norm=layer.norm, rope=1 if kinds[index] == "sliding_attention" else 0
        ).with_feed_forward(bias=False, experts=experts if inner[index] == "sparse" else None)
    )
    return windowed(fields, decoder, kinds)


QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    other_model_types=("qwen3_vl_text",),
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768,
    },
    gguf=GgufNames(architecture="qwen3", other_architectures=("qwen3vl",)),
)  # fmt: skip
QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    gguf=GgufNames(
        architecture="qwen3moe",
        other_architectures=("qwen3vlmoe",),
        keys={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        complete=lambda _: {"norm_topk_prob": True},
    ),
)
QWEN3_VL_MOE = ModelFamily(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    decoder=lambda fields: _moe_decoder(JsonFields({**fields.all(), "norm_topk_prob": True}, fields.source)),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "tie_word_embeddings": True,
    },
    names=TensorNames(
        experts_gate_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj", experts_inputs_first=True
    ),
)
MELLUM = ModelFamily(
    architecture="MellumForCausalLM",
    model_type="mellum",
    decoder=_mellum_decoder,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
)
