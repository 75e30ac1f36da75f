"""Survival curves of answers' lengths, by exact numbers."""

from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.core.output_lengths import (
    LENGTH_BOUNDS,
    LENGTH_WINDOW,
    MAX_STRATA,
    PRIOR_ANSWERS,
    OutputLengthModel,
    Stratum,
    hinted,
)
from tests.examples import examples

ONE: Stratum = ("tenant",)


def seen(lengths: OutputLengthModel, number: int, tokens: int, stratum: Stratum = ONE) -> None:
    lengths.begin(number, stratum)
    lengths.ended(number, tokens)


def test_before_anything_was_seen_lengths_are_exponential() -> None:
    lengths = OutputLengthModel(assumed=100)
    assert lengths.outlives((), 50) == pytest.approx(exp(-0.5))
    assert lengths.outlives(ONE, 50) == lengths.outlives((), 50)
    assert lengths.outlives((), 150, so_far=100) == pytest.approx(exp(-0.5))


def test_an_answer_counts_where_it_ended_and_where_it_had_not() -> None:
    """Three of one token, one of two, with everybody's curve as the prior eight: Kaplan and Meier's product."""
    lengths = OutputLengthModel(assumed=1)
    for number, tokens in enumerate((1, 1, 1, 2)):
        seen(lengths, number, tokens, ("tenant",))
    first = (1 + PRIOR_ANSWERS * exp(-1)) / (4 + PRIOR_ANSWERS)  # everybody's, which borrows from the exponential one
    first = (1 + PRIOR_ANSWERS * first) / (4 + PRIOR_ANSWERS)
    second = (0 + PRIOR_ANSWERS * exp(-1)) / (1 + PRIOR_ANSWERS)
    second = (0 + PRIOR_ANSWERS * second) / (1 + PRIOR_ANSWERS)
    assert lengths.outlives(("tenant",), 1) == pytest.approx(first)
    assert lengths.outlives(("tenant",), 2) == pytest.approx(first * second)
    assert lengths.outlives(("tenant",), 2, so_far=1) == pytest.approx(second)


def test_who_still_runs_counts_in_what_it_has_outlived_and_in_no_more() -> None:
    """Without the ten that run, all answers so far would have had one token."""
    short, censored = OutputLengthModel(), OutputLengthModel()
    for number in range(10):
        seen(short, number, 1)
        seen(censored, number, 1)
    for number in range(10, 20):
        censored.begin(number, ONE)
        censored.grew(number, 3)
    assert censored.outlives(ONE, 1) > 1.5 * short.outlives(ONE, 1)
    assert censored.outlives(ONE, 3, so_far=2) == pytest.approx(short.outlives(ONE, 3, so_far=2)), "3 may be its last"


def test_who_was_cut_off_is_censored() -> None:
    by_itself, cut = OutputLengthModel(), OutputLengthModel()
    for number in range(50):
        seen(by_itself, number, 8)
        cut.begin(number, ONE)
        cut.grew(number, 8)
        cut.removed(number)
    assert len(cut) == 0
    assert by_itself.outlives(ONE, 8, so_far=7) < 0.3
    assert cut.outlives(ONE, 8, so_far=7) > 0.9


def test_thin_strata_borrow_and_rich_ones_do_not() -> None:
    lengths = OutputLengthModel()
    for number in range(300):
        seen(lengths, number, 1000, ("long",))
        seen(lengths, 1000 + number, 10, ("short",))
    assert lengths.outlives(("long",), 500) > 0.9
    assert lengths.outlives(("short",), 500) < 0.02
    assert lengths.outlives(("new",), 500) == lengths.outlives((), 500), "everybody's"
    assert lengths.outlives((), 500) == pytest.approx(0.5, abs=0.1)


def test_old_answers_fade() -> None:
    lengths = OutputLengthModel()
    for number in range(2 * LENGTH_WINDOW):
        seen(lengths, number, 1000)
    for number in range(3 * LENGTH_WINDOW):
        seen(lengths, 10_000 + number, 10)
    assert lengths.outlives(ONE, 100) < 0.2


def test_strata_are_bounded() -> None:
    lengths = OutputLengthModel()
    for number in range(MAX_STRATA):
        seen(lengths, number, 10, (f"tenant {number}", "3"))
    lengths.check_invariants()
    assert lengths.outlives(("tenant 0", "3"), 20) == lengths.outlives((), 20)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.sampled_from("ab"))), st.floats(0, 10**7))
def test_a_curve_falls_from_one(answers: list[tuple[int, bool, str]], at: float) -> None:
    lengths = OutputLengthModel()
    for number, (tokens, natural, tenant) in enumerate(answers):
        lengths.begin(number, (tenant,))
        (lengths.ended if natural else lengths.grew)(number, tokens)
        lengths.check_invariants()
    stratum = ("a",)
    heights = [lengths.outlives(stratum, border) for border in (0, *LENGTH_BOUNDS)]
    assert heights[0] == 1.0
    assert heights == sorted(heights, reverse=True)
    assert 0.0 <= lengths.outlives(stratum, at) <= 1.0
    assert len(lengths) == sum(not natural for _, natural, _ in answers)


def test_a_hint_counts_until_answers_with_such_hints_have_ended() -> None:
    lengths = OutputLengthModel(assumed=100)
    long, short = hinted("tenant", 1000), hinted("tenant", 10)
    assert (hinted("tenant", 0), long, hinted("tenant", 1024), hinted("tenant", 1)) == (
        ONE, ("tenant", "~1024"), long, ("tenant", "~1"),
    )  # fmt: skip
    assert lengths.outlives(long, 512) == pytest.approx(exp(-0.5), rel=1e-3)
    assert lengths.outlives(short, 16) == pytest.approx(exp(-1.0), rel=1e-3)
    assert lengths.outlives(ONE, 50) == pytest.approx(exp(-0.5), rel=1e-3)
    for number in range(200):
        seen(lengths, number, 10, long)
    assert lengths.outlives(long, 100) < 0.05, "hints that are wrong are unlearnt"
    assert lengths.outlives(short, 16) == pytest.approx(exp(-1.0), rel=1e-3)
    lengths.check_invariants()
