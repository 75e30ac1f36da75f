"""Ceilings are measured beyond the caches; rates over overlapping requests; figures that a machine cannot have."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import ceilings
from benchmarks.ceilings import Limits, Span, rate, with_limit
from benchmarks.frame import Row
from moonpool.engine.kernels.memory import LARGE_PAGE
from moonpool.engine.kernels.native import library


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


def test_the_best_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each way to read: another process, or pages that are touched for the first time, slow one pass down."""
    passes = iter([4.0] * ceilings.PASSES + [8.0, 2.0, 4.0, 8.0, 4.0])
    monkeypatch.setattr(ceilings, "seconds", lambda call, at_least: next(passes, 4.0))
    assert ceilings.read_bytes_per_s(torch.ones(64)) == (128.0 if library.get() is not None else 64.0)


def test_what_stands_for_weights_lies_on_large_pages_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "working_set_bytes", lambda: 4 << 20)
    memory = ceilings.weights_memory()
    assert (memory.nbytes, memory.data_ptr() % LARGE_PAGE, float(memory.sum())) == (4 << 20, 0, 1 << 20)
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no large pages")
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= memory.data_ptr() < int(found[2], 16)
        if inside and line.startswith("VmFlags:"):
            assert "hg" in line.split(), "they were not asked for"
            return
    pytest.fail("it is not mapped")


@pytest.mark.parametrize("quicker", [torch.bfloat16, torch.float32])
def test_products_are_limited_by_the_quicker_type(quicker: torch.dtype) -> None:
    """Where bfloat16 is slow, as on processors without instructions for it, large products are not tried in it."""
    shapes: list[ceilings.Shape] = []

    def flops(shape: ceilings.Shape, dtype: torch.dtype) -> float:
        shapes.append(shape)
        return 2.0 if dtype == quicker else 1.0

    assert ceilings.multiplied_as(torch.bfloat16, flops) == quicker
    assert shapes == [(256, 256, 256)] * 2


LIMITS = Limits(parameters=40_000_000, head_parameters=10_000_000, flops=1e11, read_bytes_per_s=1e10)


def row(value: float, unit: str) -> Row:
    return Row("figure", 1.0, unit, 0.0, "peer", value, 1.0)


def test_a_rate_counts_from_the_first_start_to_the_last_end() -> None:
    """Not over the longest request: two that follow each other take the time of both."""
    assert rate([Span(0.0, 1.0, 10), Span(1.0, 2.0, 10)]) == 10.0
    assert rate([Span(0.0, 1.0, 10), Span(0.5, 1.5, 20)]) == 20.0


def test_limits_follow_from_products() -> None:
    assert LIMITS.prompt_tokens_per_s == pytest.approx(1250)
    assert LIMITS.decode_tokens_per_s(64) <= 1000


def test_a_mixture_reads_the_experts_that_its_sequences_choose() -> None:
    """One sequence reads 2 of 8 experts, two sequences 3.5 on average, many sequences all."""
    mixture = replace(LIMITS, other_parameters=6_000_000, chosen_share=0.25)
    assert mixture.read_parameters(1) == mixture.all_parameters
    assert mixture.read_parameters(2) == pytest.approx(mixture.all_parameters + 1_500_000)
    assert mixture.read_parameters(1000) == pytest.approx(mixture.all_parameters + 6_000_000)


@pytest.mark.parametrize(("value", "marked"), [(900.0, False), (1050.0, False), (1200.0, True)])
def test_a_peer_that_is_too_fast_for_the_machine_is_marked(value: float, marked: bool) -> None:
    assert ("impossible here" in with_limit(row(value, "tokens/s"), 1000.0).limit_name) == marked


@pytest.mark.parametrize(("value", "marked"), [(120.0, False), (95.0, False), (50.0, True)])
def test_a_time_that_is_too_short_is_marked(value: float, marked: bool) -> None:
    assert ("impossible here" in with_limit(row(value, "ms"), 100.0, less_is_better=True).limit_name) == marked
