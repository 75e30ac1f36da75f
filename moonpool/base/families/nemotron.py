"""Nemotron (Minitron): layer norms with 1 + weight, squared ReLU without gates, partly rotated heads."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    norm = NormSpec("layer", fields.number("norm_eps"), offset=1.0, bias=True)
    return replace(llama_decoder(fields), final_norm=norm).each(
        lambda _, layer: replace(layer, norm=norm).with_feed_forward(gated=False)
    )


NEMOTRON = ModelFamily(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    decoder=_decoder,
    defaults={
        "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096,
    },
    gguf=GgufNames(architecture="nemotron", whole_norms=True),
)  # fmt: skip
