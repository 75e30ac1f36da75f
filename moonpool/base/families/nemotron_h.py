"""Nemotron-H, Nemotron 2 and 3: Mamba-2, attention without positions, networks and experts of squared ReLU.

Each layer of a checkpoint is one of these behind a norm. Here a layer has a part over tokens and the network behind, if
there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, activation, llama_decoder, own_keys
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.granite import MAMBA_KEYS, refuse_step_limits
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, RecurrentSpec

_PATTERN = "hybrid_override_pattern"
_KINDS = {
    "M": "mamba", "mamba": "mamba", "linear_attention": "mamba", "*": "attention", "attention": "attention",
    "full_attention": "attention", "-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip

_MAMBA_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
}


def _decoder(fields: JsonFields) -> DecoderSpec:
    refuse_step_limits(fields)
    kinds = _kinds(fields)
    plain = llama_decoder(JsonFields({**fields.all(), "num_hidden_layers": len(kinds)}, fields.source))
    norm = replace(plain.final_norm, wide=True)
    act, network = activation(fields, "mlp_hidden_act"), plain.layers[0].feed_forward
    mamba = RecurrentSpec(
        "mamba2",
        fields.positive("conv_kernel"),
        heads=fields.positive("mamba_num_heads"),
        key_heads=fields.positive("n_groups"),
        key_dim=fields.positive("ssm_state_size"),
        value_dim=fields.positive("mamba_head_dim"),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        norm_eps=norm.eps,
        gate_first=True,
    )
    base = replace(plain.layers[0], norm=norm, feed_forward_norm=False).with_attention(rope=None)
    base = base.with_feed_forward(inner=0)
    network = replace(network, activation=act, gated=False)
    layers: list[LayerSpec] = []
    for index, kind in enumerate(kinds):
        if kind in ("mamba", "attention"):
            layers.append(replace(base, recurrent=mamba if kind == "mamba" else None, stored_at=(index, index)))
            continue
        if not layers or layers[-1].feed_forward.inner:
            raise UnsupportedModel(_PATTERN, f"layer {index} is a network without attention or Mamba before")
        found = replace(network, experts=_experts(fields)) if kind == "moe" else network
        at = layers[-1].stored_at
        assert at is not None
        layers[-1] = replace(layers[-1], feed_forward=found, feed_forward_norm=True, stored_at=(at[0], index))
    return DecoderSpec(tuple(layers), (), norm)


def _experts(fields: JsonFields) -> ExpertsSpec:
    return ExpertsSpec(
        fields.positive("n_routed_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("moe_intermediate_size"),
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        least_sum=1e-20,
        factor=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.positive("n_group", 1),
        groups_chosen=fields.positive("topk_group", 1),
        shared_inner=fields.positive("moe_shared_expert_intermediate_size"),
        latent_width=0 if fields.get("moe_latent_size") is None else fields.positive("moe_latent_size"),
    )


def _kinds(fields: JsonFields) -> Sequence[str]:
    """Return the kinds of the checkpoint's layers, from either spelling."""
    given = fields.get(_PATTERN)
    given = fields.get("layers_block_type") if given is None else given
    if not isinstance(given, str | list) or not given:
        raise CheckpointError(f"{fields.source}: {_PATTERN} must name the layers' kinds, not {given!r}")
    for kind in given:
        if kind not in _KINDS:
            raise UnsupportedModel(_PATTERN, f"{kind!r} is none of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in given]


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of layers: those with heads of keys attend, those with a width are networks."""
    layers, heads, inner = found["num_hidden_layers"], found.get("listed_kv_heads"), found.get("listed_inner")
    if not isinstance(heads, list) or not isinstance(inner, list):
        raise CheckpointError("a GGUF file of Nemotron-H must list heads of keys and widths of networks")
    network = "moe" if found.get("n_routed_experts") else "mlp"
    kinds = ["attention" if kv else network if width else "mamba" for kv, width in zip(heads, inner, strict=True)]
    width = max(inner[:layers])
    return {
        "layers_block_type": kinds[:layers],
        "intermediate_size": width,
        "moe_intermediate_size": found.get("moe_intermediate_size", width),
        "mamba_head_dim": found.get("inner", 0) // max(1, found.get("mamba_num_heads", 1)),
        "moe_shared_expert_intermediate_size": found.get("moe_shared_expert_intermediate_size", width),
    }


NEMOTRON_H = ModelFamily(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    other_keys={"rms_norm_eps": "layer_norm_epsilon"},
    renamed={"backbone.": "model."},
    names=TensorNames(
        embedding="backbone.embeddings.weight",
        norm="backbone.norm_f",
        layer="backbone.layers.{index}.",
        attention_norm="norm",
        feed_forward_norm="norm",
        q="mixer.q_proj",
        k="mixer.k_proj",
        v="mixer.v_proj",
        output="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        router="mixer.gate",
        correction="mixer.gate.e_score_correction_bias",
        expert="mixer.experts.{expert}.",
        shared_up="mixer.shared_experts.up_proj",
        shared_down="mixer.shared_experts.down_proj",
        to_experts="mixer.fc1_latent_proj",
        from_experts="mixer.fc2_latent_proj",
        recurrent={
            "inputs": ("mixer.in_proj",),
            "conv": ("mixer.conv1d",),
            "decay": ("mixer.A_log",),
            "step_bias": ("mixer.dt_bias",),
            "skip": ("mixer.D",),
            "norm": ("mixer.norm",),
            "output": ("mixer.out_proj",),
        },
    ),
    gguf=GgufNames(
        architecture="nemotron_h_moe",
        other_architectures=("nemotron_h",),
        further_layers="nextn_predict_layers",
        keys={
            **{ours: key for ours, key in SHARED_EXPERT_KEYS.items() if ours != "n_shared_experts"},
            **own_keys(MAMBA_KEYS, _MAMBA_NAMES),
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
            "listed_kv_heads": "attention.head_count_kv",
            "listed_inner": "feed_forward_length",
        },
        complete=_from_gguf,
        renamed={"ffn_latent_down": "to_experts", "ffn_latent_up": "from_experts"},
        recurrent={
            "ssm_in": "mixer.in_proj",
            "ssm_conv1d": "mixer.conv1d",
            "ssm_a": "mixer.A_log",
            "ssm_dt": "mixer.dt_bias",
            "ssm_d": "mixer.D",
            "ssm_norm": "mixer.norm",
            "ssm_out": "mixer.out_proj",
        },
    ),
)
