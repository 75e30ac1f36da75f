"""Qwen 3, dense and with experts."""

from moonpool.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.families.fields import JsonFields
from moonpool.families.qwen2 import qwen_window, sparse_layer
from moonpool.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qk_norm=layer.norm).with_feed_forward(bias=False)
    )
    return qwen_window(fields, decoder)


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_experts", fields.positive("num_local_experts")),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "softmax",
        normalised=fields.flag("norm_topk_prob", False),
    )
    return _decoder(fields).each(
        lambda index, layer: layer.with_feed_forward(experts=experts if sparse_layer(fields, index) else None)
    )


QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768,
    },
    gguf=GgufNames(architecture="qwen3"),
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
        keys={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        complete=lambda _: {"norm_topk_prob": True},
    ),
)
