"""Kimi Linear: delta attention (KDA), and latent attention without positions in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    kinds_by_kv_heads,
    layer_kinds,
    own_keys,
)
from moonpool.base.families.deepseek import LATENT_KEYS, latent_decoder, latent_from_gguf, shared_experts
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, LayerSpec, RecurrentSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    for key, value in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid")):
        if fields.get(key, value) != value:
            raise UnsupportedModel(key, f"{fields.get(key)!r} is not {value!r}")
    decoder = latent_decoder(fields, paired=False)
    linear, layers = _linear_fields(fields), len(decoder.layers)
    attend = linear.get("full_attn_layers")  # counted from 1
    if not isinstance(attend, list):
        attend = [index + 1 for index in range(layers) if index and index % 4 == 0]
    default = ["full_attention" if index + 1 in attend else "linear_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default, ("full_attention", "linear_attention"))
    heads, size = linear.positive("num_heads"), linear.positive("head_dim")
    delta = RecurrentSpec(
        "kimi_delta",
        linear.positive("short_conv_kernel_size"),
        heads=heads,
        key_heads=heads,
        key_dim=size,
        value_dim=size,
        width=size,
        norm_eps=decoder.final_norm.eps,
    )
    experts, dense = shared_experts(fields), int(fields.number("first_k_dense_replace", 1))
    sparse = layer_kinds(
        JsonFields({"layer_types": fields.get("mlp_layer_types")}, f"{fields.source}: mlp_layer_types"),
        layers,
        ["dense" if index < dense else "sparse" for index in range(layers)],
        ("dense", "sparse"),
    )

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = layer.with_attention(rope=None)
        layer = layer.with_feed_forward(experts=experts if sparse[index] == "sparse" else None, bias=False)
        return replace(layer, recurrent=delta) if kinds[index] == "linear_attention" else layer

    return replace(decoder, ropes=()).each(kind)


def _linear_fields(fields: JsonFields) -> JsonFields:
    """Return the fields of linear attention: an object of their own in the published checkpoints."""
    given = fields.get("linear_attn_config")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    whole = {ours: fields.get(theirs) for ours, theirs in names.items()}
    return JsonFields(
        {**whole, **(given if isinstance(given, Mapping) else {})}, f"{fields.source}: linear_attn_config"
    )


_OTHER_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return what files say in other words; their layers of both kinds have the same number of heads."""
    return {
        **own_keys(latent_from_gguf(found), _OTHER_KEYS),
        "layer_types": kinds_by_kv_heads(found, "linear_attention"),
        "linear_num_heads": found["num_attention_heads"],
        "model_max_length": found["max_position_embeddings"],
    }


KIMI_LINEAR = ModelFamily(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 32,
        "model_max_length": 1048576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "num_experts_per_token": 8,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    other_keys=_OTHER_KEYS,
    renamed={".mlp.": ".block_sparse_moe."},
    names=TensorNames(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.gate.e_score_correction_bias",
        expert="block_sparse_moe.experts.{expert}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
        shared_gate="block_sparse_moe.shared_experts.gate_proj",
        shared_up="block_sparse_moe.shared_experts.up_proj",
        shared_down="block_sparse_moe.shared_experts.down_proj",
        recurrent={
            "inputs": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "f_a", "g_a", "b")),
            "conv": tuple(f"self_attn.{name}_conv1d" for name in ("q", "k", "v")),
            "decay": ("self_attn.A_log",),
            "step_bias": ("self_attn.dt_bias",),
            "steps": ("self_attn.f_b_proj",),
            "gates": ("self_attn.g_b_proj",),
            "norm": ("self_attn.o_norm",),
            "output": ("self_attn.o_proj",),
        },
    ),
    gguf=GgufNames(
        architecture="kimi-linear",
        keys={
            **own_keys(LATENT_KEYS, _OTHER_KEYS),
            "listed_kv_heads": "attention.head_count_kv",
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        complete=_from_gguf,
        recurrent={
            **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in ("q", "k", "v")},
            "ssm_f_a": "self_attn.f_a_proj",
            "ssm_f_b": "self_attn.f_b_proj",
            "ssm_g_a": "self_attn.g_a_proj",
            "ssm_g_b": "self_attn.g_b_proj",
            "ssm_beta": "self_attn.b_proj",
            "ssm_a": "self_attn.A_log",
            "ssm_dt": "self_attn.dt_bias",
            "ssm_norm": "self_attn.o_norm",
        },
    ),
)
