"""Seed-OSS: Llama with biases of queries, keys and values."""

from moonpool.base.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    bias = fields.flag("attention_out_bias", False)
    return llama_decoder(fields).each(lambda _, layer: layer.with_attention(output_bias=bias))


SEED_OSS = ModelFamily(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288,
    },
    gguf=GgufNames(architecture="seed_oss", renamed={"post_attention_norm": "feed_forward_norm"}),
)  # fmt: skip
