"""GPT-J: parallel parts behind one layer norm, partly rotated heads whose pairs lie beside one another."""

from moonpool.base.families.base import ModelFamily, TensorNames, activation
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec, RopeSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    size, norm = hidden // heads, NormSpec("layer", fields.number("layer_norm_epsilon"), bias=True)
    inner = fields.positive("n_inner", 4 * hidden, null=4 * hidden)
    layer = LayerSpec(
        AttentionSpec(heads, heads, size, size**-0.5),
        FeedForwardSpec(inner, activation(fields, "activation_function"), gated=False, bias=True),
        norm,
        parallel=True,
        feed_forward_norm=False,
    )
    rope = RopeSpec(10000.0, fields.positive("rotary_dim", null=size), paired=True)
    return DecoderSpec((layer,) * fields.positive("num_hidden_layers"), (rope,), norm, head_bias=True)


GPTJ = ModelFamily(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    decoder=_decoder,
    defaults={
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 2048, "rotary_dim": 64,
    },
    other_keys={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    names=TensorNames(
        embedding="transformer.wte.weight",
        norm="transformer.ln_f",
        layer="transformer.h.{index}.",
        attention_norm="ln_1",
        q="attn.q_proj",
        k="attn.k_proj",
        v="attn.v_proj",
        output="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
    ),
)  # fmt: skip
