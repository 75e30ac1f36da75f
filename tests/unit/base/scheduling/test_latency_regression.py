"""Coefficients that follow measurements."""

import random

import pytest

from moonpool.base.scheduling.regression import Regression

TRUE = 0.006, 1.2, 0.6
"""Fixed part, factor of waiting, factor of computing."""


def fresh() -> Regression:
    return Regression((0.0, 1.0, 1.0), (0.02, 0.3, 0.3), least_s=0.005)


def sizes(drawn: random.Random) -> tuple[float, float, float]:
    return 1.0, drawn.choice((0.0, drawn.uniform(0.0, 0.3))), drawn.uniform(0.01, 0.3)


def seconds(of: tuple[float, float, float]) -> float:
    return sum(rate * size for rate, size in zip(TRUE, of, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_told_apart_in_spite_of_noise_and_outliers(seed: int) -> None:
    """A tenth of all measurements is five times too long, the others differ by 15 %; means would be 40 % off."""
    print("seed", seed)
    learnt, drawn = fresh(), random.Random(seed)
    for _ in range(400):
        now = sizes(drawn)
        outlier = 5.0 if drawn.random() < 0.1 else 1.0
        learnt.observe(now, seconds(now) * drawn.lognormvariate(0.0, 0.15) * outlier)
    errors = [
        abs(learnt.seconds(drawn_sizes) / seconds(drawn_sizes) - 1.0)
        for drawn_sizes in (sizes(drawn) for _ in range(200))
    ]
    assert max(errors) < 0.25
    assert learnt.coefficients == pytest.approx(TRUE, rel=0.25, abs=0.004)


def test_the_first_measurements_count_most() -> None:
    learnt = fresh()
    learnt.observe((1.0, 0.0, 0.1), 0.12)
    assert learnt.seconds((1.0, 0.0, 0.1)) == pytest.approx(0.114, abs=0.003)
    before = learnt.coefficients
    assert before[1] == 1.0, "nothing waited"
    learnt.observe((1.0, 0.0, 0.1), 0.0)
    assert learnt.coefficients == before, "no time is no measurement"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 5e-324])
def test_what_no_clock_gives_is_no_measurement(seconds: float) -> None:
    learnt = fresh()
    learnt.observe((1.0, 0.1, 0.1), 0.2)
    before = learnt.state
    for _ in range(20):
        learnt.observe((1.0, 0.1, 0.1), seconds)
    assert learnt.state == before


@pytest.mark.parametrize("size", [float("nan"), float("inf")])
def test_what_was_foreseen_as_endless_teaches_nothing(size: float) -> None:
    learnt = fresh()
    before = learnt.state
    learnt.observe((1.0, size, 0.1), 0.2)
    learnt.observe((1.0, 0.1, 0.1), 0.2, known_s=size)
    assert learnt.state == before


def test_a_change_is_believed_after_four_measurements_and_not_before() -> None:
    learnt = fresh()
    for _ in range(30):
        learnt.observe((1.0, 0.1, 0.1), 0.2)
    for _ in range(3):
        learnt.observe((1.0, 0.1, 0.1), 2.0)
    assert learnt.seconds((1.0, 0.1, 0.1)) < 0.25, "outliers"
    learnt.observe((1.0, 0.1, 0.1), 2.0)
    assert learnt.seconds((1.0, 0.1, 0.1)) > 1.5, "a tenth of the speed"


def test_outliers_on_both_sides_are_no_change() -> None:
    learnt = fresh()
    for number in range(100):
        learnt.observe((1.0, 0.0, 0.1), 0.5 if number % 3 else 0.02)
    assert 0.05 < learnt.seconds((1.0, 0.0, 0.1)) < 0.5


def test_no_coefficient_gets_negative_or_nothing() -> None:
    learnt = fresh()
    for _ in range(50):
        learnt.observe((1.0, 0.1, 0.0), 1e-5)
    assert min(learnt.coefficients) >= 0.0
    assert learnt.coefficients[1] >= 0.05


def test_without_a_spread_a_coefficient_stays_and_with_a_common_factor_all_move_alike() -> None:
    learnt = Regression((0.001, 2.0), (0.0, 0.0), common=0.5)
    learnt.observe((1.0, 1.0), 3.0)
    first, second = learnt.coefficients
    assert second / first == pytest.approx(2000.0)
    assert 2.4 < second < 3.0
    still = Regression((0.001, 2.0), (0.0, 0.0))
    still.observe((1.0, 1.0), 3.0)
    assert still.coefficients == (0.001, 2.0)


def test_a_first_value_of_nearly_zero_stays_of_use() -> None:
    """A fit gives 5e-17 where there is no fixed part. Its spread must not grow by how often that goes into a second."""
    learnt = Regression((5.6e-17, 2e-3, 5e-7, 1.0), (0.15, 1e-3, 2e-7, 0.7))
    for seconds in (0.05, 0.02, 0.3, 0.01, 0.04) * 20:
        learnt.observe((1.0, 30.0, 280.0, 0.0), seconds)
        assert 0.0 < learnt.seconds((1.0, 30.0, 280.0, 0.0)) < 1.0
