"""OPT: learnt positions after two unused rows, layer norms, ReLU without gates."""

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import ModelFamily, TensorNames, activation
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    for key, built in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("word_embed_proj_dim", hidden),
    ):
        if fields.get(key, built) not in (None, built):
            raise UnsupportedModel(key, f"only {built} is supported for OPT")
    size, norm, bias = hidden // heads, NormSpec("layer", 1e-5, bias=True), fields.flag("enable_bias", True)
    layer = LayerSpec(
        AttentionSpec(heads, heads, size, size**-0.5, rope=None, qkv_bias=bias, output_bias=bias),
        FeedForwardSpec(fields.positive("ffn_dim"), activation(fields, "activation_function"), gated=False, bias=bias),
        norm,
    )
    return DecoderSpec(
        (layer,) * fields.positive("num_hidden_layers"),
        (),
        norm,
        learnt_positions=fields.positive("max_position_embeddings") + 2,
        positions_from=2,
    )


OPT = ModelFamily(
    architecture="OPTForCausalLM",
    model_type="opt",
    decoder=_decoder,
    defaults={
        "ffn_dim": 3072, "activation_function": "relu", "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    names=TensorNames(
        embedding="model.decoder.embed_tokens.weight",
        positions="model.decoder.embed_positions.weight",
        norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{index}.",
        attention_norm="self_attn_layer_norm",
        output="self_attn.out_proj",
        feed_forward_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    ),
)  # fmt: skip
