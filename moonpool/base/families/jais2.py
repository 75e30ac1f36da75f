"""Jais 2: Llama with layer norms, biases, and squared ReLU without gates."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    norm = NormSpec("layer", fields.number("layer_norm_eps"), bias=True)
    return replace(llama_decoder(fields), final_norm=norm).each(
        lambda _, layer: replace(layer, norm=norm).with_feed_forward(gated=False)
    )


JAIS2 = ModelFamily(
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    decoder=_decoder,
    defaults={
        "hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True,
        "max_position_embeddings": 8192,
    },
    gguf=GgufNames(architecture="jais2"),
)  # fmt: skip
