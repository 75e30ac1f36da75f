"""When a request whose attempts fail is given up."""

import pytest

from moonpool.conductor.core.failures import Failure, FailureKind, FailureSeries

RETRIES, RECOVERY_S = 3, 15.0
BROKEN, DAMAGED = Failure(FailureKind.STREAM, "broken"), Failure(FailureKind.TRANSFER, "damaged")


def lasts(failures: list[tuple[float, Failure]], *, grows: bool = False, apart_s: float = RECOVERY_S) -> list[bool]:
    """Whether the request is given up after each of some failures; its answer grows between them or not."""
    series, told = FailureSeries(), []
    for number, (at, failure) in enumerate(failures):
        series.add(at, failure, number if grows else 0, apart_s)
        told.append(series.is_over(RETRIES, RECOVERY_S))
    return told


@pytest.mark.parametrize("apart_s", [1.0, 60.0])
def test_so_many_retries_follow_the_first_failure(apart_s: float) -> None:
    """However long each attempt takes: what it meets is the request's own doing."""
    assert lasts([(apart_s * number, BROKEN) for number in range(4)]) == [False, False, False, True]


def test_what_broke_among_what_was_damaged_is_not_the_last() -> None:
    failures = [DAMAGED, DAMAGED, DAMAGED, DAMAGED, BROKEN, DAMAGED]
    assert not any(lasts([(float(at), failure) for at, failure in enumerate(failures)]))


@pytest.mark.parametrize(("apart_s", "over"), [(2.0, 8), (4.0, 4)])
def test_damage_is_chance_for_the_recovery_time(apart_s: float, over: int) -> None:
    assert lasts([(apart_s * number, DAMAGED) for number in range(10)]).index(True) == over


def test_failures_far_apart_are_not_counted_together_where_the_answer_grows() -> None:
    """A long answer may lose an instance every minute."""
    assert not any(lasts([(60.0 * number, BROKEN) for number in range(20)], grows=True))


@pytest.mark.parametrize(("between_s", "apart_s"), [(1.0, RECOVERY_S), (60.0, 0.0)])
def test_who_fails_after_each_token_is_given_up(between_s: float, apart_s: float) -> None:
    failures = [(between_s * number, BROKEN) for number in range(4)]
    assert lasts(failures, grows=True, apart_s=apart_s) == [False, False, False, True]
