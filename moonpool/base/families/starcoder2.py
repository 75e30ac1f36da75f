"""StarCoder2: layer norms and biases everywhere, a feed-forward part without gates."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    norm, bias = NormSpec("layer", fields.number("norm_epsilon"), bias=True), fields.flag("use_bias", True)
    decoder = replace(llama_decoder(fields), final_norm=norm).each(
        lambda _, layer: (
            replace(layer, norm=norm)
            .with_attention(qkv_bias=bias, output_bias=bias)
            .with_feed_forward(gated=False, bias=bias)
        )
    )
    layers = len(decoder.layers)
    return windowed(fields, decoder, layer_kinds(fields, layers, ["sliding_attention"] * layers))


STARCODER2 = ModelFamily(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    names=TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    gguf=GgufNames(architecture="starcoder2", complete=lambda _: {"sliding_window": None}),
)
