"""GGUF files of every family: logits are those of the folder, and of transformers' own GGUF loading where it has one.

Tensors get their names from the `gguf` package's own table, so that the names here are not only compared with
themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.peers.gguf_files import VALUE_TYPES, add_tokenizer, finish
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.base import ModelFamily
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, ONE_STAGE, TINY, reference

SHARED = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0, "attention.scale": 0.3}
LATENT_KEYS = {
    **SHARED,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 24,
    "attention.key_length": 40,
    "attention.key_length_mla": 24,
    "attention.value_length": 32,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "expert_gating_func": 1,
}
DELTA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 80,
    "full_attention_interval": 2,
    "rope.dimension_count": 4,
}
MOE_KEYS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 32,
}
GEMMA4_KEYS = {
    "attention.sliding_window": 20,
    "attention.sliding_window_pattern": [True, True, True, False],
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
}
MAMBA_KEYS = {
    **SCALES,
    "context_length": 1 << 20,
    "attention.head_count_kv": [0, 2, 0, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "rope.scaling.finetuned": False,
    "expert_shared_feed_forward_length": 48,
}
NEMOTRON_H_KEYS = {
    "block_count": 5,
    "attention.head_count_kv": [0, 0, 0, 2, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
}
EXPERTS_OF_NEMOTRON_H = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 40,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
}
FALCON_H1_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.inner_size": 80,
    "ssm.time_step_rank": 8,
}
FACTORS4 = [1.0, 1.5, 2.0, 3.0]
MINICPM3_KEYS = {
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 24,
    "attention.key_length": 24,
    "attention.value_length": None,
    "rope.dimension_count": 8,
}
MINICPM3 = {"v_head_dim": 16, "dim_model_base": 256}
#: By architecture of the file, and what is special: case of test_families, and further metadata of converters.
FILES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"attention.sliding_window": 20, "logit_scale": 0.0625}),
    "command-r": ("cohere, norms", {"logit_scale": 0.0625}),
    "deepseek2": ("deepseek_v2", {**LATENT_KEYS, "leading_dense_block_count": 1, "expert_shared_count": 2}),
    "dots1": ("dots1", {**SHARED, "leading_dense_block_count": 1, "expert_weights_norm": False}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "exaone4": ("exaone4", {"attention.sliding_window": 20}),
    "exaone-moe": (
        "exaone_moe",
        {
            **SHARED,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, True, False, False],
            "block_count": 5,
            "nextn_predict_layers": 1,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
    "falcon": ("falcon", {"attention.head_count_kv": 1, "feed_forward_length": 256}),
    "falcon, new": ("falcon, new", {"attention.head_count_kv": 2, "feed_forward_length": 256}),
    "falcon, one norm": ("falcon, new", {"attention.head_count_kv": 2, "feed_forward_length": 256}),
    "falcon-h1": ("falcon_h1", FALCON_H1_KEYS),
    "falcon-h1, norm": ("falcon_h1, norm", {**FALCON_H1_KEYS}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 20, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("gemma3", {"attention.sliding_window": 20, "rope.freq_base": 1e6}),
    "gemma4": ("gemma4", {**GEMMA4_KEYS, "final_logit_softcapping": 20.0}),
    "gemma4, embeddings for each layer": (
        "gemma4, embeddings for each layer",
        {**GEMMA4_KEYS, "embedding_length_per_layer_input": 8},
    ),
    "gemma4, shared KV": (
        "gemma4, shared KV",
        {
            **GEMMA4_KEYS,
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True, False] * 3,
            "feed_forward_length": [96, 96, 96, 192, 192, 192],
            "embedding_length_per_layer_input": 8,
        },
    ),
    "gemma4, values of keys": (
        "gemma4, values of keys",
        {**GEMMA4_KEYS, "attention.head_count_kv": [2, 2, 2, 1]},
    ),
    "gemma4, experts": (
        "gemma4, experts",
        {**GEMMA4_KEYS, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "glm4": ("glm4", {"rope.dimension_count": 8}),
    "glm4moe": (
        "glm4_moe",
        {
            **SHARED,
            "block_count": 5,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 8,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "glm-dsa": (
        "glm_moe_dsa",
        {
            **LATENT_KEYS,
            "block_count": 5,
            "nextn_predict_layers": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "attention.indexer.top_k": 16,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 16,
        },
    ),
    "gpt2": ("gpt2", {"feed_forward_length": 256}),
    "gptneox": ("gpt_neox", {"rope.dimension_count": 4, "use_parallel_residual": True}),
    "gptneox, serial": ("gpt_neox, serial", {"rope.dimension_count": 4, "use_parallel_residual": False}),
    "gpt-oss": (
        "gpt_oss",
        {
            "attention.sliding_window": 20,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "granite": ("granite", SCALES),
    "granitemoe": ("granitemoe", {**SCALES, "expert_count": 4, "expert_used_count": 2}),
    "granitehybrid": ("granite, hybrid", {**MAMBA_KEYS, "expert_count": 4, "expert_used_count": 2}),
    "granitehybrid, dense": (
        "granite, hybrid, dense",
        {
            **{key: value for key, value in MAMBA_KEYS.items() if key not in SCALES},
            "ssm.group_count": 1,
            "rope.scaling.finetuned": True,
        },
    ),
    "hunyuan-dense": ("hunyuan", {}),
    "hunyuan-moe": (
        "hunyuan, experts",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "expert_shared_count": 1},
    ),
    "jais2": ("jais2", {}),
    "kimi-linear": (
        "kimi_linear",
        {
            **{key: value for key, value in LATENT_KEYS.items() if key != "attention.q_lora_rank"},
            "attention.head_count_kv": [0, 1, 0, 0],
            "leading_dense_block_count": 1,
            "expert_weights_scale": 2.446,
            "expert_gating_func": 2,
            "kda.head_dim": 12,
            "ssm.conv_kernel": 4,
        },
    ),
    "lfm2": (
        "lfm2",
        {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": 256, "shortconv.l_cache": 3},
    ),
    "lfm2moe": (
        "lfm2_moe",
        {
            "attention.head_count_kv": [0, 2, 0, 0],
            "shortconv.l_cache": 3,
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "llama4": (
        "llama4",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "interleave_moe_layer_step": 2,
            "feed_forward_length": 80,
            "expert_feed_forward_length": 96,
        },
    ),
    "llama": ("mixtral", {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6}),
    "mimo2": (
        "mimo_v2_flash",
        {
            **{key: value for key, value in SHARED.items() if key != "expert_shared_count"},
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "attention.head_count_kv": [2, 4, 4, 2, 4],
            "attention.sliding_window": 19,
            "attention.sliding_window_pattern": [0, 1, 1, 0, 1],
            "attention.value_length": 12,
            "attention.value_scale": 0.707,
            "block_count": 5,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 8,
            "rope.freq_base": 5e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "minicpm3": ("minicpm3", MINICPM3_KEYS),
    "minicpm3, longrope": ("minicpm3", MINICPM3_KEYS),
    "minimax-m2": (
        "minimax_m2",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "rope.freq_base": 5e6},
    ),
    "mistral3": (
        "ministral3",
        {
            "attention.temperature_scale": 0.1,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H_KEYS, "feed_forward_length": [0, 96, 0, 0, 96]}),
    "nemotron_h_moe": (
        "nemotron_h, experts",
        {
            **NEMOTRON_H_KEYS,
            **EXPERTS_OF_NEMOTRON_H,
            "block_count": 6,
            "attention.head_count_kv": [0, 0, 0, 2, 0, 2],
            "feed_forward_length": [0, 32, 0, 0, 32, 32],
            "nextn_predict_layers": 1,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "nemotron_h_moe, latent": (
        "nemotron_h, latent experts",
        {
            **NEMOTRON_H_KEYS,
            **EXPERTS_OF_NEMOTRON_H,
            "block_count": 3,
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": [0, 0, 32],
            "moe_latent_size": 48,
        },
    ),
    "nemotron": ("nemotron", {"rope.dimension_count": 8}),
    "olmo": ("olmo", {"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"expert_count": 4, "expert_used_count": 2}),
    "phi2": ("phi", {"rope.dimension_count": 8}),
    "phi3": ("phi3", {"attention.sliding_window": 20}),
    "phi3, longrope": (
        "phi3, longrope",
        {"attention.sliding_window": 0, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.2},
    ),
    "qwen2vl": ("qwen2", {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen2moe": (
        "qwen2_moe",
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "qwen35": ("qwen3_5", DELTA_KEYS),
    "qwen35, layers for drafts": ("qwen3_5", {**DELTA_KEYS, "block_count": 5, "nextn_predict_layers": 1}),
    "qwen35moe": ("qwen3_5_moe", {**DELTA_KEYS, **MOE_KEYS}),
    "qwen3next": ("qwen3_next", {**DELTA_KEYS, **MOE_KEYS, "full_attention_interval": 4}),
    "qwen3moe": ("qwen3_moe", {"expert_count": 8, "expert_used_count": 8, "expert_feed_forward_length": 768}),
    "qwen3vl": ("qwen3", {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}),
    "qwen3vlmoe": (
        "qwen3_moe",
        {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "n_deepstack_layers": 3},
    ),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "stablelm": ("stablelm", {"rope.dimension_count": 4}),
    "starcoder": ("gpt_bigcode", {"attention.head_count_kv": 1, "feed_forward_length": 256}),
    "starcoder2": ("starcoder2", {}),
}
CHANGED: Mapping[str, Mapping[str, Any]] = {
    # Converters leave out which layers have windows: gemma2 every other one, gemma3 five of six.
    "gemma3": {"layer_types": ["sliding_attention"] * 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    # transformers reads neither soft caps nor experts' widths from files: these are its defaults.
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mistral3": {
        "rope_parameters": {
            **CASES["ministral3"][1]["rope_parameters"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "falcon, one norm": {"num_ln_in_parallel_attn": 1},
    "falcon-h1, norm": {"tie_word_embeddings": False},
    "minicpm3": MINICPM3,
    "minicpm3, longrope": {
        **MINICPM3,
        "rope_scaling": {"rope_type": "longrope", "long_factor": FACTORS4, "short_factor": FACTORS4},
        "original_max_position_embeddings": 512,
    },
    "lfm2moe": {"tie_word_embeddings": True},  # files have no head
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},  # llama.cpp knows no others
    "qwen35": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen35, layers for drafts": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen35moe": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "exaone-moe": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
    "kimi-linear": {"linear_num_heads": 4},
    "phi3, longrope": {"rope_scaling": {**CASES["phi3, longrope"][1]["rope_scaling"], "attention_factor": 1.2}},
    "qwen2vl": {"use_sliding_window": False},
    "qwen3next": {"mlp_only_layers": [], "attention_bias": False},
    "qwen3moe": {"moe_intermediate_size": 768, "num_experts_per_tok": 8},
    "starcoder2": {"sliding_window": None},
}
BOTH_FORMS = ("gemma2", "gemma3", "qwen3moe", "stablelm", "starcoder2")
"""Architectures that transformers reads from GGUF, and does so rightly for these files."""
PROMPT = [3 + 7 * i % 300 for i in range(60)]


def family_of_file(architecture: str) -> ModelFamily:
    model_type = CASES[FILES[architecture][0]][0]
    return next(family for family in FAMILIES.values() if family.model_type == model_type)


def write(
    architecture: str,
    model: transformers.PreTrainedModel,
    file: Path,
    *,
    leave_out: str = "",
    tokenizer: Path | None = None,
) -> None:
    """Write `model` as llama.cpp's converter does, with the tokenizer of a folder, or tokens that are only numbered."""
    config, family = model.config, family_of_file(architecture)
    assert family.gguf is not None
    kind = architecture.partition(",")[0]
    writer = gguf.GGUFWriter(file, kind)
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        **FILES[architecture][1],
    }
    layer_norm = next(
        (n for n in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps") if hasattr(config, n)), None
    )
    keys["attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"] = float(
        getattr(config, layer_norm or "rms_norm_eps", 1e-5)
    )
    for key, value in keys.items():
        if key == leave_out or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(f"{kind}.{key}", value)
        else:
            writer.add_key_value(f"{kind}.{key}", value, VALUE_TYPES[type(value)])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[kind], config.num_hidden_layers)
    for name, values in recurrent(stacked(model), kind, config):
        theirs = names.get_name(renamed(name), try_suffixes=(".weight", ".bias", ".scale"))
        assert theirs is not None, name
        turned = permuted(values, name, config, head_dim) if family.gguf.paired_rows else values
        whole = family.gguf.whole_norms and name.endswith("norm.weight") and "linear_attn" not in name
        writer.add_tensor(theirs, np.ascontiguousarray(turned + np.float32(whole)))
    if kind == "gemma4":
        pairs = keys["attention.key_length"] // 2
        rotated = pairs // 4
        far = np.full(pairs - rotated, 1e30, np.float32)
        writer.add_tensor("rope_freqs.weight", np.concatenate((np.ones(rotated, np.float32), far)))
    for length in ("short", "long") if "longrope" in architecture else ():
        factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if "nextn_predict_layers" in keys and kind == "qwen35":
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32))
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    finish(writer)


def renamed(name: str) -> str:
    """The name by which the converter looks a tensor up: with an ending that says what the tensor is."""
    if name.endswith("sinks"):
        return f"{name}.weight"
    name = name.replace(".mixer.experts.", ".mlp.experts.")  # as the converter calls those that are one tensor
    name = name.replace("model.", "backbone.", 1) if ".mixer." in name else name
    for ours, theirs in (
        ("gate.moe_statics", "moe_statics"),  # modules here have other names than checkpoints
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        ("e_score_correction_bias", "e_score_correction.bias"),
        ("expert_bias", "expert_bias.bias"),
        ("forget_gate.", ""),
        ("linear_attn.dt_bias", "linear_attn.dt_proj.bias"),
        ("mamba.dt_bias", "mamba.dt_proj.bias"),
        ("mixer.dt_bias", "mixer.dt_proj.bias"),
        ("self_attn.dt_bias", "self_attn.dt_proj.bias"),
        ("layer_scalar", "layer_scalar.weight"),
        ("router.scale", "router.proj.scale"),
        ("router.per_expert_scale", "experts.down_proj.scale"),
    ):
        name = name.replace(ours, theirs)
    return name


def stacked(model: transformers.PreTrainedModel) -> list[tuple[str, NDArray[np.float32]]]:
    """The tensors of a Hugging Face folder, those of all experts together."""
    found: dict[str, NDArray[np.float32]] = {}
    for name, values in model.state_dict().items():
        array = values.float().numpy()
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        base, _, leaf = name.replace("block_sparse_moe.experts.", "mlp.experts.").rpartition("experts.")
        kind = "bias" if leaf.endswith("_bias") else "weight"
        if leaf in ("gate_up_proj", "gate_up_proj_bias"):
            if model.config.model_type == "gpt_oss":  # inputs first; gates and ups take turns
                turned = array.swapaxes(1, 2) if kind == "weight" else array
                gate, up = turned[:, 0::2], turned[:, 1::2]
            elif model.config.model_type == "gemma4_text":
                found[f"{base}experts.gate_up_proj.weight"] = array
                continue
            elif model.config.model_type == "llama4_text":  # inputs first
                gate, up = np.split(array.swapaxes(1, 2), 2, axis=1)
            else:
                gate, up = np.split(array, 2, axis=1)
            found[f"{base}experts.gate_proj.{kind}"], found[f"{base}experts.up_proj.{kind}"] = gate, up
        elif leaf == "up_proj":  # Nemotron-H's have no gates
            found[f"{base}experts.up_proj.weight"] = array
        elif leaf in ("down_proj", "down_proj_bias"):
            inputs_first = model.config.model_type in ("gpt_oss", "llama4_text") and kind == "weight"
            turned = array.swapaxes(1, 2) if inputs_first else array
            found[f"{base}experts.down_proj.{kind}"] = turned
        elif name.endswith("kv_b_proj.weight") and model.config.model_type != "minicpm3":
            width = model.config.qk_nope_head_dim
            both = array.reshape(model.config.num_attention_heads, -1, array.shape[1])
            found[name.replace("kv_b", "k_b")] = both[:, :width].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, width:]
        else:
            found[name] = array[:, 0] if name.endswith(("conv.weight", "conv1d.weight")) else array
    return list(found.items())


def recurrent(
    tensors: list[tuple[str, NDArray[np.float32]]], kind: str, config: Any
) -> list[tuple[str, NDArray[np.float32]]]:
    """What converters do with tensors of Mamba-2 and gated delta nets, and with the joined networks of Granite."""
    found: list[tuple[str, NDArray[np.float32]]] = []
    for name, values in tensors:
        changed = -np.exp(values) if name.endswith("A_log") else multiplied(name, values, config)
        if "query_key_value." in name and kind in ("falcon", "gptneox"):
            changed = by_kind(changed, config)
        elif kind == "gpt2" and ".c_" in name:
            changed = changed.T
        if name.endswith("self_attn.conv1d.weight"):
            parts = zip("qkv", np.split(changed, 3), strict=True)
            found += [(name.replace("conv1d", f"{part}_conv1d"), rows[None, :, None]) for part, rows in parts]
            continue
        if name.endswith(("mamba.A_log", "mamba.D", "mixer.A_log", "mixer.D")):
            changed = changed[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            changed = changed.reshape(config.n_groups if "mixer" in name else config.mamba_n_groups, -1)
        if name.endswith("shared_mlp.input_linear.weight"):
            layer = name.removesuffix("shared_mlp.input_linear.weight")
            place = "mlp.shared_expert." if config.num_local_experts else "mlp."
            gate, up = np.split(changed, 2)
            found += [(f"{layer}{place}gate_proj.weight", gate), (f"{layer}{place}up_proj.weight", up)]
        elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
            found.append((name.replace("shared_mlp.output_linear", "mlp.down_proj"), changed))
        elif name.endswith("in_proj_qkvz.weight"):
            keys, each = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
            values_ = each * config.linear_value_head_dim
            grouped = changed.reshape(config.linear_num_key_heads, -1, changed.shape[1])
            q, k, v, z = np.split(grouped, [keys, 2 * keys, 2 * keys + values_], axis=1)
            qkv = np.concatenate([part.reshape(-1, changed.shape[1]) for part in (q, k, v)])
            found.append((name.replace("qkvz", "qkv"), qkv))
            found.append((name.replace("qkvz", "z"), z.reshape(-1, changed.shape[1])))
        elif "linear_attn." in name and kind.startswith("qwen35"):
            found.append((name, values_in_turn(name, changed, config)))
        else:
            found.append((name, changed))
    return found


def by_kind(values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """The converter moves rows of Falcon and GPT-NeoX from an order by KV head to all queries, keys, then values."""
    heads = config.num_attention_heads
    kv_heads = heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    grouped = values.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *values.shape[1:])
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def multiplied(name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """The converter multiplies weights of Falcon-H1 by the model's factors."""
    if config.model_type != "falcon_h1":
        return values
    gate, down = config.mlp_multipliers
    taken = config.attention_in_multiplier
    width, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = (width, width, state, state, config.mamba_n_heads)
    factors: Mapping[str, Any] = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * taken,
        "q_proj": taken,
        "v_proj": taken,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    found: NDArray[np.float32] = values * np.float32(factors.get(name.split(".")[-2], 1.0))
    return found


def values_in_turn(name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """The converter moves heads of values from an order by key head to one in which key heads take turns."""
    heads, width, keys = config.linear_num_value_heads, config.linear_value_head_dim, config.linear_num_key_heads
    order = np.arange(heads).reshape(keys, -1).T.flatten()
    rows = (order[:, None] * width + np.arange(width)).flatten()
    kept = 2 * keys * config.linear_key_head_dim
    moved: NDArray[np.float32] = values
    if "in_proj_qkv" in name or "conv1d" in name:
        moved = np.concatenate((values[:kept], values[kept:][rows]))
    elif "in_proj_z" in name:
        moved = values[rows]
    elif "out_proj" in name:
        moved = values[:, rows]
    elif "norm" not in name:
        moved = values[order]
    return moved


def permuted(values: NDArray[Any], name: str, config: Any, head_dim: int) -> NDArray[Any]:
    """The converter reorders rows of q and k of Llama and what is derived from it (`LlamaModel.permute`)."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


@torch.inference_mode()
def logits(path: Path, *, stages: bool = True) -> torch.Tensor:
    return Runner(path, torch.float32, borders=(1,) if stages else ()).step([(Sequence_(list(PROMPT)), len(PROMPT))])


@pytest.mark.parametrize("architecture", FILES)
def test_a_file_gives_the_logits_of_its_folder(architecture: str, tmp_path: Path) -> None:
    model_type, changed = CASES[FILES[architecture][0]]
    model = reference(model_type, {**changed, **CHANGED.get(architecture, {})})
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "file").mkdir()
    write(architecture, model, tmp_path / "file" / "model.gguf")
    stages = FILES[architecture][0] not in ONE_STAGE
    ours, theirs = (logits(tmp_path / place, stages=stages) for place in ("file/model.gguf", "folder"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    if architecture in BOTH_FORMS:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "file", gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
        )
        loaded.train(False)
        with torch.inference_mode():
            expected = loaded(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_files_of_deepseek_v3_say_deepseek2_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Kimi K2 and Moonlight: experts by sigmoid scores."""
    keys = {
        **LATENT_KEYS,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": 0.1,
    }
    monkeypatch.setitem(FILES, "deepseek2", ("deepseek_v3, yarn", keys))
    test_a_file_gives_the_logits_of_its_folder("deepseek2", tmp_path)


def test_every_family_with_a_gguf_name_has_a_case() -> None:
    found = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
    named = {name for names in found for name in (names.architecture, *names.other_architectures)}
    elsewhere = {"bailingmoe2", "llama", "qwen2", "qwen3", "step35"}
    assert named == {case.partition(",")[0] for case in FILES} | elsewhere


@pytest.mark.parametrize("key", ["context_length", "block_count", "attention.layer_norm_rms_epsilon"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    write("gemma3", reference(*CASES["gemma3"]), tmp_path / "model.gguf", leave_out=key)
    with pytest.raises(Exception, match=key):
        load_config(tmp_path / "model.gguf")


def test_what_a_family_does_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "smollm3", ("smollm3", {"logit_scale": 2.0}))
    write("smollm3", reference("smollm3", {**TINY}), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match="logit_scale"):
        load_config(tmp_path / "model.gguf")
