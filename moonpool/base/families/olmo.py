"""OLMo 1 to 3 and OLMoE."""

from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, NormSpec


def _refuse_clip(fields: JsonFields) -> None:
    if fields.get("clip_qkv") is not None:
        raise UnsupportedModel("clip_qkv", "clipped projections are not supported")


def _decoder(fields: JsonFields) -> DecoderSpec:
    """OLMo 1: layer norms without weights."""
    _refuse_clip(fields)
    norm = NormSpec("layer", 1e-5, weighted=False)
    return replace(llama_decoder(fields), final_norm=norm).each(lambda _, layer: replace(layer, norm=norm))


def _decoder2(fields: JsonFields) -> DecoderSpec:
    """OLMo 2: norms behind both parts, and of queries and keys as a whole."""
    decoder = llama_decoder(fields, rope_kind="full_attention")
    norm = replace(decoder.final_norm, wide=True)
    return replace(decoder, final_norm=norm).each(
        lambda _, layer: replace(
            layer,
            norm=norm,
            attention_norm=False,
            feed_forward_norm=False,
            attention_out_norm=True,
            feed_forward_out_norm=True,
        ).with_attention(qk_norm=norm, qk_norm_over="all")
    )


def _decoder3(fields: JsonFields) -> DecoderSpec:
    """OLMo 3: windows in three of four layers, with an unscaled RoPE."""
    decoder = _decoder2(fields)
    layers, size = len(decoder.layers), decoder.layers[0].attention.head_dim
    pattern = ["sliding_attention" if (index + 1) % 4 else "full_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, pattern)
    local = read_rope(fields, size, kind="sliding_attention")
    nested = isinstance((fields.get("rope_parameters") or {}).get("sliding_attention"), dict)
    if fields.get("rope_scaling") or not nested:
        local = replace(local, scaling=None, magnitude=1.0)
    decoder = replace(decoder, ropes=(decoder.ropes[0], local)).each(
        lambda index, layer: layer.with_attention(rope=1 if kinds[index] == "sliding_attention" else 0)
    )
    return windowed(fields, decoder, kinds)


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    _refuse_clip(fields)
    experts = ExpertsSpec(
        fields.positive("num_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "softmax",
        normalised=fields.flag("norm_topk_prob", False),
    )
    return llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qk_norm=layer.norm, qk_norm_over="all").with_feed_forward(experts=experts)
    )


OLMO = ModelFamily(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    decoder=_decoder,
    defaults={"max_position_embeddings": 2048},
    gguf=GgufNames(architecture="olmo", paired_rows=True),
)
OLMO2 = ModelFamily(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    decoder=_decoder2,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    gguf=GgufNames(architecture="olmo2"),
)
OLMO3 = ModelFamily(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    decoder=_decoder3,
    defaults={
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096,
    },
)  # fmt: skip
OLMOE = ModelFamily(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    decoder=_moe_decoder,
    defaults={
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
    },
    names=TensorNames(router="mlp.gate"),
    gguf=GgufNames(
        architecture="olmoe", keys={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    ),
)  # fmt: skip
