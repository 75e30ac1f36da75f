"""Llama 4 (text): attention in chunks, layers without RoPE whose queries grow, experts beside a shared one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonpool.base.errors import CheckpointError
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, NormSpec, RopeSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    layers, heads = len(decoder.layers), decoder.layers[0].attention
    rotated = _rotated(fields, layers)
    kinds = layer_kinds(
        fields,
        layers,
        ["chunked_attention" if turned else "full_attention" for turned in rotated],
        ("full_attention", "chunked_attention"),
    )
    step = fields.positive("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    inner = fields.positive("intermediate_size")
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        inner,
        "sigmoid",
        weighted_inputs=True,
        shared_inner=inner,
    )
    dense = fields.positive("intermediate_size_mlp")
    norm = NormSpec(eps=decoder.final_norm.eps, weighted=False) if fields.flag("use_qk_norm", True) else None
    chunk = None if fields.get("attention_chunk_size") is None else fields.positive("attention_chunk_size")
    if chunk is not None and chunk >= fields.positive("max_position_embeddings"):
        chunk = None
    grown = (fields.number("attn_scale", 0.1), fields.positive("floor_scale", 8192))
    upright = RopeSpec(0.0, 0, length_from=1)
    if fields.flag("attn_temperature_tuning", True):
        upright = replace(upright, by_length=grown)

    def layer(index: int, spec: LayerSpec) -> LayerSpec:
        spec = spec.with_attention(
            rope=0 if rotated[index] else 1,
            window=chunk if kinds[index] == "chunked_attention" else None,
            chunked=chunk is not None and kinds[index] == "chunked_attention",
            qk_norm=norm if rotated[index] else None,
            qk_norm_last=norm is not None and rotated[index],
        )
        spec = spec.with_feed_forward(bias=False)
        return spec.with_feed_forward(experts=experts) if index in sparse else spec.with_feed_forward(inner=dense)

    turned = replace(decoder.ropes[0], paired=True)
    assert turned.width == heads.head_dim
    return replace(decoder, ropes=(turned, upright)).each(layer)


def _rotated(fields: JsonFields, layers: int) -> Sequence[bool]:
    """Return which layers have RoPE; `no_rope_layers` marks these with 1, whatever its name says."""
    marks = fields.get("no_rope_layers")
    if not marks:
        every = fields.positive("no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers:
        raise CheckpointError(f"{fields.source}: no_rope_layers must be a list of {layers} numbers, not {marks!r}")
    return [bool(mark) for mark in marks]


def _from_gguf(found: dict[str, Any]) -> dict[str, Any]:
    """Files name neither the dense width so nor the norm of queries and keys, which only 128 experts do without."""
    return {
        "intermediate_size_mlp": found["intermediate_size"],
        "intermediate_size": found.get("inner", found["intermediate_size"]),
        "use_qk_norm": found.get("num_local_experts") != 128,
    }


LLAMA4 = ModelFamily(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    },
    names=TensorNames(
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts_gate_up="feed_forward.experts.gate_up_proj",
        experts_down="feed_forward.experts.down_proj",
        experts_inputs_first=True,
        shared_gate="feed_forward.shared_expert.gate_proj",
        shared_up="feed_forward.shared_expert.up_proj",
        shared_down="feed_forward.shared_expert.down_proj",
    ),
    gguf=GgufNames(
        architecture="llama4",
        keys={
            "inner": "expert_feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        complete=_from_gguf,
    ),
)
