"""EXAONE 4: norms behind both parts, windows with RoPE in three of four layers."""

from dataclasses import replace

from moonpool.families.base import GgufNames, ModelFamily, layer_kinds, llama_decoder, windowed
from moonpool.families.fields import JsonFields
from moonpool.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: replace(
            layer,
            attention_norm=False,
            feed_forward_norm=False,
            attention_out_norm=True,
            feed_forward_out_norm=True,
        ).with_attention(qk_norm=layer.norm, qkv_bias=False, output_bias=False)
    )
    if fields.get("sliding_window") is None:
        return decoder
    layers = len(decoder.layers)
    pattern = fields.get("sliding_window_pattern")
    every = pattern if isinstance(pattern, int) else 4
    default = [
        "sliding_attention" if (index + 1) % every and index < layers - 1 else "full_attention"
        for index in range(layers)
    ]
    kinds = layer_kinds(fields, layers, default)
    decoder = decoder.each(
        lambda index, layer: layer.with_attention(rope=0 if kinds[index] == "sliding_attention" else None)
    )
    return windowed(fields, decoder, kinds)


EXAONE4 = ModelFamily(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    decoder=_decoder,
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096},
    gguf=GgufNames(
        architecture="exaone4",
        keys={"sliding_window": "attention.sliding_window"},
        complete=lambda found: {"sliding_window": found.get("sliding_window")},
    ),
)
