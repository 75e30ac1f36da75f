"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and gated attention in every fourth layer."""

from dataclasses import replace
from typing import Any

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.qwen2 import sparse_layer
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, RecurrentSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    layers, every = len(decoder.layers), fields.positive("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default, ("full_attention", "linear_attention"))
    norm = replace(decoder.final_norm, offset=1.0, wide=True)
    delta = RecurrentSpec(
        "gated_delta",
        fields.positive("linear_conv_kernel_dim"),
        heads=fields.positive("linear_num_value_heads"),
        key_heads=fields.positive("linear_num_key_heads"),
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
        norm_eps=norm.eps,
    )

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = replace(layer, norm=norm).with_attention(qk_norm=norm, output_gate=True).with_feed_forward(bias=False)
        return replace(layer, recurrent=delta) if kinds[index] == "linear_attention" else layer

    return replace(decoder, final_norm=norm).each(kind)


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "softmax",
        normalised=fields.flag("norm_topk_prob", True),
        shared_inner=fields.positive("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    # Where all layers have experts, nothing says the width of a dense network.
    fields = JsonFields({"intermediate_size": experts.inner, **fields.all()}, fields.source)
    return _decoder(fields).each(
        lambda index, layer: layer.with_feed_forward(experts=experts if sparse_layer(fields, index) else None)
    )


_SHARED = TensorNames(
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
    recurrent={
        "inputs": (
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ),
        "conv": ("linear_attn.conv1d",),
        "decay": ("linear_attn.A_log",),
        "step_bias": ("linear_attn.dt_bias",),
        "norm": ("linear_attn.norm",),
        "output": ("linear_attn.out_proj",),
    },
)
_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _from_gguf(found: dict[str, Any]) -> dict[str, Any]:
    return {"linear_value_head_dim": found.get("inner", 0) // max(1, found.get("linear_num_value_heads", 1))}


_GGUF = GgufNames(
    architecture="qwen35",
    whole_norms=True,
    further_layers="nextn_predict_layers",
    keys={
        "full_attention_interval": "full_attention_interval",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "inner": "ssm.inner_size",
    },
    complete=_from_gguf,
    renamed={"post_attention_norm": "feed_forward_norm"},
    in_turn=True,
    recurrent={
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
)
_MOE_GGUF = replace(
    _GGUF,
    architecture="qwen35moe",
    keys={
        **_GGUF.keys,
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)
QWEN3_NEXT = ModelFamily(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    decoder=_moe_decoder,
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    names=replace(
        _SHARED,
        interleaved=True,
        recurrent={
            **_SHARED.recurrent,
            "inputs": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
            "split": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        },
    ),
    gguf=replace(
        _MOE_GGUF,
        architecture="qwen3next",
        in_turn=False,
        recurrent={
            **{name: ours for name, ours in _GGUF.recurrent.items() if name not in ("ssm_beta", "ssm_alpha")},
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
    ),
)
QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    decoder=_decoder,
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    names=_SHARED,
    gguf=_GGUF,
)
QWEN3_5_MOE = ModelFamily(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    decoder=_moe_decoder,
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    names=replace(_SHARED, experts_gate_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj"),
    gguf=_MOE_GGUF,
)
