"""GPT-2: learnt positions, layer norms, weights stored with their inputs first. GPT BigCode: one KV head."""

from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, activation
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(key, False):
            raise UnsupportedModel(key, "is not supported")
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    size, norm = hidden // heads, NormSpec("layer", fields.number("layer_norm_epsilon"), bias=True)
    scale = size**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    layer = LayerSpec(
        AttentionSpec(heads, heads, size, scale, rope=None, qkv_bias=True, output_bias=True),
        FeedForwardSpec(
            fields.positive("n_inner", 4 * hidden, null=4 * hidden),
            activation(fields, "activation_function"),
            gated=False,
            bias=True,
        ),
        norm,
    )
    positions = fields.positive("max_position_embeddings")
    return DecoderSpec((layer,) * fields.positive("num_hidden_layers"), (), norm, learnt_positions=positions)


def _one_kv_head(fields: JsonFields) -> DecoderSpec:
    if not fields.flag("multi_query", True):
        raise UnsupportedModel("multi_query", "only one head of keys and values is supported")
    return _decoder(fields).each(lambda _, layer: layer.with_attention(num_kv_heads=1))


_KEYS = {"n_positions": "context_length", "n_inner": "feed_forward_length"}
GPT2 = ModelFamily(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    decoder=_decoder,
    defaults={
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024,
        "tie_word_embeddings": True,
    },
    other_keys={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    names=TensorNames(
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        norm="transformer.ln_f",
        layer="transformer.h.{index}.",
        attention_norm="ln_1",
        qkv="attn.c_attn",
        inputs_first=True,
        output="attn.c_proj",
        feed_forward_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
    ),
    gguf=GgufNames(architecture="gpt2", keys=_KEYS),
)  # fmt: skip
GPT_BIGCODE = replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    model_type="gpt_bigcode",
    decoder=_one_kv_head,
    defaults={**GPT2.defaults, "activation_function": "gelu_pytorch_tanh"},
    names=replace(GPT2.names, inputs_first=False),
    gguf=GgufNames(architecture="starcoder", keys=_KEYS),
)
