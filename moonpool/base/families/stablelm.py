"""StableLM 2: Llama with layer norms and partly rotated heads."""

from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    if fields.flag("qk_layernorm", False):
        raise UnsupportedModel("qk_layernorm", "a norm for each head is not supported for StableLM")
    norm, bias = NormSpec("layer", fields.number("layer_norm_eps"), bias=True), fields.flag("use_qkv_bias", False)
    parallel = fields.flag("use_parallel_residual", False)
    return replace(llama_decoder(fields), final_norm=norm).each(
        lambda _, layer: replace(layer, norm=norm, parallel=parallel, feed_forward_norm=not parallel).with_attention(
            qkv_bias=bias, output_bias=False
        )
    )


STABLELM = ModelFamily(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
    },
    gguf=GgufNames(architecture="stablelm"),
)
