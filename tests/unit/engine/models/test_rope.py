"""RoPE's angles: those kept and those beyond, by the formula."""

import math
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.rope import TABLE, RopeTable


@pytest.mark.parametrize("longest", [TABLE, 100, 4 * TABLE])
def test_angles_at_any_position(longest: int, tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "model", overrides={"num_hidden_layers": 1})
    config = load_config(path)
    rope = config.decoder.ropes[0]
    table = RopeTable(rope, longest, torch.float32, torch.device("cpu"))
    half = config.head_dim // 2
    for positions in ([0], [99, 3, 3], [5, longest - 1], [TABLE - 1, TABLE, 2 * TABLE + 1]):
        cos, sin = table.angles(torch.tensor(positions))
        for row, position in enumerate(positions):
            for i in (0, 1, half - 1):
                angle = position * rope.theta ** (-i / half)
                near = 1e-7 * position + 1e-6  # angles are float32
                assert float(cos[row, i]) == pytest.approx(math.cos(angle), abs=near)
                assert float(cos[row, i + half]) == float(cos[row, i])
                assert float(sin[row, i + half]) == pytest.approx(math.sin(angle), abs=near)
                assert float(sin[row, i]) == -float(sin[row, i + half])
