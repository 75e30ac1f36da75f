"""Ling 2 and 2.5: transformers has no class for them.

GLM-4.5's computes the same as Ling 2, from the same numbers under other names. Ling 2.5 is DeepSeek V3 with linear
attention in most layers, which is written here by its formula.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from tests.unit.engine.models.test_families import CASES, GROUPS, LATENT, ROUTED, TINY, draw, reference
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


class LightningAttention(torch.nn.Module):
    """Ling 2.5's linear attention, each pair of tokens by itself: the published modelling code's formula."""

    HEADS, SIZE, ROTATED, GROUPS = 6, 16, 8, 3

    def __init__(self, hidden: int, layer: int, layers: int) -> None:
        super().__init__()
        width = self.HEADS * self.SIZE
        self.query_key_value = torch.nn.Linear(hidden, 3 * width, bias=False)
        self.g_proj = torch.nn.Linear(hidden, width, bias=False)
        self.dense = torch.nn.Linear(width, hidden, bias=False)
        self.query_layernorm, self.key_layernorm = (torch.nn.RMSNorm(self.SIZE, eps=1e-6) for _ in range(2))
        self.g_norm = torch.nn.RMSNorm(width, eps=1e-6)
        slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # of ALiBi with six heads
        self.decay = -torch.tensor(slopes) * (1 - (layer - 1) / (layers - 1) + 1e-5)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        tokens = hidden_states.shape[1]
        q, k, v = self.query_key_value(hidden_states[0]).view(tokens, 3, self.HEADS, self.SIZE).unbind(1)
        q, k = self._rotated(self.query_layernorm(q)), self._rotated(self.key_layernorm(k))
        apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)).clamp(min=0)
        seen = torch.ones(tokens, tokens).tril()[..., None] * (apart[..., None] * self.decay).exp()
        scores = torch.einsum("thd,shd->tsh", q, k) * self.SIZE**-0.5 * seen
        found = torch.einsum("tsh,shd->thd", scores, v).reshape(tokens, self.GROUPS, -1)
        normed = functional.rms_norm(found, found.shape[2:], None, 1e-6).flatten(1) * self.g_norm.weight
        return self.dense(normed * torch.sigmoid(self.g_proj(hidden_states[0])))[None], None

    def _rotated(self, heads: Tensor) -> Tensor:
        """Half of each head is rotated, its two halves together."""
        half = self.ROTATED // 2
        angles = torch.arange(len(heads))[:, None, None] * 6e5 ** (-torch.arange(half) / half)
        first, second, rest = torch.split(heads, [half, half, self.SIZE - self.ROTATED], dim=2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2)


def hybrid() -> transformers.PreTrainedModel:
    """DeepSeek V3 with six heads and five layers, of which the first and the third have linear attention."""
    sizes: dict[str, Any] = {**TINY, **LATENT, **ROUTED, **GROUPS}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 5, "rope_theta": 6e5}
    model = reference("deepseek_v3", sizes)
    for index in (0, 2):
        model.model.layers[index].self_attn = LightningAttention(64, index, 5)
    draw(model, tied=False)
    model.train(False)
    return model


def hybrid_folder(model: transformers.PreTrainedModel, path: Path) -> Path:
    """The model as Ling-2.5-1T is published."""
    model.config.save_pretrained(path)
    theirs = json.loads((path / "config.json").read_text())
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in (
            ("embed_tokens", "word_embeddings"),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.", "attention."),
            ("e_score_correction_bias", "expert_bias"),
        ):
            name = name.replace(old, new)
        if name.endswith("experts.gate_up_proj"):
            for expert, rows in enumerate(tensor):
                for part, values in zip(("gate", "up"), rows.chunk(2), strict=True):
                    tensors[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = values.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "n_group",
        "topk_group", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob",
        "routed_scaling_factor", "hidden_act", "eos_token_id", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
        "qk_nope_head_dim", "v_head_dim",
    )  # fmt: skip
    config = {name: theirs[name] for name in same} | {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "num_experts": 8,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 6e5,
        "rope_scaling": None,
        "rope_interleave": True,
        "layer_group_size": 2,
        "group_norm_size": 3,
        "num_kv_heads_for_linear_attn": 6,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "linear_silu": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_of_ling_2_5_answers_by_its_formula(tmp_path: Path) -> None:
    model = hybrid()
    two_turns(model, hybrid_folder(model, tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [("linear_silu", True), ("use_bias", True), ("num_kv_heads_for_linear_attn", 3), ("group_norm_size", 5)],
)
def test_what_is_not_built_of_ling_2_5_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    family = FAMILIES["BailingMoeV2_5ForCausalLM"]
    fields = json.loads((hybrid_folder(hybrid(), tmp_path) / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=field):
        family.decoder(family.fields({**fields, field: value}, "config.json"))
