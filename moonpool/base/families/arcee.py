"""Arcee (AFM): Llama with a squared ReLU and no gates."""

from moonpool.base.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    return llama_decoder(fields).each(lambda _, layer: layer.with_feed_forward(gated=False))


ARCEE = ModelFamily(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    decoder=_decoder,
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    gguf=GgufNames(architecture="arcee", paired_rows=True),
)
