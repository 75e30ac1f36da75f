"""Mixtures of experts in the native step beside the torch stage; packed experts; a row alone and among others."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.native import library
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_reader import KeptWeights
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.models.test_native_step import BLOCK, Checked, draw

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

#: Softmax, normalised or not; a shared network, with and without a gate; corrected sigmoid scores; a dense first layer.
NATIVE = ("mixtral", "qwen2_moe", "qwen3_moe", "dots1", "ernie4_5_moe")


def folder(case: str, path: Path) -> Path:
    reference(*CASES[case]).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("case", "threads"),
    [
        *((case, 1) for case in NATIVE),
        ("mixtral", 2),
        *(pytest.param(case, 2, marks=pytest.mark.slow) for case in NATIVE[1:]),
    ],
)
@torch.inference_mode()
def test_the_torch_stage(case: str, threads: int, tmp_path: Path) -> None:
    path = folder(case, tmp_path)
    native, plain = (Checked(path, torch.float32, mode) for mode in ("native", "torch"))
    assert native.stage.native
    chosen = random.Random(len(case))
    torch.set_num_threads(threads)
    for sequences, most in ((1, 1), (7, 1), (5, 30)):
        work, prefixes = draw(native.config, chosen, sequences, most)
        (_, mine, pool), (_, theirs, others) = (model.run(work.batch, prefixes) for model in (native, plain))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool, others, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_row_alone_and_among_others_has_the_same_bits(quantization: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    path = folder("qwen2_moe", tmp_path)
    config = load_config(path)
    stage = load_stage(path, config, dtype, 0, config.num_layers, kept=KeptWeights(quantization))
    assert stage.native
    shape = (config.num_layers, 12, config.num_kv_heads, 2, BLOCK, config.head_dim)

    def run(tokens: list[int]) -> torch.Tensor:
        parts = [(array("i", [token]).tobytes(), 0, [block]) for block, token in enumerate(tokens)]
        batch = PackedBatch.build(parts, BLOCK)
        return stage.forward(batch.token_ids, batch, torch.zeros(shape, dtype=dtype))

    tokens = [3 + 17 * i for i in range(12)]
    together = run(tokens)
    alone = torch.cat([run([token]) for token in tokens])
    assert torch.equal(together, alone)


@torch.inference_mode()
def test_scores_in_groups(tmp_path: Path) -> None:
    """Of experts in groups, only those of the best groups are chosen; equal corrected scores go to the first."""
    model_type, settings = CASES["dots1"]
    grouped = {**settings, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3}
    reference(model_type, grouped).save_pretrained(tmp_path)
    native, plain = (Checked(tmp_path, torch.float32, mode) for mode in ("native", "torch"))
    assert native.stage.native
    work, prefixes = draw(native.config, random.Random(4), 6, 20)
    (_, mine, _), (_, theirs, _) = (model.run(work.batch, prefixes) for model in (native, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
