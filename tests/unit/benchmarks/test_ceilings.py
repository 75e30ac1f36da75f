"""Ceilings are measured beyond the caches."""

from pathlib import Path

import pytest
import torch

from benchmarks import ceilings


@pytest.mark.parametrize(
    ("sizes", "expected"), [(["48K", "2048K", "491520K"], 480 << 20), (["32K", "32M"], 32 << 20), ([], 64 << 20)]
)
def test_the_largest_cache_counts(sizes: list[str], expected: int, tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert ceilings.cache_bytes(tmp_path) == expected


def test_a_working_set_is_larger_than_the_caches_or_is_not_taken_for_memory() -> None:
    nbytes = ceilings.working_set_bytes()
    assert ceilings.LEAST_BYTES <= nbytes <= ceilings.MOST_BYTES
    assert nbytes > ceilings.cache_bytes() or not ceilings.beyond_caches(nbytes)
    assert not ceilings.beyond_caches(ceilings.cache_bytes())


@pytest.mark.parametrize("quicker", [torch.bfloat16, torch.float32])
def test_products_are_limited_by_the_quicker_type(quicker: torch.dtype) -> None:
    """Where bfloat16 is slow, as on processors without instructions for it, large products are not tried in it."""
    shapes: list[ceilings.Shape] = []

    def flops(shape: ceilings.Shape, dtype: torch.dtype) -> float:
        shapes.append(shape)
        return 2.0 if dtype == quicker else 1.0

    assert ceilings.multiplied_as(torch.bfloat16, flops) == quicker
    assert shapes == [(256, 256, 256)] * 2
