"""Safetensors headers, the list of weight files, the fingerprint and the report, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.base.checkpoint import inspect_checkpoint, weights_fingerprint
from moonpool.base.checkpoint.formats import tensor_index, weight_files
from moonpool.base.checkpoint.huggingface import read_header
from moonpool.base.errors import CheckpointError, InvalidRequest
from tests.unit.base.checkpoint.folder import write_config, write_weights

HALF = ("BF16", [2, 3], bytes(12))


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", {"a": HALF, "b": ("F32", [4], bytes(16))})
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    tensors = tensor_index(tmp_path)
    assert {name: (info.dtype, info.shape, info.elements) for name, info in tensors.items()} == {
        "a": ("BF16", (2, 3), 6),
        "b": ("F32", (4,), 4),
    }


def test_shards(tmp_path: Path) -> None:
    index(tmp_path, {"a": "y.safetensors", "b": "x.safetensors"})
    write_weights(tmp_path / "x.safetensors", {"b": HALF})
    with pytest.raises(CheckpointError, match=r"y\.safetensors.*missing"):
        tensor_index(tmp_path)
    write_weights(tmp_path / "y.safetensors", {"a": HALF})
    assert sorted(tensor_index(tmp_path)) == ["a", "b"]
    write_weights(tmp_path / "y.safetensors", {"b": HALF})
    with pytest.raises(CheckpointError, match=r"tensor b is in x\.safetensors and in y\.safetensors"):
        tensor_index(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "pytorch_model.bin"])
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file"):
        weight_files(tmp_path)


def test_pickles_are_named_and_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle file"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{{"])
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(file)


def test_a_file_cut_short(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "model.safetensors", {"a": HALF})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="tensor a lies past the end"):
        read_header(file)


def test_fingerprint_sees_every_byte_and_the_configuration(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path / "model.safetensors", {"a": HALF})
    first = weights_fingerprint(tmp_path)
    assert len(first) == 32
    assert weights_fingerprint(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("{}")
    assert weights_fingerprint(tmp_path) == first
    write_weights(tmp_path / "model.safetensors", {"a": ("BF16", [2, 3], bytes(11) + b"\x01")})
    second = weights_fingerprint(tmp_path)
    write_config(tmp_path, rope_theta=5e5)
    assert len({first, second, weights_fingerprint(tmp_path)}) == 3


def test_fingerprint_of_unreadable_weights(tmp_path: Path) -> None:
    """A file that cannot be read is named; a folder is one for any user."""
    (write_config(tmp_path) / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        weights_fingerprint(tmp_path)


def test_inspect(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    tensors = {"model.embed_tokens.weight": ("BF16", [300, 64], bytes(38400)), "a": HALF}
    write_weights(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": ("BF16", [300, 64], bytes(38400))})
    report = inspect_checkpoint(tmp_path, block_size=16, memory_bytes=100_000)
    assert (report.parameters, report.weight_bytes, report.dtype) == (19206, 38412, "bfloat16")
    assert (report.kv_token_bytes, report.kv_block_bytes) == (256, 4096)
    assert report.kv_groups == "2 layers, 128 bytes a token each"
    assert (report.fit_blocks, report.fit_tokens) == (15, 240)
    assert inspect_checkpoint(tmp_path, memory_bytes=0).fit_blocks == 0
    assert inspect_checkpoint(tmp_path).fit_blocks is None
    assert report.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (report.context_tokens, report.kv_context_bytes) == (4096, 256 * 4096)
    assert report.computed == "all layers native"
    short = inspect_checkpoint(tmp_path, block_size=16, max_model_len=100)
    assert (short.context_tokens, short.kv_context_bytes) == (100, 7 * 4096)
    with pytest.raises(InvalidRequest, match="memory_bytes"):
        inspect_checkpoint(tmp_path, memory_bytes=-1)
    with pytest.raises(InvalidRequest, match="max_model_len"):
        inspect_checkpoint(tmp_path, max_model_len=0)
    write_config(tmp_path, architectures=["MistralForCausalLM"], sliding_window=64, tie_word_embeddings=True)
    assert inspect_checkpoint(tmp_path).computed == "all layers torch (a sliding window)"


def test_inspect_counts_what_engines_load(tmp_path: Path) -> None:
    """Not the layers behind the last one and further tensors that only drafting uses."""
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
    further = [
        "model.layers.2.mlp.up_proj.weight",
        "mtp.layers.0.norm.weight",
    ]
    tensors = {name: ("F32", [2, 4], bytes(32)) for name in (*names, *further)}
    write_weights(write_config(tmp_path) / "model.safetensors", tensors)
    report = inspect_checkpoint(tmp_path, "float32")
    assert (report.parameters, report.weight_bytes) == (16, 64)
    assert report.file_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_inspect_tells_recurrent_states(tmp_path: Path) -> None:
    """LFM2: two inputs of 64 channels, float32, in one of two layers."""
    write_config(
        tmp_path,
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
    )
    write_weights(tmp_path / "model.safetensors", {"a": HALF})
    report = inspect_checkpoint(tmp_path, block_size=16)
    assert report.state_bytes == 2 * 64 * 4
    assert report.kv_groups == (
        "1 layers with a recurrent state, 512 bytes a block each; 1 layers, 128 bytes a token each"
    )
    assert report.kv_block_bytes == 512 + 16 * 128
    assert report.computed == "layers 1 native; layers 0 torch (a recurrent state)"


def test_the_package_needs_no_torch() -> None:
    code = "import sys, moonpool.base.checkpoint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
