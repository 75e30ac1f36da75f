"""Faults explain a request's failure only while what it needs was disturbed."""

import pytest

from tests.faults.disturbances import Disturbances

SERVICES = ("conductor-0", "prefill-0", "prefill-1", "decode-0", "kvstore-0")
NEEDS = ("conductor", "prefill", "decode")


def disturbed() -> Disturbances:
    """Both prefill instances are disturbed from 3 to 4, decode from 8 to 9, and the kvstore all the time."""
    found = Disturbances(SERVICES)
    found.add(["prefill-0"], 1.0, 4.0)
    found.add(["prefill-1"], 3.0, 6.0)
    found.add(["decode-0"], 8.0, 9.0)
    found.add(["kvstore-0"], 0.0, 20.0)
    return found


@pytest.mark.parametrize(
    ("begin", "end", "why"),
    [
        (0.0, 2.9, ""),
        (0.0, 3.1, "each prefill was disturbed"),
        (4.1, 7.9, ""),
        (7.0, 8.5, "each decode was disturbed"),
        (9.5, 20.0, ""),
    ],
)
def test_a_failure_is_explained_while_all_of_a_kind_are_disturbed(begin: float, end: float, why: str) -> None:
    assert disturbed().explain(begin, end, NEEDS) == why


def test_more_faults_than_retries_explain_a_failure() -> None:
    found = Disturbances(SERVICES, retries=3)
    for number in range(4):
        found.add([f"prefill-{number % 2}"], 2.0 * number, 2.0 * number + 1.0)
    assert found.explain(0.0, 5.0, NEEDS) == ""
    assert found.explain(0.0, 7.0, NEEDS) == "4 faults"


def test_the_time_without_a_disturbance_is_known() -> None:
    assert disturbed().up_share(0.0, 10.0, NEEDS) == pytest.approx(0.8)
    assert disturbed().up_share(3.0, 4.0, NEEDS) == 0.0
    assert Disturbances(SERVICES).up_share(0.0, 10.0, NEEDS) == 1.0
