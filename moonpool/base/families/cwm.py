"""CWM (Meta's code world model): Llama with windows in three of four layers, the first of them without."""

from moonpool.base.families.base import ModelFamily, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qkv_bias=False, output_bias=False).with_feed_forward(bias=False)
    )
    layers = len(decoder.layers)
    pattern = ["sliding_attention" if index % 4 else "full_attention" for index in range(layers)]
    return windowed(fields, decoder, layer_kinds(fields, layers, pattern))


CWM = ModelFamily(
    architecture="CwmForCausalLM",
    model_type="cwm",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_theta": 1000000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
)  # fmt: skip
