"""LoRA adapters' folders: what is read, what is refused and by which name, and identity."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.base.checkpoint.lora import CONFIG, WEIGHTS, check_rank, read_adapter
from moonpool.base.errors import CheckpointError, UnsupportedModel

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def write(folder: Path, settings: Mapping[str, Any] | None = None, ranks: Mapping[str, int] | None = None) -> Path:
    """An adapter of two modules, 6 inputs and 10 outputs each."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, rank in (ranks or {Q: 4, DOWN: 4}).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((rank, 6), 0.5)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((10, rank), 0.25)
    save_file(tensors, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps({**fields, **(settings or {})}))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_modules_ranks_and_scales(tmp_path: Path) -> None:
    lora = read_adapter(write(tmp_path / "a", {"base_model_name_or_path": "some/model", "lora_dropout": 0.1}))
    assert lora.base_model == "some/model"
    assert list(lora.modules) == [Q, DOWN]
    module = lora.modules[Q]
    assert (module.rank, module.scale, module.inputs, module.outputs) == (4, 2.0, 6, 10)
    assert lora.rank == 4
    rooted = read_adapter(write(tmp_path / "b", {"use_rslora": True}))
    assert rooted.modules[Q].scale == 4.0
    patterns = {"rank_pattern": {"q_proj": 2, r"layers\.\d+\.self_attn\..*": 3}, "alpha_pattern": {"down_proj": 1}}
    patterned = read_adapter(write(tmp_path / "c", patterns, {Q: 2, DOWN: 4}))
    assert [(module.rank, module.scale) for module in patterned.modules.values()] == [(2, 4.0), (4, 0.25)]
    assert patterned.rank == 4


def test_the_largest_rank_is_bounded(tmp_path: Path) -> None:
    lora = read_adapter(write(tmp_path / "a"))
    check_rank(lora, 4)
    with pytest.raises(UnsupportedModel, match="rank 4, the setting allows 3") as refused:
        check_rank(lora, 3)
    assert refused.value.field == "max_lora_rank"


def test_identity_is_the_content(tmp_path: Path) -> None:
    """The same files elsewhere are the same adapter; one changed weight, or a changed setting, is another adapter."""
    first = read_adapter(write(tmp_path / "a"))
    assert len(first.id) == 32
    assert read_adapter(write(tmp_path / "b")).id == first.id
    folder = write(tmp_path / "c")
    change_tensors(folder, lambda tensors: tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0].add_(1e-3))
    assert read_adapter(folder).id != first.id
    assert read_adapter(write(tmp_path / "d", {"lora_alpha": 9})).id != first.id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("a_setting_of_tomorrow", {"x": 1}),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_adapter(write(tmp_path / "a", {name: value}))
    assert refused.value.field == f"adapter_config.json: {name}"


def test_settings_that_change_nothing_are_taken(tmp_path: Path) -> None:
    """As PEFT writes them, in full."""
    given: dict[str, object] = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "bias": "none", "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
        "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
        "layer_replication": None, "layers_pattern": None, "layers_to_transform": [0, 1], "loftq_config": {},
        "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
        "modules_to_save": None, "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {},
        "revision": None, "target_modules": ["q_proj", "down_proj"], "target_parameters": None,
        "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
    }  # fmt: skip
    assert read_adapter(write(tmp_path / "a", given)).rank == 4


@pytest.mark.parametrize(
    "name", ["base_model.model.model.embed_tokens.lora_embedding_A", "base_model.model.lm_head.weight"]
)
def test_tensors_of_other_kinds_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(UnsupportedModel) as refused:
        read_adapter(folder)
    assert refused.value.field == name


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"r": 5})
    with pytest.raises(CheckpointError, match=r"q_proj has lora_A \[4, 6\] and lora_B \[10, 4\]; .* says rank 5"):
        read_adapter(folder)
    folder = write(tmp_path / "b")
    change_tensors(folder, lambda tensors: tensors.pop(f"base_model.model.{DOWN}.lora_B.weight"))
    with pytest.raises(CheckpointError, match=r"down_proj has only lora_A.weight"):
        read_adapter(folder)
    with pytest.raises(CheckpointError, match=r"r must be a number"):
        read_adapter(write(tmp_path / "c", {"r": "4"}))
    with pytest.raises(CheckpointError, match=r"rank_pattern: '\(' is no regular expression"):
        read_adapter(write(tmp_path / "d", {"rank_pattern": {"(": 4}}))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no adapter_config.json in this folder"):
        read_adapter(tmp_path)
    folder = write(tmp_path / "a")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors .* pickle file, and those are never"):
        read_adapter(folder)
    folder = write(tmp_path / "b")
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="cut short"):
        read_adapter(folder)
    folder = write(tmp_path / "c")
    (folder / CONFIG).write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        read_adapter(folder)
