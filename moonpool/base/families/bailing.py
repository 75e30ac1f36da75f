"""Ling and Ring 2 (BailingMoeV2): GLM-4.5's layers, with queries, keys and values in one tensor.

transformers has no class. Source: the published modelling code of Ling-mini-2.0.
"""

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder, own_keys
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, shared_experts, with_dense_layers
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec

_OTHER_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _decoder(fields: JsonFields) -> DecoderSpec:
    if fields.get("score_function", "sigmoid") != "sigmoid":
        raise UnsupportedModel("score_function", f"{fields.get('score_function')!r} is not sigmoid")
    for key, right in (("norm_head", False), ("moe_router_enable_expert_bias", True)):
        if fields.flag(key, right) is not right:
            raise UnsupportedModel(key, f"{fields.get(key)!r} is not supported")
    normed = fields.flag("use_qk_norm", True)
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(
            qk_norm=layer.norm if normed else None,
            qkv_bias=fields.flag("use_qkv_bias", False),
            output_bias=fields.flag("use_bias", False),
        )
    )
    return with_dense_layers(fields, decoder, shared_experts(fields))


BAILING_MOE_V2 = ModelFamily(
    architecture="BailingMoeV2ForCausalLM",
    model_type="bailing_moe",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 32768,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    other_keys=_OTHER_KEYS,
    names=TensorNames(
        embedding="model.word_embeddings.weight",
        qkv="attention.query_key_value",
        output="attention.dense",
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        correction="mlp.gate.expert_bias",
    ),
    gguf=GgufNames(
        architecture="bailingmoe2",
        keys=own_keys(SHARED_EXPERT_KEYS, _OTHER_KEYS),
        further_layers="nextn_predict_layers",
    ),
)
