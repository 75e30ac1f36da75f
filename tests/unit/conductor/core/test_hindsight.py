"""Regret of placements by hand: what is known later decides which alternative was best."""

import pytest

from services.conductor.core.hindsight import MAX_REMEMBERED, NEAR_S, Hindsight, PlacementRegret
from services.conductor.placement.base import PrefillChoice


def choice(name: str, queue_s: float, excluded: str = "") -> PrefillChoice:
    """A prediction of a second of computing behind a queue."""
    return PrefillChoice(name, 0, 0, queue_s, 0.0, 1.0, 1.0, excluded=excluded)


def check(found: Hindsight, request: int, lost_s: float, better: str) -> None:
    regret = found.of(request)
    assert regret is not None
    assert regret.lost_s == pytest.approx(lost_s)
    assert regret.better == better


def test_a_placement_that_was_as_quick_as_any_is_not_regretted() -> None:
    found = Hindsight()
    found.measured(1, [choice("a", 1.0), choice("b", 3.0), choice("c", 0.0, excluded="slow")], 10.0, 12.0)
    assert found.of(1) == PlacementRegret(0.0, "")
    assert (found.totals.placements, found.totals.regretted, found.totals.lost_s) == (1, 0, 0.0)
    assert found.of(2) is None


def test_a_late_token_is_regretted_by_the_alternative_s_prediction() -> None:
    found = Hindsight()
    found.measured(1, [choice("a", 1.0), choice("b", 3.0)], 10.0, 17.5)
    check(found, 1, 3.5, "b")
    assert found.totals.lost_s == pytest.approx(3.5)


@pytest.mark.parametrize(("apart_s", "lost_s", "better"), [(5.0, 1.5, "b"), (NEAR_S + 1.0, 3.5, "b")])
def test_an_alternative_was_as_late_as_the_prompt_placed_there_at_that_time(
    apart_s: float, lost_s: float, better: str
) -> None:
    found = Hindsight()
    found.measured(1, [choice("b", 0.0)], 100.0 - apart_s, 103.0 - apart_s)  # two seconds late
    found.measured(2, [choice("a", 1.0), choice("b", 3.0)], 100.0, 107.5)
    check(found, 2, lost_s, better)


def test_no_alternative_is_quicker_than_alone_and_a_lost_instance_tells_nothing() -> None:
    found = Hindsight()
    found.measured(1, [choice("b", 50.0)], 99.0, 100.0)  # fifty seconds early
    found.measured(2, [choice("a", 1.0), choice("b", 3.0)], 100.0, 102.0)
    check(found, 2, 1.0, "b")
    found.lost("b")
    found.measured(3, [choice("a", 1.0), choice("b", 3.0)], 100.0, 102.0)
    assert found.of(3) == PlacementRegret(0.0, "")


def test_memory_is_bounded_and_part_of_the_state() -> None:
    found, digests = Hindsight(), set()
    for number in range(MAX_REMEMBERED + 5):
        found.measured(number, [choice("a", 1.0)], 10.0, 12.0)
        digests.add(found.digest())
    assert len(digests) == MAX_REMEMBERED + 5
    assert found.of(4) is None
    assert found.of(5) == PlacementRegret(0.0, "")
