"""Helium: Llama with a RoPE that turns neighbouring elements."""

from dataclasses import replace

from moonpool.base.families.base import ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    norm = replace(decoder.final_norm, wide=True)
    decoder = replace(decoder, final_norm=norm, ropes=(replace(decoder.ropes[0], paired=True),))
    return decoder.each(lambda _, layer: replace(layer, norm=norm).with_attention(output_bias=False))


HELIUM = ModelFamily(
    architecture="HeliumForCausalLM",
    model_type="helium",
    decoder=_decoder,
    defaults={
        "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0, "max_position_embeddings": 4096,
    },
)  # fmt: skip
