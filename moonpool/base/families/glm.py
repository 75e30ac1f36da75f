"""GLM-4 in all forms: dense (with two or four norms a layer), with experts, with latent attention; Solar Open."""

from dataclasses import replace

from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, latent_decoder, shared_experts, with_dense_layers
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields)
    rope = replace(decoder.ropes[0], paired=True)
    return replace(decoder, ropes=(rope,)).each(
        lambda _, layer: layer.with_attention(output_bias=False).with_feed_forward(bias=False)
    )


def _decoder4(fields: JsonFields) -> DecoderSpec:
    return _decoder(fields).each(lambda _, layer: replace(layer, attention_out_norm=True, feed_forward_out_norm=True))


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    normed = fields.flag("use_qk_norm", False)
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(output_bias=False, qk_norm=layer.norm if normed else None)
    )
    return with_dense_layers(fields, decoder, shared_experts(fields))


def _lite_decoder(fields: JsonFields) -> DecoderSpec:
    experts = shared_experts(fields)
    kinds = fields.get("mlp_layer_types")
    decoder = latent_decoder(fields, paired=fields.flag("rope_interleave", True))
    return decoder.each(
        lambda index, layer: layer.with_feed_forward(
            experts=experts if (index > 0 if kinds is None else kinds[index] == "sparse") else None, bias=False
        )
    )


_DENSE = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}
GLM = ModelFamily(
    architecture="GlmForCausalLM",
    model_type="glm",
    decoder=_decoder,
    defaults=_DENSE,
    names=TensorNames(gate_up="mlp.gate_up_proj"),
)
GLM4 = ModelFamily(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    other_model_types=("glm4v_text",),
    decoder=_decoder4,
    defaults=_DENSE,
    names=TensorNames(
        gate_up="mlp.gate_up_proj",
        attention_out_norm="post_self_attn_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
    ),
    gguf=GgufNames(architecture="glm4", renamed={"ffn_up": "gate_up"}),
)
GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    other_model_types=("glm4v_moe_text",),
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    },
    gguf=GgufNames(
        architecture="glm4moe",
        keys=SHARED_EXPERT_KEYS,
        renamed={"post_attention_norm": "feed_forward_norm"},
        further_layers="nextn_predict_layers",
    ),
)
SOLAR_OPEN = ModelFamily(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    decoder=_moe_decoder,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
    },
    other_keys={"intermediate_size": "moe_intermediate_size"},
)
GLM4_MOE_LITE = ModelFamily(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    decoder=_lite_decoder,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
)
