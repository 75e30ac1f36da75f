"""Step 3.5: transformers has the text part of Step 3.7 alone, which computes the same."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.step3p7 import Step3p7TextConfig, Step3p7TextModel

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.formats import tensor_index
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES
from tests.unit.engine.models.test_families import TINY, draw
from tests.unit.engine.models.test_gguf_families import FILES, write
from tests.unit.engine.models.test_published import two_turns
from tests.unit.engine.models.test_ranks import answer
from tests.unit.engine.ranks import ranked

KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
#: config.json as it is published, in small; lists have an entry for a layer that only drafts.
PUBLISHED = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_attention_groups": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "max_seq_len": 512,
    "layer_types": [*KINDS, "sliding_attention"], "sliding_window": 20, "num_nextn_predict_layers": 1,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16,
    },
    "use_head_wise_attn_gate": True, "use_moe": True, "moe_layers_enum": "1,2,3", "moe_num_experts": 8,
    "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 40, "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid", "norm_expert_weight": True, "use_moe_router_bias": True,
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": LLAMA3, "yarn_only_types": ["full_attention"], "zero_centered": True,
    "swiglu_limits": [0.0, 0.0, 0.3, 0.2, 0.0], "swiglu_limits_shared": [0.25, 0.0, 0.5, 0.0, 0.0],
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip


#: What llama.cpp's converter writes; lists have an entry for the layer that only drafts.
KEYS = {
    "block_count": 5, "nextn_predict_layers": 1, "attention.head_count": [4, 6, 6, 4, 6],
    "attention.head_count_kv": [2] * 5, "attention.sliding_window": 20,
    "attention.sliding_window_pattern": [False, True, True, False, True], "rope.dimension_count": 16,
    "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "expert_count": 8, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 40, "expert_weights_scale": 3.0,
    "expert_weights_norm": True, "leading_dense_block_count": 1, "moe_every_n_layers": 1,
    "swiglu_clamp_exp": [0.0, 0.0, 0.3, 0.2, 0.0], "swiglu_clamp_shexp": [0.25, 0.0, 0.5, 0.0, 0.0],
}  # fmt: skip


def reference() -> tuple[Step3p7TextModel, torch.Tensor]:
    """The decoder of transformers and an output head, with weights drawn from one seed."""
    sizes: dict[str, Any] = {**TINY}
    config = Step3p7TextConfig(
        **sizes,
        head_dim=16,
        layer_types=KINDS,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=20,
        num_sliding_attention_heads=6,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        share_expert_dim=40,
        moe_router_scaling_factor=3.0,
        swiglu_limits=[0.0, 0.0, 0.3, 0.2],
        swiglu_limits_shared=[0.25, 0.0, 0.5, 0.0],
        rope_parameters={
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, **LLAMA3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    )
    model = Step3p7TextModel(config)
    generator = draw(model, tied=False)
    return model.train(False), torch.randn(320, 64, generator=generator) * 0.15


def published(name: str) -> str:
    """The name that a published folder has for a tensor."""
    for theirs, ours in (
        ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
        ("mlp.gate.weight", "moe.gate.weight"),
        ("mlp.experts.down_proj", "moe.down_proj.weight"),
        ("mlp.shared_experts.", "share_expert."),
    ):
        name = name.replace(theirs, ours)
    return f"model.{name}"


def folder(model: torch.nn.Module, head: torch.Tensor, path: Path, *, pictures: bool) -> Path:
    """The model as Step-3.5-Flash is published: all experts of a layer are one tensor, gates and ups apart.

    `pictures`: as Step 3.7 is, with an encoder of pictures.
    """
    tensors = {"lm_head.weight": head}
    for name, tensor in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            layer = name.removesuffix("mlp.experts.gate_up_proj")
            for part, values in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                tensors[f"model.{layer}moe.{part}_proj.weight"] = values.contiguous()
        else:
            tensors[published(name)] = tensor
    config: dict[str, Any] = PUBLISHED
    if pictures:
        tensors["vision_model.conv1.weight"] = torch.zeros(4, 3, 2, 2)
        config = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "vision_config": {}}
        config["text_config"] = {name: value for name, value in PUBLISHED.items() if name != "architectures"}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def whole(model: Step3p7TextModel, head: torch.Tensor) -> Callable[[torch.Tensor], SimpleNamespace]:
    """What gives the logits, as a model with its head does."""

    def logits(ids: torch.Tensor) -> SimpleNamespace:
        with torch.no_grad():
            return SimpleNamespace(logits=model(input_ids=ids).last_hidden_state @ head.T)

    return logits


@pytest.mark.parametrize("pictures", [False, True])
def test_a_folder_answers_as_the_text_part_of_step_3_7_does(pictures: bool, tmp_path: Path) -> None:
    model, head = reference()
    answering: Callable[..., Any] = whole(model, head)
    two_turns(answering, folder(model, head, tmp_path, pictures=pictures))  # type: ignore[arg-type]


def test_a_folder_in_fp8_has_scales_of_blocks_for_all_experts_together(tmp_path: Path) -> None:
    """As Step-3.5-Flash-FP8 is published."""
    model, head = reference()
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales = fp8(weight)
            weight.data.copy_(codes.float() * scales.repeat_interleave(16, 1).repeat_interleave(16, 2))
    file = folder(model, head, tmp_path, pictures=False) / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".moe." in name and name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = fp8(tensors[name])
    save_file(tensors, file)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, "quantization_config": settings}))
    assert all(tensor.keeps_codes for name, tensor in tensor_index(tmp_path).items() if ".moe.experts." in name)
    answering: Callable[..., Any] = whole(model, head)
    two_turns(answering, tmp_path)  # type: ignore[arg-type]


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks of 16 by 16, of [experts, outputs, inputs]."""
    blocks = torch.unflatten(torch.unflatten(weight.detach(), 1, (-1, 16)), 3, (-1, 16))
    scales = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(weight.shape), scales


def test_a_file_answers_as_the_text_part_of_step_3_7_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms that hold their offset, and Llama 3's divisors, which the file pads for layers with windows."""
    model, head = reference()
    folder(model, head, tmp_path, pictures=False)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] += 1.0
    tensors |= {f"{name}.bias": tensors.pop(name) for name in list(tensors) if name.endswith("router_bias")}
    scaled = model.rotary_emb.get_buffer("full_attention_inv_freq")
    plain = 5e6 ** -(torch.arange(0, 8, 2).float() / 8)
    tensors["rope.freqs.weight"] = torch.cat((plain / scaled, torch.ones(4)))
    assert float((plain / scaled).max()) == 2.0
    converted: Any = SimpleNamespace(config=model.config, state_dict=lambda: tensors)
    monkeypatch.setitem(FILES, "step35", ("glm4_moe", KEYS))
    (tmp_path / "file").mkdir()
    write("step35", converted, tmp_path / "file" / "model.gguf")
    answering: Callable[..., Any] = whole(model, head)
    two_turns(answering, tmp_path / "file" / "model.gguf")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", ["one", [1, 1]])
def test_a_file_with_a_wrong_number_of_dense_layers_is_refused(
    layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged file has it."""
    model, head = reference()
    tensors = {"model.embed_tokens.weight": head}
    converted: Any = SimpleNamespace(config=model.config, state_dict=lambda: tensors)
    monkeypatch.setitem(FILES, "step35", ("glm4_moe", {**KEYS, "leading_dense_block_count": layers}))
    write("step35", converted, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="first_k_dense_replace"):
        load_config(tmp_path / "model.gguf")


def test_a_tensor_of_experts_without_end_is_refused_soon(tmp_path: Path) -> None:
    """Without elements it takes no bytes of the file."""
    part = {"dtype": "F32", "shape": [10**9, 0, 16], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.1.moe.up_proj.weight": part}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(CheckpointError, match=r"moe\.up_proj\.weight has 1000000000 experts, more than 4096"):
        tensor_index(tmp_path)


def test_ranks_have_the_gates_of_their_heads(tmp_path: Path) -> None:
    folder(*reference(), tmp_path, pictures=False)
    with ranked(tmp_path, 1) as alone, ranked(tmp_path, 2) as several:
        assert answer(several, 6) == answer(alone, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_head_wise_attn_gate", False),
        ("moe_router_activation", "softmax"),
        ("attention_other_setting", {"num_attention_groups": 4}),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    family = FAMILIES["Step3p5ForCausalLM"]
    with pytest.raises(UnsupportedModel, match=field):
        family.decoder(family.fields({**PUBLISHED, field: value}, "config.json"))
