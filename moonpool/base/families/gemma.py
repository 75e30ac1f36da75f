"""Gemma 1 to 4 (text), VaultGemma: norms with 1 + weight, scaled embeddings; soft caps in 2; two ropes in 3 and 4.

Gemma 4 12B ("unified") has neither embeddings of each layer nor experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import (
    GgufNames,
    ModelFamily,
    TensorNames,
    activation,
    class_sizes,
    layer_kinds,
    llama_decoder,
    windowed,
)
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import DecoderSpec, ExpertsSpec, LayerSpec, RopeSpec


def _decoder(fields: JsonFields, rope_kind: str | None = None) -> DecoderSpec:
    decoder = llama_decoder(fields, rope_kind=rope_kind)
    norm = replace(decoder.final_norm, offset=1.0, wide=True)
    factor = float(fields.positive("hidden_size") ** 0.5)
    decoder = replace(decoder, final_norm=norm, embedding_factor=factor)
    return decoder.each(lambda _, layer: replace(layer, norm=norm).with_feed_forward(bias=False))


def _decoder2(fields: JsonFields, rope_kind: str | None = None) -> DecoderSpec:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    caps = [None if fields.get(key) is None else fields.number(key) for key in _SOFT_CAPS]
    act = activation(fields, "hidden_activation")
    decoder = replace(_decoder(fields, rope_kind), logits_soft_cap=caps[1]).each(
        lambda _, layer: (
            replace(layer, attention_out_norm=True, feed_forward_out_norm=True)
            .with_attention(scale=scale, soft_cap=caps[0])
            .with_feed_forward(activation=act)
        )
    )
    layers = len(decoder.layers)
    pattern = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    return windowed(fields, decoder, layer_kinds(fields, layers, pattern))


def _vault_decoder(fields: JsonFields) -> DecoderSpec:
    return _decoder2(fields).each(
        lambda _, layer: replace(layer, attention_out_norm=False, feed_forward_out_norm=False)
    )


_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _decoder3(fields: JsonFields) -> DecoderSpec:
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention", "attention to later tokens is not supported")
    decoder = _decoder2(fields, "full_attention")
    layers, size = len(decoder.layers), decoder.layers[0].attention.head_dim
    every = fields.positive("sliding_window_pattern", fields.positive("_sliding_window_pattern", 6))
    pattern = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    kinds = layer_kinds(fields, layers, pattern)
    plain = decoder.each(
        lambda index, layer: layer.with_attention(
            qk_norm=layer.norm, window=None, rope=1 if kinds[index] == "sliding_attention" else 0
        )
    )
    local = read_rope(fields, size, kind="sliding_attention")
    if fields.get("rope_local_base_freq") is not None:  # the old spelling, whose rope_scaling is for full layers only
        local = RopeSpec(fields.number("rope_local_base_freq"), size)
    return windowed(fields, replace(plain, ropes=(decoder.ropes[0], local), whole_pictures=True), kinds)


def _decoder4(fields: JsonFields) -> DecoderSpec:
    """Layers that see all tokens have heads of another size and number, whose values are their keys."""
    if fields.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("use_bidirectional_attention", "attention to later tokens is not supported")
    decoder, act = llama_decoder(fields, rope_kind="full_attention"), activation(fields, "hidden_activation")
    layers, size = len(decoder.layers), decoder.layers[0].attention.head_dim
    pattern = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(layers)]
    kinds = [*layer_kinds(fields, layers, pattern)[:-1], "full_attention"]
    whole, heads = fields.positive("global_head_dim", 512), decoder.layers[0].attention.num_kv_heads
    overrides = fields.get("per_layer_config") or {}
    equal, norm = fields.flag("attention_k_eq_v", False), replace(decoder.final_norm, wide=True)
    experts = None
    if fields.flag("enable_moe_block", False):
        experts = ExpertsSpec(
            fields.positive("num_experts"),
            fields.positive("top_k_experts"),
            fields.positive("moe_intermediate_size"),
            "softmax",
            normalised=True,
            beside=True,
        )
    own = int(fields.number("hidden_size_per_layer_input", 0))
    first = layers - int(fields.number("num_kv_shared_layers", 0))
    wide_mlp = fields.flag("use_double_wide_mlp", False)
    last = {kind: index for index, kind in enumerate(kinds[: max(0, first)])}
    if missing := set(kinds) - last.keys():
        why = f"no layer before the last {layers - first} is of kind {', '.join(sorted(missing))}"
        raise UnsupportedModel("num_kv_shared_layers", why)
    if equal:
        heads = fields.positive("num_global_key_value_heads", heads, null=heads)

    def kind(index: int, layer: LayerSpec) -> LayerSpec:
        layer = replace(
            layer, norm=norm, attention_out_norm=True, feed_forward_out_norm=True, scalar=True, per_layer=own
        )
        if index >= first:
            layer = layer.with_attention(kv_of=last[kinds[index]])
            layer = layer.with_feed_forward(inner=layer.feed_forward.inner * (2 if wide_mlp else 1))
        layer = layer.with_attention(scale=1.0, qk_norm=norm, value_norm=True).with_feed_forward(
            activation=act, experts=experts
        )
        if kinds[index] == "sliding_attention":
            return layer.with_attention(rope=1)
        override = JsonFields(overrides.get(str(index), {}), f"{fields.source}: per_layer_config.{index}")
        return layer.with_attention(
            head_dim=override.positive("head_dim", whole),
            num_kv_heads=override.positive("num_key_value_heads", heads),
            values_of_keys=equal,
        )

    decoder = decoder.each(kind)
    wide = decoder.layers[-1].attention.head_dim
    decoder = replace(
        decoder,
        ropes=(read_rope(fields, wide, kind="full_attention"), read_rope(fields, size, kind="sliding_attention")),
        final_norm=norm,
        embedding_factor=float(fields.positive("hidden_size") ** 0.5),
        logits_soft_cap=None if fields.get(_SOFT_CAPS[1]) is None else fields.number(_SOFT_CAPS[1]),
        per_layer_rows=fields.positive("vocab_size_per_layer_input") if own else 0,
    )
    decoder = windowed(fields, decoder, kinds)
    return replace(decoder, layers=decoder.layers[:first], tail=decoder.layers[first:])


def _query_scalar(found: dict[str, Any]) -> Mapping[str, Any]:
    """GGUF files do not tell: the 27B models (46 and 62 layers) differ from the others."""
    large = found["num_hidden_layers"] in (46, 62)
    return {
        "query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"] if large else found["head_dim"]
    }


def _from_gguf4(found: dict[str, Any]) -> Mapping[str, Any]:
    """Files name sizes of layers that see all tokens where other files name those of all layers."""
    layers, width, inner = found["num_hidden_layers"], found.get("local_dim", found["head_dim"]), found["listed_inner"]
    windows, heads = found.get("windows") or [True] * layers, found.get("listed_kv_heads")
    listed = heads if isinstance(heads, list) else [found["num_key_value_heads"]] * layers
    sizes = dict(zip(windows, listed, strict=False))
    rotated = {"rope_type": "default", "rope_theta": found["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": found.get("local_base", 10000.0)}
    if "local_rotated" in found:
        local["partial_rotary_factor"] = found["local_rotated"] / width
    return {
        "head_dim": width,
        "global_head_dim": found["head_dim"],
        "num_key_value_heads": sizes.get(True, listed[0]),
        "num_global_key_value_heads": sizes.get(False, listed[-1]),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in windows],
        "intermediate_size": min(inner) if isinstance(inner, list) else inner,
        "use_double_wide_mlp": isinstance(inner, list) and len(set(inner)) > 1,
        "enable_moe_block": bool(found.get("num_experts")),
        "hidden_size_per_layer_input": found.get("hidden_size_per_layer_input", 0),
        "vocab_size_per_layer_input": found["vocab_size"],
        "rope_parameters": {"full_attention": rotated, "sliding_attention": local},
    }


_NAMES = TensorNames(feed_forward_norm="pre_feedforward_layernorm")
GEMMA = ModelFamily(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    gguf=GgufNames(architecture="gemma", whole_norms=True),
)
GEMMA2 = ModelFamily(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    decoder=_decoder2,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    names=_NAMES,
    gguf=GgufNames(
        architecture="gemma2",
        whole_norms=True,
        keys={
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        complete=_query_scalar,
    ),
)
VAULT_GEMMA = ModelFamily(
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    decoder=_vault_decoder,
    defaults=GEMMA2.defaults,
    names=_NAMES,
)
GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    decoder=_decoder3,
    sizes=class_sizes(262208, 2304, 9216, 26, 8),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
    names=_NAMES,
    gguf=GgufNames(
        architecture="gemma3",
        whole_norms=True,
        keys={
            "sliding_window": "attention.sliding_window",
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        complete=lambda found: {"rope_local_base_freq": 10000.0, **found, **_query_scalar(found)},
    ),
)
GEMMA4 = ModelFamily(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    decoder=_decoder4,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
    names=replace(
        _NAMES,
        router="router.proj",
        experts_gate_up="experts.gate_up_proj",
        experts_down="experts.down_proj",
        expert="experts.{expert}.",
    ),
    gguf=GgufNames(
        architecture="gemma4",
        keys={
            "sliding_window": "attention.sliding_window",
            "windows": "attention.sliding_window_pattern",
            "local_dim": "attention.key_length_swa",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "listed_kv_heads": "attention.head_count_kv",
            "listed_inner": "feed_forward_length",
            "local_base": "rope.freq_base_swa",
            "local_rotated": "rope.dimension_count_swa",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        complete=_from_gguf4,
        outer={
            "token_embd": "embedding",
            "output_norm": "norm",
            "output": "head",
            "per_layer_token_embd": "per_layer_embedding",
            "per_layer_model_proj": "per_layer_input",
            "per_layer_proj_norm": "per_layer_input_norm",
        },
        renamed={
            "layer_output_scale": "scalar",
            "inp_gate": "per_layer_gate",
            "proj": "per_layer_output",
            "post_norm": "per_layer_norm",
            "pre_ffw_norm_2": "experts_norm",
            "post_ffw_norm_1": "dense_out_norm",
            "post_ffw_norm_2": "experts_out_norm",
            "ffn_gate_inp.scale": "router_scale",
            "ffn_down_exps.scale": "expert_scale",
        },
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    defaults={
        **{key: value for key, value in GEMMA4.defaults.items() if not key.endswith("per_layer_input")},
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    gguf=None,  # its files say gemma4, too
)
