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

from benchmarks.peers.gguf_files import VALUE_TYPES, finish
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.base import ModelFamily
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, TINY, reference

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
#: By architecture of the file: case of test_families, and further metadata that converters write.
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
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 20, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("gemma3", {"attention.sliding_window": 20, "rope.freq_base": 1e6}),
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
    "hunyuan-dense": ("hunyuan", {}),
    "hunyuan-moe": (
        "hunyuan, experts",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "expert_shared_count": 1},
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
    "llama": ("mixtral", {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6}),
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
    "nemotron": ("nemotron", {"rope.dimension_count": 8}),
    "olmo": ("olmo", {"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"expert_count": 4, "expert_used_count": 2}),
    "phi3": ("phi3", {"attention.sliding_window": 20}),
    "qwen2moe": (
        "qwen2_moe",
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "qwen3moe": ("qwen3_moe", {"expert_count": 8, "expert_used_count": 8, "expert_feed_forward_length": 768}),
    "qwen3vl": ("qwen3", {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}),
    "qwen3vlmoe": (
        "qwen3_moe",
        {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "n_deepstack_layers": 3},
    ),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "stablelm": ("stablelm", {"rope.dimension_count": 4}),
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
    "lfm2moe": {"tie_word_embeddings": True},  # files have no head
    "qwen3moe": {"moe_intermediate_size": 768, "num_experts_per_tok": 8},
    "starcoder2": {"sliding_window": None},
}
BOTH_FORMS = ("gemma2", "gemma3", "qwen3moe", "stablelm", "starcoder2")
"""Architectures that transformers reads from GGUF, and does so rightly for these files."""
PROMPT = [3 + 7 * i % 300 for i in range(60)]


def family_of_file(architecture: str) -> ModelFamily:
    model_type = CASES[FILES[architecture][0]][0]
    return next(family for family in FAMILIES.values() if family.model_type == model_type)


def write(architecture: str, model: transformers.PreTrainedModel, file: Path, *, leave_out: str = "") -> None:
    """Write `model` as llama.cpp's converter does."""
    config, family = model.config, family_of_file(architecture)
    assert family.gguf is not None
    writer = gguf.GGUFWriter(file, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
        **FILES[architecture][1],
    }
    layer_norm = next((n for n in ("layer_norm_eps", "norm_epsilon", "norm_eps") if hasattr(config, n)), None)
    keys["attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"] = float(
        getattr(config, layer_norm or "rms_norm_eps", 1e-5)
    )
    for key, value in keys.items():
        if key == leave_out:
            continue
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        else:
            writer.add_key_value(f"{architecture}.{key}", value, VALUE_TYPES[type(value)])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, values in stacked(model):
        theirs = names.get_name(renamed(name), try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        turned = permuted(values, name, config, head_dim) if family.gguf.paired_rows else values
        whole = family.gguf.whole_norms and name.endswith("norm.weight")
        writer.add_tensor(theirs, np.ascontiguousarray(turned + np.float32(whole)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    finish(writer)


def renamed(name: str) -> str:
    """The name by which the converter looks a tensor up: with an ending that says what the tensor is."""
    if name.endswith("sinks"):
        return f"{name}.weight"
    for ours, theirs in (
        ("gate.moe_statics", "moe_statics"),  # modules here have other names than checkpoints
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        ("e_score_correction_bias", "e_score_correction.bias"),
        ("expert_bias", "expert_bias.bias"),
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
            else:
                gate, up = np.split(array, 2, axis=1)
            found[f"{base}experts.gate_proj.{kind}"], found[f"{base}experts.up_proj.{kind}"] = gate, up
        elif leaf in ("down_proj", "down_proj_bias"):
            turned = array.swapaxes(1, 2) if model.config.model_type == "gpt_oss" and kind == "weight" else array
            found[f"{base}experts.down_proj.{kind}"] = turned
        elif name.endswith("kv_b_proj.weight"):
            width = model.config.qk_nope_head_dim
            both = array.reshape(model.config.num_attention_heads, -1, array.shape[1])
            found[name.replace("kv_b", "k_b")] = both[:, :width].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, width:]
        else:
            found[name] = array[:, 0] if name.endswith("conv.weight") else array
    return list(found.items())


def permuted(values: NDArray[Any], name: str, config: Any, head_dim: int) -> NDArray[Any]:
    """The converter reorders rows of q and k of Llama and what is derived from it (`LlamaModel.permute`)."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


@torch.inference_mode()
def logits(path: Path) -> torch.Tensor:
    return Runner(path, torch.float32, borders=(1,)).step([(Sequence_(list(PROMPT)), len(PROMPT))])


@pytest.mark.parametrize("architecture", FILES)
def test_a_file_gives_the_logits_of_its_folder(architecture: str, tmp_path: Path) -> None:
    model_type, changed = CASES[FILES[architecture][0]]
    model = reference(model_type, {**changed, **CHANGED.get(architecture, {})})
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "file").mkdir()
    write(architecture, model, tmp_path / "file" / "model.gguf")
    ours, theirs = logits(tmp_path / "file" / "model.gguf"), logits(tmp_path / "folder")
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
    assert named == FILES.keys() | {"llama", "qwen2", "qwen3"}


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
