"""Stages with some layers that the native step does not compute: torch computes these alone."""

import random
from array import array
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.families.spec import described_ways
from moonpool.engine.kernels.native import library
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from tests.unit.engine.models.forward import BLOCK, Runner
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.models.test_native_step import Checked, Words, draw

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

NOT_NATIVE = {
    "smollm3": ["", "", "", "no rotary embeddings"],
    "lfm2": ["a recurrent state", "", "a recurrent state", "a recurrent state"],
    "qwen2": ["", "", "a sliding window", "a sliding window"],
}


def folder(case: str, path: Path) -> Path:
    reference(*CASES[case]).save_pretrained(path)
    return path


@pytest.mark.parametrize("case", NOT_NATIVE)
def test_layers_compute_natively_beside_others(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens equal those of torch alone; `test_families.py` compares them with transformers."""
    path = folder(case, tmp_path)
    runner = Runner(path, torch.float32)
    assert runner.stages[0].not_native == NOT_NATIVE[case]
    prompts = [list(range(3, 3 + length)) for length in (5, 40)]
    mixed = runner.generate(prompts, 8, chunk=16, budget=40)
    monkeypatch.setenv("MOONPOOL_KERNELS", "torch")
    plain = Runner(path, torch.float32)
    assert set(plain.stages[0].not_native) == {"MOONPOOL_KERNELS=torch"}
    assert plain.generate(prompts, 8, chunk=16, budget=40) == mixed


@torch.inference_mode()
def test_steps_stop_before_native_layers_and_before_others(tmp_path: Path) -> None:
    checked = Checked(folder("smollm3", tmp_path), torch.float32, "native")
    work, prefixes = draw(checked.config, random.Random(6), 3, 20)
    _, whole, pool = checked.run(work.batch, prefixes)
    signals = Words(0, 0)
    came, hidden, part = checked.run(work.batch, prefixes, signals=signals)
    assert came == 1
    for highest in (2, 3):
        signals.words[1] = highest
        came, hidden = checked.go_on(hidden, work.batch, part, came, signals=signals)
        assert came == highest + 1
    assert torch.equal(hidden, whole)
    torch.testing.assert_close(part, pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_row_alone_and_among_others_has_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    path = folder("smollm3", tmp_path)
    config = load_config(path)
    stage = load_stage(path, config, dtype, 0, config.num_layers, deterministic=True)
    assert stage.not_native == NOT_NATIVE["smollm3"]
    shape = (config.num_layers, 12, config.num_kv_heads, 2, BLOCK, config.head_dim)

    def run(tokens: list[int]) -> torch.Tensor:
        parts = [(array("i", [token]).tobytes(), 0, [block]) for block, token in enumerate(tokens)]
        batch = PackedBatch.build(parts, BLOCK)
        return stage.forward(batch.token_ids, batch, torch.zeros(shape, dtype=dtype))

    tokens = [3 + 17 * i for i in range(12)]
    assert torch.equal(run(tokens), torch.cat([run([token]) for token in tokens]))


def test_ways_are_told_by_layer() -> None:
    assert described_ways(["", ""]) == "all layers native"
    assert described_ways(["a soft cap"] * 2) == "all layers torch (a soft cap)"
    reasons = ["", "", "a sliding window", "", "a soft cap", ""]
    told = "layers 4-5, 7, 9 native; layers 6 torch (a sliding window); layers 8 torch (a soft cap)"
    assert described_ways(reasons, 4) == told
