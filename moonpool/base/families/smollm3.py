"""SmolLM3: every fourth layer has no position embeddings."""

from moonpool.base.families.base import GgufNames, ModelFamily, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    layers, every = len(decoder.layers), fields.positive("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers") or [int((index + 1) % every != 0) for index in range(layers)]
    decoder = decoder.each(lambda index, layer: layer.with_attention(rope=0 if rotated[index] else None))
    if not fields.flag("use_sliding_window", False):
        return decoder
    pattern = ["full_attention" if rotated[index] else "sliding_attention" for index in range(layers)]
    return windowed(fields, decoder, layer_kinds(fields, layers, pattern))


SMOLLM3 = ModelFamily(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
    },
    gguf=GgufNames(architecture="smollm3", paired_rows=True),
)  # fmt: skip
