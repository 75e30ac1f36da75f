"""What the benchmark of shares sends and how it is told."""

from argparse import Namespace
from itertools import islice

import pytest

from benchmarks.fairness import CALM, FLOOD, MOST_TOKENS, WANTED, quantile, requests, rows, virtual


def test_rounds_have_equal_lengths_at_equal_times_and_nothing_to_reuse() -> None:
    alone, flooded = (list(islice(requests("calm 1", words, 2.0, 1000), 30)) for words in ("", FLOOD))
    assert [(request.at, len(request.prompt), request.answer) for request in alone] == [
        (request.at, len(request.prompt), request.answer) for request in flooded
    ]
    assert all(calm.prompt[:16] != crowded.prompt[:16] for calm, crowded in zip(alone, flooded, strict=True))
    assert max(len(request.prompt) for request in alone) <= MOST_TOKENS
    assert all(500 <= token < 1000 for token in alone[0].prompt)
    other = next(requests("calm 2", "", 2.0, 1000))
    assert (other.at, other.prompt) != (alone[0].at, alone[0].prompt)


def test_in_virtual_time_a_flood_costs_another_tenant_little() -> None:
    """Also where that one alone was served before: without rests it is 2.4 here."""
    options = Namespace(engine="emulated:llama-70b-a800", seed=1, requests=8)
    assert virtual(0, options) < WANTED


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.9)] == [1.0, 2.0, 3.0]
    assert quantile([5.0], 0.9) == 5.0


def test_the_target_is_met_when_the_ratio_is_small_enough() -> None:
    found = [{"": [1.0] * 10, FLOOD: [1.2] * 10, CALM: [9.0] * 3}]
    by_name = {row.name: row for row in rows(found)}
    ratio = by_name["TTFT p90 while another tenant floods, over alone"]
    assert ratio.value == pytest.approx(1.2)
    assert (ratio.limit_value, ratio.met) == (WANTED, True)
    assert by_name["TTFT p90 in a flood of its own tenant"].met is False
    assert len(list(rows([{"": [1.0], FLOOD: [1.4]}]))) == 4
