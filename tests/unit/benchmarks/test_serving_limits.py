"""Rates over overlapping requests, and figures that a machine cannot have."""

from dataclasses import replace

import pytest

from benchmarks.frame import Row
from benchmarks.serving_limits import Limits, Span, rate, with_limit

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
