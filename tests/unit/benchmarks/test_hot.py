"""The benchmark of hot prefixes: its prompts and its rows."""

import argparse

import pytest

from benchmarks.hot import BESIDE, Figures, arrivals, flags, rows


def options(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags(parser)
    return parser.parse_args(args)


def test_most_prompts_begin_with_one_of_the_prefixes() -> None:
    wanted = options("--prefix-tokens", "64", "--question-tokens", "8", "--prefixes", "3", "--requests", "200")
    asked, same, other = arrivals(wanted, 0), arrivals(wanted, 0), arrivals(wanted, 1)
    assert asked == same != other
    assert {len(one.prompt) for one in asked} == {72}
    times = [one.at_s for one in asked]
    assert times == sorted(times)
    begins = [tuple(one.prompt[:64]) for one in asked]
    often = {begin for begin in begins if begins.count(begin) > 1}
    assert len(often) == 3
    assert [begin in often for begin in begins] == [one.hot for one in asked]
    assert sum(one.hot for one in asked) == pytest.approx(190, abs=12)


def test_rows_compare_run_by_run() -> None:
    pairs = [(Figures(0.1, 0.2, 0.9, 0.1), Figures(0.1, 0.6, 0.6, 0.4))] * 2
    found = {row.name: row for row in rows(pairs)}
    p90 = found["TTFT, p90"]
    assert (p90.value, p90.limit_value, p90.limit_name) == (200.0, 600.0, BESIDE)
    assert p90.ratio == pytest.approx(3.0)
    assert found["TTFT of hot prompts, p90"].ratio == pytest.approx(4.0)
    assert found["prompt tokens not computed"].ratio == pytest.approx(1.5)
