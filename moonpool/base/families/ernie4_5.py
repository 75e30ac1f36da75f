"""ERNIE 4.5, dense and with experts: RoPE turns neighbouring elements."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder, bias = llama_decoder(fields), fields.flag("use_bias", False)
    rope = replace(decoder.ropes[0], paired=True)
    return replace(decoder, ropes=(rope,)).each(
        lambda _, layer: layer.with_attention(qkv_bias=bias, output_bias=bias).with_feed_forward(bias=bias)
    )


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    inner = fields.positive("moe_intermediate_size")
    experts = ExpertsSpec(
        fields.positive("moe_num_experts"),
        fields.positive("moe_k"),
        inner,
        "softmax",
        normalised=True,
        least_sum=fields.number("moe_norm_min"),
        correction=True,
        shared_inner=inner * int(fields.number("moe_num_shared_experts")),
    )
    decoder = _decoder(fields)
    first, every = int(fields.number("moe_layer_start_index")), fields.positive("moe_layer_interval")
    last = int(fields.number("moe_layer_end_index"))
    last = len(decoder.layers) - 1 if last < 0 else last
    return decoder.each(
        lambda index, layer: layer.with_feed_forward(
            experts=experts if first <= index <= last and (index + 1) % every == 0 else None
        )
    )


ERNIE4_5 = ModelFamily(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    gguf=GgufNames(architecture="ernie4_5"),
)
ERNIE4_5_MOE = ModelFamily(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    names=TensorNames(correction="mlp.moe_statics.e_score_correction_bias", correction_row=True),
    gguf=GgufNames(
        architecture="ernie4_5-moe",
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
)
