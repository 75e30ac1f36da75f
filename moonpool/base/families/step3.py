"""Step 3.5: windows in most layers, which have more heads; a gate for each head; experts, and gates with limits.

Source: the text part of Step 3.7 in transformers, which has no class for text alone, and the published config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec

_KINDS = ("full_attention", "sliding_attention")


def _decoder(fields: JsonFields) -> DecoderSpec:
    fields = _common(fields)
    for key, right in (("use_head_wise_attn_gate", True), ("moe_router_activation", "sigmoid")):
        if fields.get(key, right) != right:
            raise UnsupportedModel(key, f"{fields.get(key)!r} is not supported")
    decoder = llama_decoder(fields, rope_kind="full_attention")
    layers, size = len(decoder.layers), decoder.layers[0].attention.head_dim
    kinds = layer_kinds(fields, layers, ["full_attention"] * layers)
    norm = replace(decoder.final_norm, offset=1.0 if fields.flag("zero_centered", True) else 0.0, wide=True)
    experts, sparse = _experts(fields), _sparse(fields, layers)
    limits, shared_limits = (_limits(fields, key, layers) for key in ("swiglu_limits", "swiglu_limits_shared"))
    local_heads = fields.positive("num_sliding_attention_heads", decoder.layers[0].attention.num_heads)

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = replace(layer, norm=norm).with_attention(qk_norm=norm, head_gate=True)
        if kinds[index] == "sliding_attention":
            layer = layer.with_attention(num_heads=local_heads, rope=1)
        if index not in sparse:
            return layer.with_feed_forward(bias=False, silu_limit=shared_limits[index])
        chosen = replace(experts, shared_silu_limit=shared_limits[index])
        return layer.with_feed_forward(bias=False, experts=chosen, silu_limit=limits[index])

    ropes = (decoder.ropes[0], read_rope(fields, size, kind="sliding_attention"))
    return windowed(fields, replace(decoder, ropes=ropes, final_norm=norm).each(kind), kinds)


def _experts(fields: JsonFields) -> ExpertsSpec:
    return ExpertsSpec(
        fields.positive("moe_num_experts"),
        fields.positive("moe_top_k"),
        fields.positive("moe_intermediate_size"),
        "sigmoid",
        normalised=fields.flag("norm_expert_weight", True),
        factor=fields.number("moe_router_scaling_factor", 1.0),
        correction=True,
        shared_inner=fields.positive("share_expert_dim"),
    )


def _sparse(fields: JsonFields, layers: int) -> frozenset[int]:
    """Return the layers with experts."""
    listed = fields.get("moe_layers_enum")
    if listed is None:
        return frozenset(range(3, layers))
    items = listed.split(",") if isinstance(listed, str) else listed
    try:
        return frozenset(int(item) for item in items)
    except (TypeError, ValueError):
        raise CheckpointError(f"{fields.source}: moe_layers_enum must list layers, not {listed!r}") from None


def _limits(fields: JsonFields, key: str, layers: int) -> list[float]:
    """Return a limit for each layer; 0: none."""
    given = fields.get(key) or [0.0] * layers
    if not isinstance(given, list) or len(given) < layers:
        raise CheckpointError(f"{fields.source}: {key} must be a list of {layers} numbers, not {given!r}")
    return [JsonFields({key: value or 0.0}, fields.source).number(key) for value in given[:layers]]


def _common(fields: JsonFields) -> JsonFields:
    """Return config.json with the usual keys; the published one lists RoPE by layer, for drafting layers, too."""
    given = dict(fields.all())
    given["num_key_value_heads"] = fields.positive("num_attention_groups")
    other = given.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise CheckpointError(f"{fields.source}: attention_other_setting must be an object, not {other!r}")
    for key, usual in (("num_attention_groups", given["num_key_value_heads"]), ("head_dim", given.get("head_dim"))):
        if other.get(key, usual) != usual:
            raise UnsupportedModel(f"attention_other_setting.{key}", f"{other[key]!r} is not that of other layers")
    given["num_sliding_attention_heads"] = other.get("num_attention_heads", fields.positive("num_attention_heads"))
    kinds, scaling = given.get("layer_types") or [], given.pop("rope_scaling", None) or {}
    scaled = given.get("yarn_only_types") or ["full_attention"]
    parameters: dict[str, Mapping[str, Any]] = {}
    for kind in _KINDS:
        at = kinds.index(kind) if kind in kinds else 0
        theta, share = (_of_layer(given.get(key), at) for key in ("rope_theta", "partial_rotary_factors"))
        parameters[kind] = {
            "rope_type": "default",
            "rope_theta": 10000.0 if theta is None else theta,
            "partial_rotary_factor": 1.0 if share is None else share,
            **(scaling if kind in scaled else {}),
        }
    return JsonFields({**given, "rope_theta": None, "rope_parameters": parameters}, fields.source)


def _of_layer(given: Any, index: int) -> Any:
    """Return a layer's value of a list, or the value that all layers have."""
    if not isinstance(given, list):
        return given
    return given[index] if index < len(given) else None


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the published config.json's words. Layers without windows rotate half as many elements as files say."""
    pattern, heads = found.get("window_pattern"), found.get("listed_heads")
    kinds = [_KINDS[bool(local)] for local in pattern] if isinstance(pattern, list) else []
    theta, share = found["rope_theta"], found["partial_rotary_factor"]
    local_theta = found.get("swa_rope_theta", theta)
    dense = int(JsonFields(found, "GGUF").number("first_k_dense_replace", 0))
    each = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else {}
    every = found["num_attention_heads"]
    return {
        "num_attention_groups": found["num_key_value_heads"],
        "num_attention_heads": each.get("full_attention", every),
        "attention_other_setting": {"num_attention_heads": each.get("sliding_attention", every)},
        "layer_types": kinds or None,
        "moe_layers_enum": range(dense, found["num_hidden_layers"]),
        "rope_theta": [local_theta if kind == "sliding_attention" else theta for kind in kinds],
        "partial_rotary_factors": [share if kind == "sliding_attention" else share / 2 for kind in kinds],
    }


STEP3P5 = ModelFamily(
    architecture="Step3p5ForCausalLM",
    model_type="step3p5",
    decoder=_decoder,
    defaults={
        "num_attention_groups": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
    },
    names=TensorNames(
        router="moe.gate",
        correction="moe.router_bias",
        expert="moe.experts.{expert}.",
        shared_gate="share_expert.gate_proj",
        shared_up="share_expert.up_proj",
        shared_down="share_expert.down_proj",
    ),
    gguf=GgufNames(
        architecture="step35",
        keys={
            "first_k_dense_replace": "leading_dense_block_count",
            "listed_heads": "attention.head_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_experts": "expert_count",
            "moe_router_scaling_factor": "expert_weights_scale",
            "moe_top_k": "expert_used_count",
            "norm_expert_weight": "expert_weights_norm",
            "share_expert_dim": "expert_shared_feed_forward_length",
            "sliding_window": "attention.sliding_window",
            "swa_rope_theta": "rope.freq_base_swa",
            "swiglu_limits": "swiglu_clamp_exp",
            "swiglu_limits_shared": "swiglu_clamp_shexp",
            "window_pattern": "attention.sliding_window_pattern",
        },
        complete=_from_gguf,
        whole_norms=True,
        renamed={"attn_gate": "head_gate"},
        further_layers="nextn_predict_layers",
    ),
)
