"""Ling 2: transformers has no class for it. GLM-4.5's computes the same, from the same numbers under other names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.models.test_gguf_families import FILES, SHARED, stacked, write
from tests.unit.engine.models.test_published import two_turns

KEYS = {
    **SHARED,
    "block_count": 5,
    "nextn_predict_layers": 1,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_shared_feed_forward_length": 32,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}


@pytest.fixture(scope="module")
def glm() -> transformers.PreTrainedModel:
    return reference(*CASES["glm4_moe"])


def published(name: str) -> str:
    """The name that Ling has for a tensor of GLM-4.5."""
    for theirs, ours in (
        ("embed_tokens", "word_embeddings"),
        ("self_attn.o_proj", "attention.dense"),
        ("self_attn.q_norm", "attention.query_layernorm"),
        ("self_attn.k_norm", "attention.key_layernorm"),
        ("e_score_correction_bias", "expert_bias"),
    ):
        name = name.replace(theirs, ours)
    return name


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors under Ling's names, queries, keys and values in one."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[published(name)] = tensor
    return found


def folder(model: transformers.PreTrainedModel, path: Path) -> Path:
    """The model as Ling-mini-2.0 is published."""
    model.save_pretrained(path)
    file = path / "model.safetensors"
    save_file(fused(load_file(file)), file)
    theirs = json.loads((path / "config.json").read_text())
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "n_group",
        "topk_group", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob",
        "routed_scaling_factor", "hidden_act", "eos_token_id",
    )  # fmt: skip
    config = {name: theirs[name] for name in same} | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
        "num_experts": theirs["n_routed_experts"],
        "num_shared_experts": theirs["n_shared_experts"],
        "partial_rotary_factor": 0.5,
        "rope_theta": theirs["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_answers_as_glm_does(glm: transformers.PreTrainedModel, tmp_path: Path) -> None:
    two_turns(glm, folder(glm, tmp_path))


def test_a_file_answers_as_glm_does(
    glm: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "bailingmoe2", ("glm4_moe", KEYS))
    tensors = fused({name: torch.from_numpy(values.copy()) for name, values in stacked(glm)})
    ling: Any = SimpleNamespace(config=glm.config, state_dict=lambda: tensors)
    write("bailingmoe2", ling, tmp_path / "model.gguf")
    two_turns(glm, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("field", "value"),
    [("score_function", "softmax"), ("norm_head", True), ("moe_router_enable_expert_bias", False)],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    family = FAMILIES["BailingMoeV2ForCausalLM"]
    with pytest.raises(UnsupportedModel, match=field):
        family.decoder(family.fields({"hidden_size": 64, field: value}, "config.json"))
