"""The part for pictures beside a GGUF file, as somebody else may have written the part: values, or a clear error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.peers.gguf_files import VALUE_TYPES, finish
from moonpool.base.checkpoint.mmproj import mmproj_of, mmproj_settings, swapped_names
from moonpool.base.errors import CheckpointError

VISION: dict[str, Any] = {
    "projection_dim": 8, "embedding_length": 4, "attention.head_count": 2, "block_count": 2, "patch_size": 2,
    "n_wa_pattern": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
TENSORS = {"v.blk.0.ffn_up.weight": (6, 4), "v.blk.0.ffn_down.weight": (4, 6), "v.position_embd.weight": (9, 4)}


def files(
    folder: Path,
    kind: str = "qwen2vl",
    sections: object = (1, 1, 0),
    tensors: Mapping[str, tuple[int, ...]] = TENSORS,
    **changed: object,
) -> Path:
    """Write a model's header and the part for pictures beside it; return the model's file."""
    model = gguf.GGUFWriter(folder / "model.gguf", kind)
    model.add_embedding_length(8)
    name = f"{kind}.rope.dimension_sections"
    given = list(sections) if isinstance(sections, tuple) else sections
    model.add_key_value(name, given, VALUE_TYPES[type(given)])
    model.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    finish(model)
    part = gguf.GGUFWriter(folder / "mmproj-model.gguf", "clip")
    part.add_clip_projector_type("qwen2.5vl_merger" if kind == "qwen2vl" else "qwen3vl_merger")
    for key, value in (VISION | changed).items():
        part.add_key_value(f"clip.vision.{key}", value, VALUE_TYPES[type(value)])
    for tensor, shape in tensors.items():
        part.add_tensor(tensor, np.zeros(shape, np.float32))
    finish(part)
    return folder / "model.gguf"


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    settings = mmproj_settings(files(tmp_path))
    assert settings.config["vision_config"]["fullatt_block_indexes"] == [1]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"sections": 5}, "rope.dimension_sections must be a list, not 5"),
        ({"kind": "qwen3vl", "is_deepstack_layers": 3}, "is_deepstack_layers must be a list, not 3"),
        ({"kind": "qwen3vl", "is_deepstack_layers": "x"}, "is_deepstack_layers must be a list, not 'x'"),
        ({"block_count": 5000}, "block_count is 5000, more than 4096"),
    ],
)
def test_an_odd_value_is_refused_by_name(tmp_path: Path, how: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        mmproj_settings(files(tmp_path, **how))


def test_a_part_without_a_network_has_no_swapped_names(tmp_path: Path) -> None:
    """Who loads the encoder names the tensor that is missing."""
    without = {name: shape for name, shape in TENSORS.items() if "ffn_down" not in name}
    assert not swapped_names(mmproj_of(files(tmp_path, tensors=without)))
