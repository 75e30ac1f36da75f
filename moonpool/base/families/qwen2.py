"""Qwen 2 and 2.5, dense and with experts."""

from collections.abc import Sequence

from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    class_sizes,
    layer_kinds,
    llama_decoder,
    windowed,
)
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def qwen_window(fields: JsonFields, decoder: DecoderSpec) -> DecoderSpec:
    """Return `decoder` with Qwen's window: if `use_sliding_window`, on layers from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return decoder
    layers, first = len(decoder.layers), int(fields.number("max_window_layers", 28))
    kinds: Sequence[str] = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    return windowed(fields, decoder, layer_kinds(fields, layers, kinds))


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qkv_bias=True, output_bias=False).with_feed_forward(bias=False)
    )
    return qwen_window(fields, decoder)


def sparse_layer(fields: JsonFields, index: int) -> bool:
    """Whether a layer has experts: by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = fields.get("mlp_only_layers") or []
    return index not in dense and (index + 1) % fields.positive("decoder_sparse_step", 1) == 0


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "softmax",
        normalised=fields.flag("norm_topk_prob", False),
        shared_inner=fields.positive("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    bias = fields.flag("qkv_bias", True)
    decoder = llama_decoder(fields).each(
        lambda index, layer: layer.with_attention(qkv_bias=bias, output_bias=False).with_feed_forward(
            experts=experts if sparse_layer(fields, index) else None, bias=False
        )
    )
    return qwen_window(fields, decoder)


QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    other_model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    decoder=_decoder,
    sizes=class_sizes(151936, 4096, 22016, 32, 32),
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    gguf=GgufNames(architecture="qwen2", other_architectures=("qwen2vl",)),
)
QWEN2_MOE = ModelFamily(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    names=TensorNames(
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
    ),
    gguf=GgufNames(
        architecture="qwen2moe",
        keys={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
)
