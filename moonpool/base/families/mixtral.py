"""Mixtral: Mistral with experts in every layer."""

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "softmax",
        normalised=True,
    )
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qkv_bias=False, output_bias=False).with_feed_forward(experts=experts)
    )
    layers = len(decoder.layers)
    return windowed(fields, decoder, layer_kinds(fields, layers, ["sliding_attention"] * layers))


MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    names=TensorNames(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{expert}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    gguf=GgufNames(
        architecture="llama",
        paired_rows=True,
        keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        complete=lambda _: {"sliding_window": None},
    ),
)
