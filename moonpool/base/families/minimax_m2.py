"""MiniMax M2: experts by sigmoid scores, norms of queries and keys as a whole, partly rotated heads."""

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "sigmoid",
        normalised=True,
        correction=True,
    )
    return llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(
            qk_norm=layer.norm, qk_norm_over="all", qkv_bias=False, output_bias=False
        ).with_feed_forward(experts=experts)
    )


MINIMAX_M2 = ModelFamily(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
    },
    names=TensorNames(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert="block_sparse_moe.experts.{expert}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    gguf=GgufNames(
        architecture="minimax-m2",
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
)
