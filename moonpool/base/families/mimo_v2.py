"""MiMo V2 Flash: windows with sinks and more heads of keys in most layers; values narrower than keys; experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, shared_experts
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, LayerSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    fields = _common(fields)
    decoder = llama_decoder(fields, rope_kind="full_attention")
    layers, size = len(decoder.layers), decoder.layers[0].attention.head_dim
    default = ["sliding_attention" if index and (index + 1) % 6 else "full_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default)
    networks = layer_kinds(
        fields,
        layers,
        ["sparse" if index else "dense" for index in range(layers)],
        ("dense", "sparse"),
        "mlp_layer_types",
    )
    experts = replace(shared_experts(fields), shared_inner=0)
    heads = fields.positive("num_key_value_heads")
    values, factor = fields.positive("v_head_dim", size), fields.get("attention_value_scale")

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        local = kinds[index] == "sliding_attention"
        layer = layer.with_attention(
            num_kv_heads=fields.positive("swa_num_key_value_heads", 2 * heads) if local else heads,
            rope=1 if local else 0,
            sinks=fields.flag("add_swa_attention_sink_bias" if local else "add_full_attention_sink_bias", local),
            output_bias=False,
            value_width=values if values < size else 0,
            value_factor=0.0 if factor is None else fields.number("attention_value_scale"),
        )
        return layer.with_feed_forward(experts=experts if networks[index] == "sparse" else None, bias=False)

    decoder = replace(decoder, ropes=(decoder.ropes[0], read_rope(fields, size, kind="sliding_attention")))
    return windowed(fields, decoder.each(kind), kinds)


def _common(fields: JsonFields) -> JsonFields:
    """Return config.json in transformers' words; the published one has words of its own for layers and RoPE."""
    given = dict(fields.all())
    if isinstance(pattern := given.get("hybrid_layer_pattern"), list):
        given.setdefault("layer_types", ["sliding_attention" if local else "full_attention" for local in pattern])
    if isinstance(marks := given.get("moe_layer_freq"), list):
        given.setdefault("mlp_layer_types", ["sparse" if mark else "dense" for mark in marks])
    if given.get("sliding_window_size") is not None:  # counts the tokens before the query
        given["sliding_window"] = fields.positive("sliding_window_size") + 1
    if given.get("routed_scaling_factor") is None:
        given["routed_scaling_factor"] = 1.0
    if "rope_theta" in given:
        share, local = given.get("partial_rotary_factor", 0.334), given.get("swa_rope_theta", 10000.0)
        given["rope_parameters"] = {
            name: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
            for name, theta in (("full_attention", given["rope_theta"]), ("sliding_attention", local))
        }
    return JsonFields(given, fields.source)


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the heads of keys of each kind of layers."""
    pattern, heads = found.get("hybrid_layer_pattern"), found.get("listed_kv_heads")
    if not isinstance(pattern, list) or not isinstance(heads, list):
        return {}
    each = {bool(local): count for local, count in zip(pattern, heads, strict=False)}
    both = max(heads)
    return {"num_key_value_heads": each.get(False, both), "swa_num_key_value_heads": each.get(True, both)}


MIMO_V2_FLASH = ModelFamily(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
    },
    names=TensorNames(sinks="self_attn.attention_sink_bias"),
    gguf=GgufNames(
        architecture="mimo2",
        keys={
            **{
                ours: SHARED_EXPERT_KEYS[ours]
                for ours in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
            },
            "attention_value_scale": "attention.value_scale",
            "hybrid_layer_pattern": "attention.sliding_window_pattern",
            "listed_kv_heads": "attention.head_count_kv",
            "n_group": "expert_group_count",
            "sliding_window_size": "attention.sliding_window",
            "swa_rope_theta": "rope.freq_base_swa",
            "topk_group": "expert_group_used_count",
            "v_head_dim": "attention.value_length",
        },
        complete=_from_gguf,
        further_layers="nextn_predict_layers",
    ),
)
