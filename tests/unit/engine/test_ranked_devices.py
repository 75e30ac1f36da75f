"""Ranks with a device each: own heads in the device's memory, sums of a group, graphs; one pool of whole slices."""

from pathlib import Path

import pytest

from moonpool.base.kv.keys import slice_hash
from moonpool.engine.models.random_checkpoint import create
from tests.unit.engine.ranks import ranked
from tests.unit.engine.test_ranked_stages import story


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(
    ("shape", "ranks", "count", "kv_dtype", "seed"),
    [
        ("tiny-qwen2", 2, 1, "auto", 1),
        ("tiny-qwen2", 4, 1, "int8", 2),
        ("tiny-gemma3", 2, 2, "auto", 3),
        ("tiny-deepseek-v3", 2, 1, "auto", 4),
        ("tiny-mixtral", 2, 2, "int8", 5),
    ],
)
def test_tokens_and_slices_are_those_of_one_process(
    shape: str, ranks: int, count: int, kv_dtype: str, seed: int, captures: bool, tmp_path: Path
) -> None:
    create(shape, tmp_path / "model", seed=1, dtype="float32")
    with ranked(tmp_path / "model", 1, stages=count, kv_dtype=kv_dtype) as alone:
        expected = story(alone)
    with ranked(
        tmp_path / "model", ranks, stages=count, kv_dtype=kv_dtype, seed=10 * seed, captures=captures
    ) as several:
        tokens, kv, layers = story(several)
    assert (tokens, layers) == (expected[0], expected[2])
    assert all(value == slice_hash(data) for data, value in kv)
