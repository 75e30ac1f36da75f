"""DeepSeek V2 and V3 (Moonlight and Kimi K2 among them): latent attention, experts in groups; Youtu: dense.

DeepSeek V3.2 and GLM-5 choose `index_topk` keys for each query. A layer of a checkpoint is two layers here, because
each has KV: the indexer, then attention beside. Some of GLM's layers have no indexer and take the keys of the last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, layer_kinds, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope, yarn_scale
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, IndexerSpec, LatentSpec, LayerSpec

SHARED_EXPERT_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
"""GGUF keys by config.json's keys."""


def latent_decoder(fields: JsonFields, *, paired: bool) -> DecoderSpec:
    """Return Llama's decoder with multi-head latent attention."""
    head = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    latent = LatentSpec(
        kv_rank=fields.positive("kv_lora_rank"),
        q_rank=None if fields.get("q_lora_rank") is None else fields.positive("q_lora_rank"),
        rope_width=fields.positive("qk_rope_head_dim"),
        key_width=fields.positive("qk_nope_head_dim"),
        value_width=fields.positive("v_head_dim", head, null=head),
        norm_eps=1e-6,
    )
    scale = yarn_scale(fields, (latent.key_width + latent.rope_width) ** -0.5)
    decoder = replace(llama_decoder(fields), ropes=(read_rope(fields, latent.rope_width, paired=paired),))
    return decoder.each(
        lambda _, layer: layer.with_attention(
            num_kv_heads=1, head_dim=latent.kv_rank + latent.rope_width, scale=scale, latent=latent
        )
    )


def shared_experts(fields: JsonFields) -> ExpertsSpec:
    """Return DeepSeek V3's experts: sigmoid scores, a correction of the choice, groups, shared experts."""
    inner = fields.positive("moe_intermediate_size")
    return ExpertsSpec(
        fields.positive("n_routed_experts"),
        fields.positive("num_experts_per_tok"),
        inner,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        least_sum=1e-20,
        factor=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.positive("n_group", 1),
        groups_chosen=fields.positive("topk_group", 1),
        shared_inner=inner * fields.positive("n_shared_experts", 1),
    )


def _decoder2(fields: JsonFields) -> DecoderSpec:
    method = fields.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel("topk_method", f"{method!r} is none of greedy, group_limited_greedy")
    groups = method == "group_limited_greedy"
    experts = replace(
        shared_experts(fields),
        scores="softmax",
        normalised=False,
        correction=False,
        groups=fields.positive("n_group") if groups else 1,
        groups_chosen=fields.positive("topk_group") if groups else 1,
        group_top=1,
    )
    return with_dense_layers(fields, latent_decoder(fields, paired=True), experts)


def _decoder3(fields: JsonFields) -> DecoderSpec:
    if fields.get("topk_method", "noaux_tc") != "noaux_tc":
        raise UnsupportedModel("topk_method", f"{fields.get('topk_method')!r} is not noaux_tc")
    decoder = latent_decoder(fields, paired=fields.flag("rope_interleave", True))
    return with_dense_layers(fields, decoder, shared_experts(fields))


def _dense_decoder(fields: JsonFields) -> DecoderSpec:
    decoder = latent_decoder(fields, paired=fields.flag("rope_interleave", True))
    return decoder.each(lambda _, layer: layer.with_feed_forward(bias=False))


def with_dense_layers(fields: JsonFields, decoder: DecoderSpec, experts: ExpertsSpec) -> DecoderSpec:
    """Return `decoder` with experts in the layers of `mlp_layer_types`, else in all but `first_k_dense_replace`."""
    layers, dense = len(decoder.layers), int(fields.number("first_k_dense_replace", 0))
    default = ["dense" if index < dense else "sparse" for index in range(layers)]
    kinds = layer_kinds(fields, layers, default, ("dense", "sparse"), key="mlp_layer_types")
    return decoder.each(
        lambda index, layer: layer.with_feed_forward(experts=experts if kinds[index] == "sparse" else None, bias=False)
    )


def _sparse_decoder(fields: JsonFields) -> DecoderSpec:
    """Return V3's decoder with an indexer before each layer's attention, or the choice of an earlier one."""
    decoder = _decoder3(fields)
    rope = decoder.ropes[0]
    indexer = IndexerSpec(fields.positive("index_topk"), fields.positive("q_lora_rank"), 1e-6, 1e-6)
    heads, size = fields.positive("index_n_heads"), fields.positive("index_head_dim")
    if size < rope.width:
        raise UnsupportedModel("index_head_dim", f"{size} is less than qk_rope_head_dim, {rope.width}")
    kinds = _indexer_kinds(fields, len(decoder.layers))

    def parts(index: int, layer: LayerSpec) -> tuple[LayerSpec, ...]:
        attends = replace(layer, stored_at=(index, index)).with_attention(index_topk=indexer.topk)
        if kinds[index] == "shared":
            return (attends,)
        chooses = replace(attends, indexer=indexer, feed_forward_norm=False).with_feed_forward(inner=0, experts=None)
        chooses = chooses.with_attention(
            num_heads=heads, head_dim=size, scale=size**-0.5, rope=1, latent=None, index_topk=0
        )
        return chooses, replace(attends, attention_norm=False, beside=True)

    return replace(
        decoder,
        layers=tuple(part for index, layer in enumerate(decoder.layers) for part in parts(index, layer)),
        ropes=(rope, replace(rope, paired=fields.flag("indexer_rope_interleave", False))),
    )


def _indexer_kinds(fields: JsonFields, layers: int) -> Sequence[str]:
    """Return "full" or "shared" for each layer, by the keys in the order in which transformers reads them."""
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    every, offset = fields.positive("index_topk_freq", 1), int(fields.number("index_skip_topk_offset", 2))
    default = ["shared" if max(index - offset + 1, 0) % every else "full" for index in range(layers)]
    listed = (
        fields if fields.get("indexer_types") is not None else JsonFields({"indexer_types": pattern}, fields.source)
    )
    kinds = layer_kinds(listed, layers, default, ("full", "shared"), key="indexer_types")
    if kinds[0] == "shared":
        raise UnsupportedModel("indexer_types", "the first layer has no layer before whose keys it could share")
    return kinds


LATENT_KEYS = {
    **SHARED_EXPERT_KEYS,
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "key_length": "attention.key_length",
    "key_length_mla": "attention.key_length_mla",
    "value_length": "attention.value_length",
    "value_length_mla": "attention.value_length_mla",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
}


def latent_from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the keys of config.json. Files with one KV head give all heads' lengths under separate keys."""
    rope = found["qk_rope_head_dim"]
    keys = {
        "q_lora_rank": found.get("q_lora_rank"),
        "qk_nope_head_dim": found.get("key_length_mla", found.get("key_length", 0)) - rope,
        "v_head_dim": found.get("value_length_mla", found.get("value_length")),
        "head_dim": rope,
        "num_key_value_heads": found["num_attention_heads"],
        "partial_rotary_factor": 1.0,
        "n_group": found.get("n_group", 1),
        "topk_group": found.get("topk_group", 1),
        "topk_method": "group_limited_greedy" if found.get("n_group", 1) > 1 else "greedy",
    }
    if "rope_scaling" in found:
        magnitude = found.get("yarn_log_multiplier", 0.0) * 10  # llama.cpp's key includes YaRN's factor 0.1
        keys["rope_scaling"] = {**found["rope_scaling"], "mscale": magnitude, "mscale_all_dim": magnitude}
    return keys


DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    decoder=_decoder2,
    defaults={
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
    },
    gguf=GgufNames(architecture="deepseek2", keys=LATENT_KEYS, complete=latent_from_gguf),
)
YOUTU = ModelFamily(
    architecture="YoutuForCausalLM",
    model_type="youtu",
    decoder=_dense_decoder,
    defaults={
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    other_architectures=("KimiK2ForCausalLM",),
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    decoder=_decoder3,
    defaults={
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
    },
    gguf=GgufNames(
        architecture="deepseek2",
        keys=LATENT_KEYS,
        complete=lambda found: {**latent_from_gguf(found), "topk_method": "noaux_tc"},
    ),
)
DEEPSEEK_V32 = ModelFamily(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    decoder=_sparse_decoder,
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "indexer_rope_interleave": False,
    },
)
GLM_MOE_DSA = ModelFamily(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    decoder=_sparse_decoder,
    defaults={
        **DEEPSEEK_V32.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "n_group": 1,
        "topk_group": 1,
    },
    gguf=GgufNames(
        architecture="glm-dsa",
        keys={
            **LATENT_KEYS,
            "index_topk": "attention.indexer.top_k",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
        },
        complete=lambda found: {**latent_from_gguf(found), "topk_method": "noaux_tc"},
        further_layers="nextn_predict_layers",
    ),
)
