"""MiniCPM3: DeepSeek's latent attention with dense networks; factors of embeddings, residual sums and logits."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily
from moonpool.base.families.deepseek import LATENT_KEYS, latent_decoder, latent_from_gguf
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = latent_decoder(fields, paired=False)
    hidden, layers = fields.positive("hidden_size"), len(decoder.layers)
    depth = 1.0 if fields.get("scale_depth") is None else fields.number("scale_depth") * layers**-0.5
    decoder = replace(
        decoder,
        embedding_factor=fields.number("scale_emb"),
        logits_factor=fields.positive("dim_model_base", null=hidden) / hidden,
    )
    return decoder.each(lambda _, layer: replace(layer, residual_factor=depth))


MINICPM3 = ModelFamily(
    architecture="MiniCPM3ForCausalLM",
    model_type="minicpm3",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 40,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    gguf=GgufNames(architecture="minicpm3", keys=LATENT_KEYS, complete=latent_from_gguf),
)
