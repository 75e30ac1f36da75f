"""Command R (Cohere 1 and 2): parallel parts behind one layer norm without bias; windows with RoPE in Cohere 2."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    norm = NormSpec("layer", fields.number("layer_norm_eps"))
    decoder = llama_decoder(fields)
    rope = replace(decoder.ropes[0], paired=True)
    normed = norm if fields.flag("use_qk_norm", False) else None
    decoder = replace(decoder, ropes=(rope,), final_norm=norm, logits_factor=fields.number("logit_scale"))
    return decoder.each(
        lambda _, layer: (
            replace(layer, norm=norm, parallel=True, feed_forward_norm=False)
            .with_attention(qk_norm=normed, qk_norm_over="heads")
            .with_feed_forward(bias=False)
        )
    )


def _decoder2(fields: JsonFields) -> DecoderSpec:
    decoder = _decoder(fields)
    layers = len(decoder.layers)
    every = fields.positive("sliding_window_pattern", 4)
    pattern = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, pattern)
    decoder = decoder.each(
        lambda index, layer: layer.with_attention(rope=0 if kinds[index] == "sliding_attention" else None)
    )
    return windowed(fields, decoder, kinds)


COHERE = ModelFamily(
    architecture="CohereForCausalLM",
    model_type="cohere",
    decoder=_decoder,
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    gguf=GgufNames(architecture="command-r", keys={"logit_scale": "logit_scale"}),
)
COHERE2 = ModelFamily(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    decoder=_decoder2,
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    gguf=GgufNames(
        architecture="cohere2", keys={"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"}
    ),
)
