"""When a request whose attempts fail is given up."""

import pytest

from services.conductor.core.failures import Failure, Kind, Series

RETRIES, RECOVERY_S = 3, 15.0
BROKEN, DAMAGED = Failure(Kind.STREAM, "broken"), Failure(Kind.TRANSFER, "damaged")


def lasts(failures: list[tuple[float, Failure]]) -> list[bool]:
    """Whether the request is given up after each of some failures."""
    series, told = Series(), []
    for at, failure in failures:
        series.add(at, failure, RECOVERY_S)
        told.append(series.is_over(RETRIES, RECOVERY_S))
    return told


def test_so_many_retries_follow_the_first_failure() -> None:
    assert lasts([(float(at), BROKEN) for at in range(4)]) == [False, False, False, True]


def test_what_broke_among_what_was_damaged_is_not_the_last() -> None:
    failures = [DAMAGED, DAMAGED, DAMAGED, DAMAGED, BROKEN, DAMAGED]
    assert not any(lasts([(float(at), failure) for at, failure in enumerate(failures)]))


@pytest.mark.parametrize(("apart_s", "over"), [(2.0, 8), (4.0, 4)])
def test_damage_is_chance_for_the_recovery_time(apart_s: float, over: int) -> None:
    assert lasts([(apart_s * number, DAMAGED) for number in range(10)]).index(True) == over


def test_failures_far_apart_are_not_counted_together() -> None:
    """A long answer may lose an instance every minute."""
    assert not any(lasts([(60.0 * number, BROKEN) for number in range(20)]))
