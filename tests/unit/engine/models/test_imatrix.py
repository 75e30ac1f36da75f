"""Importance matrices of llama.cpp, in both forms: read, checked, and used where weights are packed in 4 bits."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moonpool.base.checkpoint import ModelConfig, load_config
from moonpool.base.errors import CheckpointError
from moonpool.engine.models.imatrix import read_imatrix
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights.packing import pack_int4
from tests.unit.engine.models.test_families import CASES, reference

Entries = Mapping[str, NDArray[np.float32]]
"""Mean squares by GGUF's names, [inputs] or [experts, inputs]."""


def older(path: Path, entries: Entries) -> Path:
    """As llama-imatrix wrote files until 2025, after three calls each; the text's name lies behind."""
    parts = [struct.pack("<i", len(entries))]
    for name, means in entries.items():
        encoded = name.encode()
        parts.append(struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", 3, means.size))
        parts.append((means * np.float32(3)).astype(np.float32).tobytes())
    path.write_bytes(b"".join(parts) + struct.pack("<ii", 3, 4) + b"text")
    return path


def newer(path: Path, entries: Entries, kind: str = "imatrix") -> Path:
    """As llama-imatrix writes files now, after seven tokens of each matrix."""
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type(kind)
    for name, means in entries.items():
        rows = means.reshape(-1, means.shape[-1])
        writer.add_tensor(f"{name}.in_sum2", rows * np.float32(7))
        writer.add_tensor(f"{name}.counts", np.full((len(rows), 1), 7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_entries(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(3)
    spec = config.decoder.layers[0].feed_forward
    made = {}
    for layer in range(config.num_layers):
        for name in ("attn_q", "attn_k", "attn_v"):
            made[f"blk.{layer}.{name}.weight"] = generator.random(config.hidden_size, np.float32)
        if spec.experts is None:
            made[f"blk.{layer}.ffn_down.weight"] = generator.random(spec.inner, np.float32)
        else:
            shapes = {"ffn_gate_exps": config.hidden_size, "ffn_down_exps": spec.experts.inner}
            for name, inputs in shapes.items():
                made[f"blk.{layer}.{name}.weight"] = generator.random((spec.experts.count, inputs), np.float32)
    return made


@pytest.mark.parametrize("write", [older, newer])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mixtral"])
def test_weights_are_packed_by_importance(shape: str, write: Any, tmp_path: Path) -> None:
    path = create(shape, tmp_path / "model", 3, "float32")
    config = load_config(path)
    entries = random_entries(config)
    file = write(tmp_path / "imatrix", {**entries, "output.weight": np.ones(config.hidden_size, np.float32)})
    found = read_imatrix(file, config)
    q = found["model.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(q, torch.from_numpy(entries["blk.1.attn_q.weight"]))
    weighted, plain, dense = (
        load_stage(path, config, torch.float32, 0, 2, kept=kept)
        for kept in (KeptWeights("int4", imatrix=file), KeptWeights("int4"), KeptWeights())
    )
    for stage, importance in ((weighted, q), (plain, None)):
        attention: Any = stage.layers[1].attention
        exact: Any = dense.layers[1].attention
        assert torch.equal(attention.qkv.dense(), pack_int4(exact.qkv.dense(), 32, importance).dequantise())
    theirs: list[Any] = [stage.layers[1].feed_forward for stage in (weighted, plain)]
    experts = [their.experts[2] if shape == "tiny-mixtral" else their for their in theirs]
    assert not torch.equal(experts[0].down.dense(), experts[1].down.dense())
    if shape == "tiny-llama":  # whose importance the file has not
        assert torch.equal(theirs[0].gate_up.dense(), theirs[1].gate_up.dense())


def test_experts_in_one_tensor_have_the_rows_of_all(tmp_path: Path) -> None:
    reference(*CASES["gpt_oss"]).save_pretrained(tmp_path / "model")
    config = load_config(tmp_path / "model")
    entries = random_entries(config)
    found = read_imatrix(newer(tmp_path / "imatrix", entries), config)
    means = torch.from_numpy(entries["blk.0.ffn_down_exps.weight"])
    torch.testing.assert_close(found["model.layers.0.mlp.experts.down_proj"], means)
    torch.testing.assert_close(found["model.layers.0.mlp.experts.2.down_proj.weight"], means[2])


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "model", 3, "float32")
    config = load_config(path)
    wrong = newer(tmp_path / "wrong", {"blk.0.attn_q.weight": np.ones(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"wrong: has 32 numbers for the 64 inputs of model\.layers\.0"):
        load_stage(path, config, torch.float32, 0, 1, kept=KeptWeights("int4", imatrix=wrong))
    whole = older(tmp_path / "whole", random_entries(config)).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:300])
    (tmp_path / "empty").write_bytes(b"")
    newer(tmp_path / "adapter", {"blk.0.attn_q.weight": np.ones(64, np.float32)}, "adapter")
    older(tmp_path / "other", {"blk.0.ssm_in.weight": np.ones(64, np.float32)})
    (tmp_path / "backwards").write_bytes(struct.pack("<iiii", 2, -4, 1, 1) + bytes(40))
    for name, why in (
        ("backwards", "a name of -4 bytes"),
        ("cut", "not an importance matrix"),
        ("empty", "not an importance matrix"),
        ("missing", "not an importance matrix: .*No such file"),
        ("adapter", "general.type is 'adapter'"),
        ("other", "has no tensor of a model of LlamaForCausalLM"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: .*{why}|{name}: {why}"):
            read_imatrix(tmp_path / name, config)
