"""The benchmark of short rests: its conversations and its rows."""

import pytest

from benchmarks.rests import BESIDE, Conversation, Figures, rows


def test_equal_seeds_give_equal_conversations_that_begin_long() -> None:
    one, same, other = (Conversation(seed, 4).prompts for seed in ("a", "a", "b"))
    assert one == same != other
    assert [len(prompt) >= 200 for prompt in one] == [True, False, False, False]


def test_rows_compare_run_by_run() -> None:
    pairs = [(Figures(0.01, 0.02, 0.004, 1.0), Figures(0.03, 0.04, 0.004, 0.0))] * 2
    found = {row.name: row for row in rows(pairs)}
    ttft = found["TTFT of later turns, median, rests at decode"]
    assert (ttft.value, ttft.limit_value, ttft.limit_name) == (10.0, 30.0, BESIDE)
    assert ttft.ratio == pytest.approx(3.0)
    assert found["later turns that decode computed itself"].value == 100.0
