"""Packed weights of files: every number is the one that the file's own dequantisation gives."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from benchmarks.peers.gguf_files import write_gguf
from moonpool.checkpoint import load_config
from moonpool.models.loader import KeptWeights, load_stage
from moonpool.models.packed import PackedWeight
from moonpool.models.packed_files import packed_of_gguf
from tests.unit.models.forward import Runner, Sequence_
from tests.unit.models.gguf_files import make_folder

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


def test_types_of_grids_become_dense() -> None:
    assert packed_of_gguf("IQ2_XS", torch.zeros(1, 74, dtype=torch.uint8)) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_a_stage_keeps_the_codes_of_its_file(kind: str, tmp_path: Path) -> None:
    """Also rows of q and k that RoPE turns, which files have in another order."""
    file = write_gguf("llama", make_folder("llama", tmp_path / "folder"), tmp_path / "model.gguf", kind)
    kept, dense = (
        load_stage(file, load_config(file), torch.float32, 0, 2, kept=KeptWeights(how)) for how in ("file", "none")
    )
    for mine, theirs in zip(kept.layers, dense.layers, strict=True):
        for part, name in (("attention", "qkv"), ("attention", "output"), ("feed_forward", "down")):
            ours, its = (getattr(getattr(layer, part), name) for layer in (mine, theirs))
            assert torch.equal(ours.dense(), its.dense())
            assert ours.nbytes < its.nbytes / 3
    tokens = [5 + 7 * i % 500 for i in range(40)]
    logits, whole = (
        Runner(file, torch.float32, quantization=how).step([(Sequence_(list(tokens)), len(tokens))])
        for how in ("file", "none")
    )
    assert 0.0 < float((logits - whole).square().mean() / whole.square().mean()) < 1e-3
