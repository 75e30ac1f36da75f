"""Packed weights of files: every number is the one that the file's own dequantisation gives."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.gguf_files import write_gguf
from moonpool.base.checkpoint import inspect_checkpoint, load_config
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import GGUF_TYPES
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights.packed import PackedWeight, join_rows
from moonpool.engine.weights.registry import weight_reader
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.gguf_files import make_folder

#: Bits and group that a type is packed in, and where its blocks have float16 numbers.
TYPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "Q4_0": ("int4/32", (0,)),
    "Q4_1": ("int4/32", (0, 2)),
    "Q5_0": ("int5/32", (0,)),
    "Q5_1": ("int5/32", (0, 2)),
    "Q8_0": ("int8/32", (0,)),
    "Q2_K": ("int4/16", (80, 82)),
    "Q3_K": ("int4/16", (108,)),
    "Q4_K": ("int4/32", (0, 2)),
    "Q5_K": ("int5/32", (0, 2)),
    "Q6_K": ("int6/16", (208,)),
    "IQ4_NL": ("table4/32", (0,)),
    "IQ4_XS": ("table4/32", (0,)),
    "TQ1_0": ("int4/256", (52,)),
    "TQ2_0": ("int4/256", (64,)),
    "MXFP4": ("table4/32", ()),
    "NVFP4": ("table4/16", ()),
}


FORMATS = {kind.name: kind for kind in GGUF_TYPES.values()}


def packed_of_gguf(name: str, stored: torch.Tensor) -> PackedWeight | None:
    found = weight_reader(FORMATS[name]).packed({"values": stored})
    assert found is None or isinstance(found, PackedWeight)
    return found


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_gguf_are_held_exactly(name: str) -> None:
    """Blocks of random bytes, with every code and scale among them."""
    form, halves = TYPES[name]
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (24, 512 // elements, size), dtype=np.uint8)
    for begin in halves:
        numbers = generator.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, begin : begin + 2] = numbers[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = generator.integers(100, 140, blocks.shape[:2])
    if name == "NVFP4":
        blocks[:, :, :4] &= 127  # scales have no sign
    stored = blocks.reshape(24, -1)
    found = packed_of_gguf(name, torch.from_numpy(stored))
    assert isinstance(found, PackedWeight)
    assert found.kind == form
    assert torch.equal(found.dequantise(), torch.from_numpy(gguf.dequantize(stored, kind)))
    info = TensorInfo(Path("model.gguf"), name, (24, 512), format=FORMATS[name])
    assert info.keeps_codes
    if name in ("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"):  # their codes take more bits in memory than in the file
        assert info.stored_bytes == found.nbytes
    assert found.for_products() is not None


def test_forms_are_of_the_types_that_products_take() -> None:
    """Mixed types of one matrix (Q4_K_M has Q4_K queries beside Q6_K values) keep codes of few bits and their units."""
    generator = np.random.default_rng(6)

    def blocks(name: str) -> PackedWeight:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        stored = generator.integers(0, 256, (8, 512 // elements, size), dtype=np.uint8)
        for begin in TYPES[name][1]:
            stored[:, :, begin : begin + 2] = np.full((8, 512 // elements, 1), 0.01, np.float16).view(np.uint8)
        found = packed_of_gguf(name, torch.from_numpy(stored.reshape(8, -1)))
        assert found is not None
        return found

    for names, form in ((("Q4_K", "Q6_K"), "int6/16"), (("Q4_0", "Q5_0"), "int5/32"), (("Q5_0", "Q8_0"), "int8/32")):
        parts = [blocks(name) for name in names]
        joined = join_rows(parts)
        assert joined is not None
        assert joined.kind == form
        assert (joined.units is None) == (names[0] != "Q4_K")
        assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_types_of_grids_become_dense() -> None:
    assert not TensorInfo(Path("model.gguf"), "IQ2_XS", (1, 256), format=FORMATS["IQ2_XS"]).keeps_codes
    assert packed_of_gguf("IQ2_XS", torch.zeros(1, 74, dtype=torch.uint8)) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K"])
def test_a_stage_keeps_the_codes_of_its_file(kind: str, tmp_path: Path) -> None:
    """Also rows of q and k that RoPE turns, which files have in another order; head and embedding."""
    file = write_gguf("llama", make_folder("llama", tmp_path / "folder"), tmp_path / "model.gguf", kind)
    kept, dense = (
        load_stage(file, load_config(file), torch.float32, 0, 2, kept=KeptWeights(how)) for how in ("auto", "none")
    )
    assert kept.changed_weights == ""
    for mine, theirs in zip(kept.layers, dense.layers, strict=True):
        for part, name in (("attention", "qkv"), ("attention", "output"), ("feed_forward", "down")):
            ours, dense_part = (getattr(getattr(layer, part), name) for layer in (mine, theirs))
            assert torch.equal(ours.dense(), dense_part.dense())
            assert ours.nbytes < dense_part.nbytes / 3
    assert kept.head is not None
    assert dense.head is not None
    assert torch.equal(kept.head.dense(), dense.head.dense())
    tokens = torch.arange(0, 512, 7)
    assert torch.equal(kept.embed(tokens), dense.embed(tokens))
    stored = sum(info.n_bytes for info in gguf.GGUFReader(file).tensors)
    assert kept.weight_bytes <= 1.15 * stored
    asked: tuple[Literal["auto"], Literal["file"]] = ("auto", "file")
    for how in asked:
        assert inspect_checkpoint(file, "float32", quantization=how).weight_bytes == pytest.approx(stored, rel=0.03)
    assert inspect_checkpoint(file, "float32", quantization="none").weight_bytes == dense.weight_bytes
    tokens_ = [5 + 7 * i % 500 for i in range(40)]
    logits, whole = (
        Runner(file, torch.float32, quantization=how).step([(Sequence_(list(tokens_)), len(tokens_))])
        for how in ("auto", "none")
    )
    assert 0.0 < float((logits - whole).square().mean() / whole.square().mean()) < 1e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_tied_ends_in_stages_are_the_whole_models(kind: str, tmp_path: Path) -> None:
    """The first stage embeds with the head's codes."""
    file = write_gguf("qwen2", make_folder("qwen2", tmp_path / "folder"), tmp_path / "model.gguf", kind)
    tokens = [5 + 7 * i % 500 for i in range(40)]
    whole, stages = (
        Runner(file, torch.float32, borders=borders, quantization="auto").step([(Sequence_(list(tokens)), 40)])
        for borders in ((), (1,))
    )
    assert torch.equal(whole, stages)


def test_weights_that_products_cannot_take_as_they_are_get_a_line(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(len(tensors[name]))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fbgemm_fp8"}}))
    kept, dense = (
        load_stage(folder, load_config(folder), torch.float32, 0, 2, kept=KeptWeights(how)) for how in ("file", "none")
    )
    assert kept.changed_weights == "1 tensors of scaled (F8_E4M3) are dense"  # joined with a dense gate
    assert dense.changed_weights == ""


def test_floats_of_8_bits_stay_what_they_are(tmp_path: Path) -> None:
    """FP8 with a scale for each row; a file with NaN among them is dense."""
    folder = make_folder("llama", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(len(tensors[name]))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fbgemm_fp8"}}))
    auto, file, dense = (
        load_stage(folder, load_config(folder), torch.float32, 0, 2, kept=KeptWeights(how))
        for how in ("auto", "file", "none")
    )
    assert auto.changed_weights == file.changed_weights == ""
    assert auto.weight_bytes == file.weight_bytes < dense.weight_bytes
    kept: Any = auto.layers[0].feed_forward
    plain: Any = dense.layers[0].feed_forward
    assert torch.equal(kept.down.dense(), plain.down.dense())
    tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[0, 0] = 127
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    broken = load_stage(folder, load_config(folder), torch.float32, 0, 2, kept=KeptWeights("auto"))
    assert broken.changed_weights == "1 tensors of scaled (F8_E4M3) are dense"
