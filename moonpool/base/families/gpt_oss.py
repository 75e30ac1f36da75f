"""gpt-oss: windows in every other layer, attention sinks, experts with a clamped activation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "softmax_chosen",
        router_bias=True,
        bias=True,
    )
    limit, alpha = fields.number("swiglu_limit"), fields.number("swiglu_alpha")
    decoder = llama_decoder(fields)
    norm = replace(decoder.final_norm, wide=True)
    decoder = replace(decoder, final_norm=norm).each(
        lambda _, layer: (
            replace(layer, norm=norm)
            .with_attention(sinks=True)
            .with_feed_forward(experts=experts, activation="clamped_swiglu", limit=limit, alpha=alpha)
        )
    )
    pattern = ["full_attention" if index % 2 else "sliding_attention" for index in range(len(decoder.layers))]
    return windowed(fields, decoder, layer_kinds(fields, len(decoder.layers), pattern))


def _gguf_rope(found: dict[str, Any]) -> Mapping[str, Any]:
    """GGUF files do not say that YaRN's borders are not rounded."""
    return {"rope_scaling": {**found["rope_scaling"], "truncate": False}} if "rope_scaling" in found else {}


GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        },
    },
    names=TensorNames(
        router="mlp.router", experts_gate_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj"
    ),
    gguf=GgufNames(
        architecture="gpt-oss",
        keys={
            "sliding_window": "attention.sliding_window",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        complete=_gguf_rope,
        renamed={"post_attention_norm": "feed_forward_norm"},
    ),
)  # fmt: skip
