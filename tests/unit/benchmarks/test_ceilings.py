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


def test_products_are_limited_by_the_quicker_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here bfloat16 is slow, as on processors without instructions for it; large products are not tried in it."""
    asked: list[tuple[ceilings.Shape, torch.dtype]] = []

    def flops_of(shape: ceilings.Shape, dtype: torch.dtype) -> float:
        asked.append((shape, dtype))
        return 2.0 if dtype == torch.float32 else 1.0

    monkeypatch.setattr(ceilings, "_flops_of", flops_of)
    ceilings._multiplied_as.cache_clear()
    try:
        assert ceilings.product_flops((9, 9, 9), torch.bfloat16) == 2.0
    finally:
        ceilings._multiplied_as.cache_clear()
    small = 256, 256, 256
    assert asked == [(small, torch.bfloat16), (small, torch.float32), ((9, 9, 9), torch.float32)]
