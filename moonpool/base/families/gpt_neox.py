"""GPT-NeoX (Pythia): parallel parts with a norm each, projections for queries, keys and values in one tensor."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    norm, bias = NormSpec("layer", fields.number("layer_norm_eps"), bias=True), fields.flag("attention_bias", True)
    parallel = fields.flag("use_parallel_residual", True)
    decoder = llama_decoder(fields)
    size = decoder.layers[0].attention.head_dim
    rope = decoder.ropes[0]
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        rope = replace(
            rope,
            theta=fields.number("rotary_emb_base", rope.theta),
            width=int(size * fields.number("rotary_pct", rope.width / size)),
        )
    return replace(decoder, final_norm=norm, ropes=(rope,)).each(
        lambda _, layer: (
            replace(layer, norm=norm, parallel=parallel)
            .with_attention(num_kv_heads=layer.attention.num_heads, qkv_bias=bias, output_bias=bias)
            .with_feed_forward(gated=False, bias=True)
        )
    )


GPT_NEOX = ModelFamily(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    decoder=_decoder,
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 2048,
    },
    names=TensorNames(
        embedding="gpt_neox.embed_in.weight",
        norm="gpt_neox.final_layer_norm",
        head="embed_out.weight",
        layer="gpt_neox.layers.{index}.",
        qkv="attention.query_key_value",
        qkv_order="grouped",
        output="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    ),
    gguf=GgufNames(architecture="gptneox", keys={"use_parallel_residual": "use_parallel_residual"}),
)
