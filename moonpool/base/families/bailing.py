"""Ling and Ring 2 (BailingMoeV2): GLM-4.5's layers, with queries, keys and values in one tensor; Ling and Ring 2.5.

Layers of 2.5 have linear attention with a fixed decay, and every eighth one has latent attention. transformers has no
class for these models. Sources: the published modelling code of Ling-mini-2.0 and of Ling-2.5-1T.
"""

import math
from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder, own_keys
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, latent_decoder, shared_experts, with_dense_layers
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, LayerSpec, RecurrentSpec

_OTHER_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _decoder(fields: JsonFields) -> DecoderSpec:
    _check(fields, {"norm_head": False, "moe_router_enable_expert_bias": True})
    normed = fields.flag("use_qk_norm", True)
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(
            qk_norm=layer.norm if normed else None,
            qkv_bias=fields.flag("use_qkv_bias", False),
            output_bias=fields.flag("use_bias", False),
        )
    )
    return with_dense_layers(fields, decoder, shared_experts(fields))


def _check(fields: JsonFields, flags: dict[str, bool]) -> None:
    """Refuse by name what the layers here do not have."""
    if fields.get("score_function", "sigmoid") != "sigmoid":
        raise UnsupportedModel("score_function", f"{fields.get('score_function')!r} is not sigmoid")
    for key, right in flags.items():
        if fields.flag(key, right) is not right:
            raise UnsupportedModel(key, f"{fields.get(key)!r} is not supported")


def _hybrid_decoder(fields: JsonFields) -> DecoderSpec:
    """Return the layers of Ling 2.5; `partial_rotary_factor` is that of linear attention alone."""
    flags = dict.fromkeys(("norm_head", "use_bias", "use_qkv_bias", "linear_silu", "use_linear_silu"), False)
    _check(fields, {**flags, "moe_router_enable_expert_bias": True, "linear_rope": True})
    whole = JsonFields({**fields.all(), "partial_rotary_factor": 1.0}, fields.source)
    decoder = latent_decoder(whole, paired=fields.flag("rope_interleave", True))
    layers, heads, size = len(decoder.layers), fields.positive("num_attention_heads"), fields.positive("head_dim")
    if (given := fields.positive("num_kv_heads_for_linear_attn", heads)) != heads:
        raise UnsupportedModel("num_kv_heads_for_linear_attn", f"{given} is not num_attention_heads, {heads}")
    groups, every = fields.positive("group_norm_size"), fields.positive("layer_group_size")
    if heads * size % groups:
        raise UnsupportedModel("group_norm_size", f"{groups} does not divide {heads * size} elements")
    linear = RecurrentSpec(
        "lightning",
        1,
        heads=heads,
        key_heads=heads,
        key_dim=size,
        value_dim=size,
        norm_eps=decoder.final_norm.eps,
        head_norms=fields.flag("use_qk_norm", True),
        norm_groups=groups,
    )
    inner = fields.positive("moe_intermediate_size")
    shared = fields.positive("moe_shared_expert_intermediate_size", inner) * fields.positive("num_shared_experts")
    decoder = with_dense_layers(fields, decoder, replace(shared_experts(fields), shared_inner=shared))

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        if not (index + 1) % every or index >= layers - layers % every:
            return layer
        # Less from layer to layer. The published code has the layer's index less 1; vLLM and SGLang have the index.
        share = 1 - (index - 1) / max(1, layers - 1) + 1e-5
        decays = tuple(-slope * share for slope in _slopes(heads))
        return replace(layer, recurrent=replace(linear, decays=decays)).with_attention(rope=1)

    return replace(decoder, ropes=(*decoder.ropes, read_rope(fields, size))).each(kind)


def _slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi (Press et al. 2021)."""
    power = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else [*slopes, *_slopes(2 * power)[0::2][: heads - power]]


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
BAILING_HYBRID = ModelFamily(
    architecture="BailingMoeV2_5ForCausalLM",
    model_type="bailing_hybrid",
    decoder=_hybrid_decoder,
    defaults={
        "max_position_embeddings": 131072,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 4,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "partial_rotary_factor": 0.5,
        "layer_group_size": 8,
        "group_norm_size": 8,
    },
    other_keys=_OTHER_KEYS,
    renamed={"attention.dense": "attention.o_proj", "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias"},
    names=TensorNames(
        embedding="model.word_embeddings.weight",
        correction="mlp.gate.expert_bias",
        q="attention.q_proj",
        q_a="attention.q_a_proj",
        q_a_norm="attention.q_a_layernorm",
        q_b="attention.q_b_proj",
        kv_a="attention.kv_a_proj_with_mqa",
        kv_a_norm="attention.kv_a_layernorm",
        kv_b="attention.kv_b_proj",
        output="attention.dense",
        recurrent={
            "inputs": ("attention.query_key_value", "attention.g_proj"),
            "q_norm": ("attention.query_layernorm",),
            "k_norm": ("attention.key_layernorm",),
            "norm": ("attention.g_norm",),
            "output": ("attention.dense",),
        },
    ),
)
