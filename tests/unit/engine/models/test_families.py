"""Every family: transformers makes a tiny checkpoint, and greedy float32 tokens are the same.

Prompts are computed whole, and in chunks beside decode steps over two stages, where each sequence is preempted once;
then a prompt is continued behind the blocks of another. Windows are shorter than prompts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.config import config_hash
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.wrapped import WRAPPER
from tests.unit.engine.models.forward import Runner
from tests.unit.engine.models.test_parity import assert_greedy

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WINDOW = {"sliding_window": 20}
HEAD = {"head_dim": 16}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA4 = {"intermediate_size_mlp": 80}
GEMMA4 = {**HEAD, **WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
CONV = ["conv", "full_attention", "conv", "conv"]
LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "shared_intermediate_size": 48}
DELTA = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
SHARED = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
HYBRID = {"tie_word_embeddings": False}
NEMOTRON_H = {
    **HEAD,
    **ROUTED,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
MIXED = ["linear_attention", "full_attention"]
FALCON_H1 = {
    "mamba_d_ssm": 80,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.8, 0.6],
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "arcee": ("arcee", HEAD),
    "cohere": ("cohere", {}),
    "cohere, norms": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {**HEAD, **WINDOW}),
    "cwm": ("cwm", {**HEAD, **WINDOW}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, **ROUTED, "head_dim": 8, "first_k_dense_replace": 1}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {**LATENT, **ROUTED, **GROUPS, "head_dim": 8, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **ROUTED, **GROUPS}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {**LATENT, **ROUTED, **GROUPS, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v32": ("deepseek_v32", {**LATENT, **ROUTED, **GROUPS, **INDEXED}),
    "dots1": (
        "dots1",
        {**HEAD, **ROUTED, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "ernie4_5": ("ernie4_5", HEAD),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 3},
    ),
    "exaone4": ("exaone4", {**WINDOW, "sliding_window_pattern": 4}),
    "exaone4, full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone_moe": (
        "exaone_moe",
        {**HEAD, **WINDOW, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "falcon": ("falcon", {"num_kv_heads": 1}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, all heads": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_h1": ("falcon_h1", {**MAMBA, **FALCON_H1}),
    "falcon_h1, norm": (
        "falcon_h1",
        {**MAMBA, **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "gemma": ("gemma", HEAD),
    "granite, hybrid": ("granitemoehybrid", {**FACTORS, **LOCAL, **MAMBA, "layer_types": LINEAR}),
    "granite, hybrid, dense": (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": LINEAR,
            "mamba_n_groups": 1,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **HEAD,
            **WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "layer_types": ALTERNATING,
        },
    ),
    "gemma3": ("gemma3_text", {**HEAD, **WINDOW, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING}),
    "glm": ("glm", HEAD),
    "glm4": ("glm4", HEAD),
    "glm4_moe": ("glm4_moe", {**HEAD, **ROUTED, **GROUPS, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**LATENT, **ROUTED, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, **ROUTED, **INDEXED, "mlp_layer_types": ["dense", *["sparse"] * 3]}),
    "glm_moe_dsa, shared choices": (
        "glm_moe_dsa",
        {**LATENT, **ROUTED, **INDEXED, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_oss": ("gpt_oss", {**HEAD, **WINDOW, **LOCAL, "layer_types": ALTERNATING}),
    "granite": ("granite", FACTORS),
    "granite_swa": ("granite_swa", {**FACTORS, **WINDOW}),
    "granite_swa, bases": ("granite_swa", {**WINDOW, "layer_rope_theta": [0, 10000.0, 500.0, 10000.0]}),
    "granitemoe": ("granitemoe", {**FACTORS, **LOCAL}),
    "granitemoe_swa": ("granitemoe_swa", {**FACTORS, **LOCAL, **WINDOW, "shared_intermediate_size": 48}),
    "granitemoeshared": ("granitemoeshared", {**FACTORS, **LOCAL, "shared_intermediate_size": 48}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "helium": ("helium", HEAD),
    "hunyuan": ("hunyuan_v1_dense", HEAD),
    "hunyuan, alpha": (
        "hunyuan_v1_dense",
        {**HEAD, "rope_scaling": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}},
    ),
    "hunyuan, experts": ("hunyuan_v1_moe", {**HEAD, "num_experts": 4, "moe_topk": 2}),
    "hyperclovax": ("hyperclovax", FACTORS),
    "jais2": ("jais2", {}),
    "kimi_linear": (
        "kimi_linear",
        {
            **LATENT,
            **DELTA,
            "linear_head_dim": 12,
            "linear_num_heads": 3,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "layer_types": LINEAR,
            "q_lora_rank": None,
        },
    ),
    "lfm2": ("lfm2", {**HYBRID, "layer_types": CONV}),
    "lfm2, biases": ("lfm2", {"full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 16}),
    "lfm2_moe": ("lfm2_moe", {**HYBRID, **ROUTED, "num_experts": 8, "num_dense_layers": 1, "layer_types": CONV}),
    "llama": ("llama", {}),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "llama, dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama4": (
        "llama4_text",
        {**HEAD, **LOCAL, **LLAMA4, "attention_chunk_size": 20, "floor_scale": 16, "interleave_moe_layer_step": 2},
    ),
    "llama4, layers": (
        "llama4_text",
        {
            **HEAD,
            **LOCAL,
            **LLAMA4,
            "attention_chunk_size": 16,
            "num_experts_per_tok": 1,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1, 1],
            "attn_temperature_tuning": False,
        },
    ),
    "gemma4": ("gemma4_text", {**GEMMA4, "final_logit_softcapping": 20.0}),
    "gemma4, embeddings for each layer": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
    ),
    "gemma4, shared KV": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4, values of keys": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4, experts": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4, unified": (
        "gemma4_unified_text",
        {**HEAD, **WINDOW, "global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "mellum": (
        "mellum",
        {
            **HEAD,
            **WINDOW,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "layer_types": ALTERNATING,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **WINDOW,
            **ROUTED,
            "head_dim": 24,
            "v_head_dim": 12,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "minicpm3": ("minicpm3", {**LATENT, "dim_model_base": 32}),
    "minicpm3, no factors": ("minicpm3", {**LATENT, "v_head_dim": None, "scale_depth": None, "dim_model_base": None}),
    "minimax_m2": ("minimax_m2", {**HEAD, **LOCAL}),
    "minimax_m2, half rotated": (
        "minimax_m2",
        {
            **HEAD,
            **LOCAL,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "ministral": ("ministral", {**HEAD, **WINDOW}),
    "ministral3": (
        "ministral3",
        {**HEAD, "rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
    ),
    "mistral": ("mistral", WINDOW),
    "mixtral": ("mixtral", LOCAL),
    "nemotron": ("nemotron", HEAD),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", *MIXED, "mlp"]}),
    "nemotron_h, experts": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", *MIXED, "moe"], "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h, latent experts": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": [*MIXED, "moe"], "moe_latent_size": 48},
    ),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW),
    "olmo3, yarn": ("olmo3", {**WINDOW, "rope_scaling": YARN}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("opt", {"ffn_dim": 96, "num_key_value_heads": 4}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", WINDOW),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 2.0],
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "phi4 mini": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3": ("qwen3", HEAD),
    "qwen3_moe": (
        "qwen3_moe",
        {**HEAD, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "qwen3_5": ("qwen3_5_text", {**HEAD, **DELTA, "layer_types": LINEAR}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**HEAD, **DELTA, **SHARED, "num_experts": 8, "num_experts_per_tok": 2, "layer_types": LINEAR},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **HEAD,
            **DELTA,
            **SHARED,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "seed_oss": ("seed_oss", HEAD),
    "solar_open": ("solar_open", {**HEAD, **ROUTED, "n_group": 4, "topk_group": 2}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", WINDOW),
    "vaultgemma": ("vaultgemma", {**HEAD, **WINDOW, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING}),
    "youtu": ("youtu", LATENT),
}
ONE_STAGE = ("gemma4, embeddings for each layer", "gemma4, shared KV")
LENGTHS, NEW = (5, 33, 80), 8
WHOLE_NEW = 3
"""New tokens of prompts that are computed whole: their later steps are those of the chunked ones."""


@torch.no_grad()
def reference(model_type: str, changed: Mapping[str, Any]) -> transformers.PreTrainedModel:
    """A model with weights drawn from one seed: norms and biases differ from 1 and 0, so that each is seen."""
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changed})
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    draw(model, tied=config.tie_word_embeddings)
    return model


@torch.no_grad()
def draw(model: torch.nn.Module, *, tied: bool) -> torch.Generator:
    """Draw a model's weights from one seed; returns where the numbers come from."""
    generator = torch.Generator().manual_seed(6)
    stored = model.state_dict().keys()
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name not in stored:
            continue
        drawn = torch.randn(weight.shape, generator=generator)
        if "correction" in name:
            weight.copy_(drawn * 0.1)
        elif "inv_freq" in name or "embed_scale" in name or not weight.dim():
            continue
        elif "norm" in name or "ln_" in name or "sinks" in name:
            weight.add_(drawn * (0.2 if name.endswith("weight") or "sinks" in name else 0.05))
        elif name.endswith("bias"):
            weight.copy_(drawn * 0.1)
        elif any(word in name for word in ("embed", "wte", "wpe")):
            weight.copy_(drawn * (0.06 if tied else 0.5))
        else:
            weight.copy_(drawn * 1.2 / weight.shape[-1] ** 0.5)
    return generator


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = reference(*CASES[case])
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]
    whole = Runner(tmp_path, torch.float32).generate(prompts, WHOLE_NEW, chunk=1000, budget=1000)
    runner = Runner(tmp_path, torch.float32, borders=() if case in ONE_STAGE else (1,))
    chunked = runner.generate(prompts, NEW, chunk=16, budget=40, preempted_after=5)
    branch = [*prompts[-1][:43], 7, 8, 9]
    whole_blocks = runner.last.blocks[:2]
    behind = runner.generate([branch], 4, chunk=16, budget=40, cached=runner.last)
    assert runner.last.blocks[:2] == whole_blocks
    assert_greedy(model, branch, behind[0])
    for prompt, output, other in zip(prompts, whole, chunked, strict=True):
        for answer in [other] if other[:WHOLE_NEW] == output else [output, other]:
            assert_greedy(model, prompt, answer)


def test_long_factors_of_longrope_hold_for_all_sequences_if_asked_for(tmp_path: Path) -> None:
    """transformers takes the long factors for sequences beyond the original length, as all of these are."""
    scaling = {**CASES["phi3, longrope"][1]["rope_scaling"], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]}
    model = reference("phi3", {"original_max_position_embeddings": 24, "rope_scaling": scaling})
    model.save_pretrained(tmp_path)
    short, long = load_config(tmp_path), load_config(tmp_path, max_model_len=25)
    assert load_config(tmp_path, max_model_len=24) == short
    assert (short.max_position_embeddings, long.max_position_embeddings) == (24, 512)
    assert config_hash(short) != config_hash(long)
    prompts = [list(range(3, 3 + length)) for length in (33, 80)]
    answers = Runner(tmp_path, torch.float32, borders=(1,), config=long).generate(prompts, NEW, chunk=16, budget=40)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(model, prompt, answer)


@pytest.mark.parametrize(
    ("case", "architecture", "body", "head"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.", "lm_head."),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model.", "lm_head."),
        ("gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
        ("gemma4, experts", "Gemma4ForConditionalGeneration", "model.language_model.", "lm_head."),
        ("llama4", "Llama4ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
    ],
)
def test_the_text_part_of_a_model_with_pictures(
    case: str, architecture: str, body: str, head: str, tmp_path: Path
) -> None:
    reference(*CASES[case]).save_pretrained(tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    whole = {"architectures": [architecture], "model_type": "other", "text_config": config}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    tensors = with_whole_experts(load_file(tmp_path / "text" / "model.safetensors"))
    renamed = {
        head + name.removeprefix("lm_head.")
        if name.startswith("lm_head.")
        else body + name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "whole" / "model.safetensors")
    prompt = [list(range(3, 50))]
    text, found = (
        Runner(tmp_path / part, torch.float32).generate(prompt, 4, chunk=100, budget=100) for part in ("text", "whole")
    )
    assert found == text


def with_whole_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer as two tensors, as such models are published; transformers saves each expert's."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name or name.endswith("_proj")}
    for name in tensors:
        if not name.endswith(".experts.0.gate_proj.weight"):
            continue
        prefix, count = name.removesuffix("0.gate_proj.weight"), sum("experts" in tensor for tensor in tensors) // 3
        numbers = [n for n in range(count) if f"{prefix}{n}.up_proj.weight" in tensors]
        gates, ups, downs = (
            torch.stack([tensors[f"{prefix}{n}.{part}_proj.weight"] for n in numbers])
            for part in ("gate", "up", "down")
        )
        found |= {f"{prefix}gate_up_proj": torch.cat((gates, ups), dim=1), f"{prefix}down_proj": downs}
    return found


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("KimiLinearForCausalLM", "mla_use_nope", False),
        ("KimiLinearForCausalLM", "moe_router_activation_func", "softmax"),
        ("GraniteMoeHybridForCausalLM", "time_step_limit", [0.1, 1.0]),
        ("Lfm2ForCausalLM", "layer_types", ["conv", "sliding_attention", "conv", "conv"]),
    ],
)
def test_what_a_hybrid_cannot_be_is_refused_by_name(architecture: str, field: str, value: Any) -> None:
    family = FAMILIES[architecture]
    config = transformers.AutoConfig.for_model(family.model_type, **{**TINY, "layer_types": LINEAR}).to_dict()
    with pytest.raises(UnsupportedModel, match=field):
        family.decoder(family.fields({**config, field: value}, "config.json"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_kv_shared_layers", 4), ("use_bidirectional_attention", "all")],
)
def test_what_gemma_4_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    family = FAMILIES["Gemma4ForCausalLM"]
    config = transformers.AutoConfig.for_model("gemma4_text", **{**TINY, **GEMMA4}).to_dict()
    with pytest.raises(UnsupportedModel, match=field):
        family.decoder(family.fields({**config, field: value}, "config.json"))


def test_every_family_has_a_case() -> None:
    decoders = {family.model_type for name, family in FAMILIES.items() if not name.endswith(WRAPPER)}
    assert decoders == {model_type for model_type, _ in CASES.values()} | set(WITHOUT_CLASS)


WITHOUT_CLASS = ("bailing_hybrid", "bailing_moe", "step3p5")
"""Families that transformers has no class for; they have tests of their own."""


@pytest.mark.parametrize(
    "family",
    {each.model_type: each for each in FAMILIES.values() if each.model_type not in WITHOUT_CLASS}.values(),
)
def test_absent_keys_have_the_defaults_of_transformers(family: Any) -> None:
    theirs = transformers.AutoConfig.for_model(family.model_type).to_dict()
    rope = theirs.get("rope_parameters") or {}
    for key, value in {**family.sizes, **family.defaults}.items():
        if key in ("rope_theta", "partial_rotary_factor"):
            found = theirs.get(key, rope.get(key, rope.get("full_attention", {}).get(key)))
        elif key in DIFFERENT.get(family.model_type, ()):
            continue
        else:
            found = theirs.get(key)
        assert found == value or (isinstance(value, dict) and value.items() <= found.items()), key


DIFFERENT: Mapping[str, tuple[str, ...]] = {
    # Set to null where `use_sliding_window` is not set: the default shows where it is.
    "qwen2": ("sliding_window",),
    "qwen2_moe": ("sliding_window",),
    "qwen3": ("sliding_window",),
    "qwen3_moe": ("sliding_window",),
    # -1 stands for the last layer, which the class works out.
    "ernie4_5_moe": ("moe_layer_end_index",),
    # Published configurations have the key, and transformers' layers read it; its configurations do not name it.
    "deepseek_v32": ("indexer_rope_interleave",),
    "glm_moe_dsa": ("indexer_rope_interleave",),
}
