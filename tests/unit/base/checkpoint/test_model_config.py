"""config.json and generation_config.json: what is read, in both spellings, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import (
    DefaultSampling,
    ModelConfig,
    RopeScaling,
    config_hash,
    kv_layout,
    load_config,
    resolve_dtype,
)
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.errors import CheckpointError, UnsupportedModel
from tests.unit.base.checkpoint.folder import write_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def facts(config: ModelConfig) -> dict[str, Any]:
    """What the first and the last layer have, in words."""
    first, last, rope = config.decoder.layers[0], config.decoder.layers[-1], config.decoder.ropes[0]
    return {
        "architecture": config.architecture,
        "dtype": config.dtype,
        "num_kv_heads": first.attention.num_kv_heads,
        "head_dim": first.attention.head_dim,
        "qkv_bias": first.attention.qkv_bias,
        "output_bias": first.attention.output_bias,
        "qk_norm": first.attention.qk_norm is not None,
        "mlp_bias": first.feed_forward.bias,
        "activation": first.feed_forward.activation,
        "windows": (first.attention.window, last.attention.window),
        "rope_theta": rope.theta,
        "rope_width": rope.width,
        "rope_scaling": rope.scaling,
        "positions": config.max_position_embeddings,
    }


def test_llama(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "LlamaForCausalLM",
        2,
        4,
        2,
    )
    assert (config.head_dim, config.dtype, config.eos_token_ids, config.bos_token_id) == (16, "bfloat16", (1,), 0)
    described = facts(config)
    assert not described["qkv_bias"]
    assert not described["qk_norm"]
    assert described["rope_scaling"] is None
    assert config.decoder.not_plain == ""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"num_key_value_heads": ...}, {"num_kv_heads": 4}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"head_dim": None}, {"head_dim": 16}),
        ({"architectures": ...}, {"architecture": "LlamaForCausalLM"}),
        ({**MISTRAL, "sliding_window": None}, {"architecture": "MistralForCausalLM", "qkv_bias": False}),
        ({**MISTRAL, "sliding_window": 4096}, {"windows": (None, None)}),
        ({**MISTRAL}, {"windows": (None, None)}),
        ({**MISTRAL, "sliding_window": 1024}, {"windows": (1024, 1024)}),
        ({**MISTRAL, "max_position_embeddings": 8192}, {"windows": (4096, 4096)}),
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
            {"windows": (None, 100)},
        ),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
            {"windows": (100, 100)},
        ),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, {"windows": (None, None)}),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}),
        ({"partial_rotary_factor": 0.5}, {"rope_width": 8}),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {"rope_scaling": None}),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8},
            },
            {"rope_scaling": RopeScaling("divisors", 1.0, divisors=(1.5,) * 8), "positions": 64},
        ),
        ({**QWEN2}, {"qkv_bias": True, "output_bias": False}),
        ({**QWEN2, "use_sliding_window": False, "sliding_window": 100}, {"qkv_bias": True}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}, {"qkv_bias": True}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {"qkv_bias": True}),
        ({**QWEN2, "layer_types": ["full_attention"] * 2}, {"qkv_bias": True}),
        ({**QWEN3}, {"qk_norm": True, "qkv_bias": False, "head_dim": 128}),
        ({**QWEN3, "head_dim": 32}, {"head_dim": 32}),
        ({"torch_dtype": ..., "dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": ...}, {"dtype": "float32"}),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_theta": ...}, {"rope_theta": 10000.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 1024), "rope_theta": 10000.0},
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 1024), "rope_theta": 5e5},
        ),
    ],
)
def test_spellings_and_defaults(changed: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, **changed))
    described = facts(config)
    assert {name: described[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("architectures", {"architectures": ["MambaForCausalLM"], "num_attention_heads": ...}),
        ("architectures", {"architectures": ["LlamaForTokenClassification"]}),
        ("architectures", {"architectures": []}),
        ("model_type", {"architectures": ..., "model_type": "mamba"}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "hqq"}}),
        ("hidden_act", {"hidden_act": "xielu"}),
        ("layer_types", {**MISTRAL, "layer_types": ["full_attention", "linear_attention"]}),
        ("rope_scaling.rope_type", {"rope_scaling": {"type": "axial", "factor": 4.0}}),
        ("clip_qkv", {"architectures": ["OlmoForCausalLM"], "clip_qkv": 8.0}),
        ("alibi", {"architectures": ["FalconForCausalLM"], "alibi": True}),
        ("topk_method", {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32, "topk_method": "other"}),
        ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("torch_dtype", {"torch_dtype": "float8_e4m3fn"}),
    ],
)
def test_unsupported_is_refused_by_name(field: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_config(write_config(tmp_path, **changed))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("hidden_size is missing", {"hidden_size": ...}),
        ("num_hidden_layers must be a positive integer", {"num_hidden_layers": 0}),
        ("vocab_size must be a positive integer", {"vocab_size": "many"}),
        ("num_attention_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 15}),
        ("eos_token_id", {"eos_token_id": "x"}),
        ("rms_norm_eps must be a number", {"rms_norm_eps": True}),
        ("rope_scaling: factor is missing", {"rope_scaling": {"rope_type": "llama3"}}),
        ("short_factor must be a list of 8 numbers", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("layer_types must be a list of 2 kinds", {**MISTRAL, "layer_types": ["full_attention"]}),
    ],
)
def test_malformed_is_named(words: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_config(write_config(tmp_path, **changed))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_config(tmp_path)


CARD = DefaultSampling(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize(
    ("folder", "suggested"),
    [
        ("SmolLM2-135M-Instruct", CARD),
        ("models--HuggingFaceTB--SmolLM2-1.7B-Instruct/snapshots/0a1b", CARD),
        ("SmolLM2-135M", DefaultSampling()),  # not a chat model
        ("some-model", DefaultSampling()),  # OpenAI's defaults hold
    ],
)
def test_the_models_card_suggests_where_the_files_do_not(
    folder: str, suggested: DefaultSampling, tmp_path: Path
) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    write_config(path)
    assert load_config(path).default_sampling == suggested
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_config(path).default_sampling == suggested
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert load_config(path).default_sampling == DefaultSampling(temperature=0.6)


def test_generation_config_has_rules_for_every_answer(tmp_path: Path) -> None:
    write_config(tmp_path)
    plain = load_config(tmp_path)
    assert plain.answer_rules == AnswerRules()
    rules = {"max_new_tokens": 9, "suppress_tokens": [3, 2, 10**6], "min_p": 0.05, "typical_p": 0.9, "num_beams": 4}
    without = {"num_beams": 1, "typical_p": 1.0, "bad_words_ids": [], "no_repeat_ngram_size": 0, "guidance_scale": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**without, **rules}))
    config = load_config(tmp_path)
    assert config.answer_rules == AnswerRules(9, (3, 2), ("num_beams", "typical_p"))
    assert config.default_sampling == DefaultSampling(min_p=0.05)
    assert config_hash(config) == config_hash(plain)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"stop_strings": ["x"], "do_sample": False, "min_p": 0.1})
    )
    assert load_config(tmp_path).answer_rules == AnswerRules(unread=("stop_strings",))
    assert load_config(tmp_path).default_sampling == DefaultSampling()
    for wrong in ({"suppress_tokens": ["a"]}, {"max_new_tokens": 0}, {"suppress_tokens": list(range(10**4)) * 2}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            load_config(tmp_path)


def test_generation_config_adds_end_tokens_and_sampling(tmp_path: Path) -> None:
    write_config(tmp_path)
    generation = {"eos_token_id": [5, 6], "temperature": 0.7, "top_k": 20, "do_sample": True, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (5, 6, 1)
    assert config.bos_token_id == 0
    assert config.default_sampling == DefaultSampling(temperature=0.7, top_k=20)
    assert config.default_sampling.given == {"temperature": 0.7, "top_k": 20}
    unused = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(unused))
    assert load_config(tmp_path).default_sampling == DefaultSampling(repetition_penalty=1.1)


def test_hash_follows_the_arithmetic(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    assert config_hash(config).hex() == "c50f431a9b8575e28439d328ac896d54427d14e8cb16613a4d5800f5ab889ed6"
    assert config_hash(replace(config, dtype="float32", eos_token_ids=(9,))) == config_hash(config)
    rope = config.decoder.ropes[0]
    decoders = [
        replace(config.decoder, ropes=(replace(rope, theta=1.0),)),
        replace(config.decoder, ropes=(replace(rope, scaling=RopeScaling("linear", 2.0)),)),
        replace(config.decoder, ropes=(replace(rope, magnitude=1.1),)),
        replace(config.decoder, logits_factor=2.0),
        config.decoder.each(lambda _, layer: layer.with_attention(qk_norm=layer.norm)),
        config.decoder.each(lambda _, layer: layer.with_attention(window=64)),
        config.decoder.each(lambda index, layer: layer.with_attention(window=64) if index else layer),
        config.decoder.each(lambda _, layer: layer.with_feed_forward(activation="gelu")),
    ]
    hashes = {config_hash(replace(config, decoder=decoder)) for decoder in decoders}
    assert len(hashes | {config_hash(config)}) == 9


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {**QWEN2, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "ab0c19523b3b84d5d01ad0055c137aa3429de6e2346dac9096367e0bb7e6f4ee",
        ),
        (
            {**QWEN3, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            "d591c31099d55965dba8a11933138258769afdd8daa4c2779a4139d21d49572d",
        ),
        (
            {**MISTRAL, "sliding_window": None, "mlp_bias": True},
            "efaa242e683b47961f279200b7149df75ba4fe545b1c46a2d9a5936fac07af10",
        ),
        (
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "83b40e5996ba15677b3cb324d05aa80d563665a11030e52cf69c56834e9ce7f7",
        ),
        ({**MISTRAL, "sliding_window": 64}, "d3ce5de89bb40c4401cfd7c77a9dac876968d68bd2fc7acb3195dcb33ab929d4"),
    ],
)
def test_hashes_of_released_configurations_stay(changed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """KV that was stored under them is found again."""
    assert config_hash(load_config(write_config(tmp_path, **changed))).hex() == expected


def test_dtype_and_layout(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    assert resolve_dtype(config) == "bfloat16"
    assert resolve_dtype(config, "float32") == "float32"
    with pytest.raises(UnsupportedModel, match="int8"):
        resolve_dtype(config, "int8")
    layout = kv_layout(config, "float32", 32)
    assert layout.block_bytes == 2 * 2 * 2 * 32 * 16 * 4
    assert layout.version == 1


def test_latent_vectors_take_1152_bytes_a_token_and_layer(tmp_path: Path) -> None:
    """Kimi K2's shape, with fewer layers."""
    kimi = {
        "architectures": ["KimiK2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    layout = kv_layout(load_config(write_config(tmp_path, **kimi)), "bfloat16", 64)
    (group,) = layout.groups
    assert (group.kind, group.planes, group.kv_heads, group.head_dim) == ("latent", 1, 1, 576)
    assert layout.token_bytes == 3 * 1152
    assert layout.version == 2


def test_layers_with_windows_are_a_group_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
        "rope_theta": None,
    }
    layout = kv_layout(load_config(write_config(tmp_path, **gemma)), "bfloat16", 16)
    assert [(group.kind, group.window, group.layers) for group in layout.groups] == [
        ("window", 20, (0, 2)),
        ("full", 0, (1, 3)),
    ]
