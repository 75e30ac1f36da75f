"""Granite: dense, with experts, windows or Mamba-2 layers; factors of embeddings, residual sums, attention, logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    kinds_by_kv_heads,
    layer_kinds,
    llama_decoder,
    windowed,
)
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, RecurrentSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    residual, scale = fields.number("residual_multiplier", 1.0), fields.number("attention_multiplier", 1.0)
    decoder = replace(
        llama_decoder(fields),
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        logits_factor=1.0 / fields.number("logits_scaling", 1.0),
    )
    return decoder.each(lambda _, layer: replace(layer, residual_factor=residual).with_attention(scale=scale))


def _post_norm_decoder(fields: JsonFields) -> DecoderSpec:
    """HyperCLOVA X: `logits_scaling` multiplies, and a norm stands behind each part, too."""
    decoder, normed = _decoder(fields), fields.flag("use_post_norm", True)
    size = decoder.layers[0].attention.head_dim
    scale = fields.number("attention_multiplier", size**-0.5)
    return replace(decoder, logits_factor=fields.number("logits_scaling", 1.0)).each(
        lambda _, layer: replace(
            layer.with_attention(scale=scale), attention_out_norm=normed, feed_forward_out_norm=normed
        )
    )


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "softmax_chosen",
        shared_inner=int(fields.number("shared_intermediate_size", 0)),
    )
    return _decoder(fields).each(lambda _, layer: layer.with_feed_forward(experts=experts))


def _windows(fields: JsonFields, decoder: DecoderSpec) -> DecoderSpec:
    """Windows in three of four layers, sinks in all, and each layer's own base of RoPE, of which 0 stands for none."""
    layers, rope = len(decoder.layers), decoder.ropes[0]
    pattern = ["sliding_attention" if index % 4 else "full_attention" for index in range(layers)]
    bases = fields.get("layer_rope_theta") or [rope.theta] * layers
    if not isinstance(bases, list) or len(bases) != layers:
        raise CheckpointError(f"{fields.source}: layer_rope_theta must be a list of {layers} numbers, not {bases!r}")
    if rope.scaling is not None and set(bases) != {rope.theta}:
        raise UnsupportedModel("layer_rope_theta", "bases of layers beside a scaled RoPE are not supported")
    thetas = sorted(set(bases) - {0})
    decoder = replace(decoder, ropes=tuple(replace(rope, theta=float(theta)) for theta in thetas)).each(
        lambda index, layer: layer.with_attention(sinks=True, rope=thetas.index(bases[index]) if bases[index] else None)
    )
    return windowed(fields, decoder, layer_kinds(fields, layers, pattern))


def refuse_step_limits(fields: JsonFields) -> None:
    """Refuse bounds of Mamba's steps that bound anything."""
    given = fields.get("time_step_limit")
    infinite = (float("inf"), {"__float__": "Infinity"}, "Infinity")
    if given is not None and not (
        isinstance(given, list) and len(given) == 2 and given[0] == 0 and given[1] in infinite
    ):
        raise UnsupportedModel("time_step_limit", "bounds of Mamba's steps are not supported")


def _hybrid_decoder(fields: JsonFields) -> DecoderSpec:
    refuse_step_limits(fields)
    decoder, shared = _decoder(fields), fields.positive("shared_intermediate_size")
    experts = None
    if fields.get("num_local_experts"):
        experts = ExpertsSpec(
            fields.positive("num_local_experts"),
            fields.positive("num_experts_per_tok"),
            fields.positive("intermediate_size"),
            "softmax_chosen",
            shared_inner=shared,
        )
    heads, hidden = fields.positive("mamba_n_heads"), fields.positive("hidden_size")
    mamba = RecurrentSpec(
        "mamba2",
        fields.positive("mamba_d_conv"),
        heads=heads,
        key_heads=fields.positive("mamba_n_groups"),
        key_dim=fields.positive("mamba_d_state"),
        value_dim=fields.positive("mamba_expand") * hidden // heads,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        norm_eps=decoder.final_norm.eps,
        gate_first=True,
    )
    layers, rope = len(decoder.layers), 0 if fields.get("position_embedding_type") == "rope" else None
    recurrent = ("mamba", "linear_attention")
    kinds = layer_kinds(fields, layers, recurrent[:1] * layers, ("attention", "full_attention", *recurrent))

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = layer.with_attention(rope=rope).with_feed_forward(inner=shared, experts=experts)
        return replace(layer, recurrent=mamba) if kinds[index] in recurrent else layer

    return decoder.each(kind)


_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
}
_EXPERT_KEYS = {
    **_KEYS,
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
MAMBA_KEYS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "inner": "ssm.inner_size",
}


def _hybrid_from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return what files say in other words. Without rotary embeddings they say that RoPE was not tuned."""
    return {
        "layer_types": kinds_by_kv_heads(found, "mamba"),
        "position_embedding_type": "rope" if found.get("rotated", True) else "nope",
        "mamba_expand": found.get("inner", 0) // found["hidden_size"],
        "num_local_experts": found.get("num_local_experts", 0),
        "shared_intermediate_size": found.get("shared_intermediate_size", found["intermediate_size"]),
    }


GRANITE = ModelFamily(
    architecture="GraniteForCausalLM",
    model_type="granite",
    decoder=_decoder,
    defaults={"max_position_embeddings": 2048},
    gguf=GgufNames(architecture="granite", paired_rows=True, keys=_KEYS),
)
HYPERCLOVAX = ModelFamily(
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    decoder=_post_norm_decoder,
    defaults={"max_position_embeddings": 2048},
    names=TensorNames(attention_out_norm="post_norm1", feed_forward_out_norm="post_norm2"),
)
GRANITE_MOE = ModelFamily(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    decoder=_moe_decoder,
    defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    names=TensorNames(
        router="block_sparse_moe.router.layer",
        experts_gate_up="block_sparse_moe.input_linear.weight",
        experts_down="block_sparse_moe.output_linear.weight",
    ),
    gguf=GgufNames(architecture="granitemoe", paired_rows=True, keys=_EXPERT_KEYS),
)
GRANITE_MOE_SHARED = ModelFamily(
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    decoder=_moe_decoder,
    defaults=GRANITE_MOE.defaults,
    names=replace(GRANITE_MOE.names, shared_gate_up="shared_mlp.input_linear", shared_down="shared_mlp.output_linear"),
)
GRANITE_SWA = ModelFamily(
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    decoder=lambda fields: _windows(fields, _decoder(fields)),
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "sliding_window": 128,
    },
)
GRANITE_MOE_SWA = ModelFamily(
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    decoder=lambda fields: _windows(fields, _moe_decoder(fields)),
    defaults={**GRANITE_MOE.defaults, "sliding_window": 128},
    names=replace(
        GRANITE_MOE_SHARED.names,
        router="block_sparse_moe.router",
        experts_gate_up="block_sparse_moe.experts.gate_up_proj",
        experts_down="block_sparse_moe.experts.down_proj",
    ),
)
GRANITE_HYBRID = ModelFamily(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    decoder=_hybrid_decoder,
    defaults={
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    other_keys={"layer_types": "layers_block_type"},
    names=replace(
        GRANITE_MOE_SHARED.names,
        gate_up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        recurrent={
            "inputs": ("mamba.in_proj",),
            "conv": ("mamba.conv1d",),
            "decay": ("mamba.A_log",),
            "step_bias": ("mamba.dt_bias",),
            "skip": ("mamba.D",),
            "norm": ("mamba.norm",),
            "output": ("mamba.out_proj",),
        },
    ),
    gguf=GgufNames(
        architecture="granitehybrid",
        paired_rows=True,
        keys={
            **_EXPERT_KEYS,
            **MAMBA_KEYS,
            "listed_kv_heads": "attention.head_count_kv",
            "rotated": "rope.scaling.finetuned",
        },
        complete=_hybrid_from_gguf,
        recurrent={
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_a": "mamba.A_log",
            "ssm_dt": "mamba.dt_bias",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
    ),
)
