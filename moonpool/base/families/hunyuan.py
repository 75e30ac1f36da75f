"""Hunyuan V1, dense and with experts: norms of queries and keys behind RoPE."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = decoder.ropes[0]
    if scaling.get("rope_type", scaling.get("type")) == "dynamic" and scaling.get("alpha"):
        # Not dynamic at all: a fixed base, which alpha stretches.
        alpha = JsonFields(scaling, f"{fields.source}: rope_scaling").number("alpha")
        decoder = replace(decoder, ropes=(replace(rope, theta=rope.theta * alpha ** (rope.width / (rope.width - 2))),))
    return decoder.each(
        lambda _, layer: layer.with_attention(qk_norm=layer.norm, qk_norm_last=True).with_feed_forward(bias=False)
    )


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    chosen = fields.get("moe_topk")
    inner = fields.positive("intermediate_size")
    experts = ExpertsSpec(
        fields.positive("num_experts"),
        chosen[0] if isinstance(chosen, list) else fields.positive("moe_topk", 1),
        inner,
        "softmax",
        normalised=True,
        shared_inner=inner,
    )
    return _decoder(fields).each(lambda _, layer: layer.with_feed_forward(experts=experts))


_NAMES = TensorNames(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate="mlp.shared_mlp.gate_proj",
    shared_up="mlp.shared_mlp.up_proj",
    shared_down="mlp.shared_mlp.down_proj",
)
HUNYUAN = ModelFamily(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    decoder=_decoder,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    names=_NAMES,
    gguf=GgufNames(architecture="hunyuan-dense"),
)
HUNYUAN_MOE = ModelFamily(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    decoder=_moe_decoder,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_experts": 1, "moe_topk": 1},
    names=_NAMES,
    gguf=GgufNames(
        architecture="hunyuan-moe",
        keys={
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
)
