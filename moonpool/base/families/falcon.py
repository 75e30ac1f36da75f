"""Falcon: parallel parts, queries, keys and values in one tensor, a feed-forward part without gates."""

from collections.abc import Mapping
from typing import Any

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, activation
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    if fields.flag("alibi", False):
        raise UnsupportedModel("alibi", "attention with linear biases is not supported")
    hidden, heads, bias = (
        fields.positive("hidden_size"),
        fields.positive("num_attention_heads"),
        fields.flag("bias", False),
    )
    new, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    kv_heads = heads
    if new:
        kv_heads = fields.positive("num_kv_heads", heads)
    elif fields.flag("multi_query", True):
        kv_heads = 1
    size, norm = hidden // heads, NormSpec("layer", fields.number("layer_norm_epsilon"), bias=True)
    both = new and fields.positive("num_ln_in_parallel_attn", 2) == 2
    layer = LayerSpec(
        AttentionSpec(heads, kv_heads, size, size**-0.5, qkv_bias=bias, output_bias=bias),
        FeedForwardSpec(
            fields.positive("ffn_hidden_size", 4 * hidden), activation(fields, "activation"), gated=False, bias=bias
        ),
        norm,
        parallel=parallel or new,
        feed_forward_norm=both or not (parallel or new),
    )
    return DecoderSpec((layer,) * fields.positive("num_hidden_layers"), (read_rope(fields, size),), norm)


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the keys of config.json: files with several KV heads are of the new architecture."""
    heads = found["num_key_value_heads"]
    return {"num_kv_heads": heads, "new_decoder_architecture": heads > 1}


_NAMES = TensorNames(
    embedding="transformer.word_embeddings.weight",
    norm="transformer.ln_f",
    layer="transformer.h.{index}.",
    qkv="self_attention.query_key_value",
    qkv_order="grouped",
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
FALCON = ModelFamily(
    architecture="FalconForCausalLM",
    model_type="falcon",
    decoder=_decoder,
    defaults={
        "activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    names=_NAMES,
    renamed={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
    gguf=GgufNames(
        architecture="falcon", keys={"ffn_hidden_size": "feed_forward_length"}, complete=_from_gguf
    ),
)  # fmt: skip
