"""Regret of placements by hand: what is known later decides which alternative was best."""

import pytest

from moonpool.conductor.core.hindsight import MAX_REMEMBERED, NEAR_S, Hindsight, HindsightTotals, PlacementRegret
from moonpool.conductor.placement.base import DecodeChoice, DecodeLoad, PrefillChoice


def choice(name: str, queue_s: float, excluded: str = "") -> PrefillChoice:
    """A prediction of a second of computing behind a queue."""
    return PrefillChoice(name, 0, 0, queue_s, 0.0, 1.0, 1.0, excluded=excluded)


def check(found: Hindsight, request: int, lost_s: float, better: str) -> None:
    regret = found.prefill.of(request)
    assert regret is not None
    assert regret.lost_s == pytest.approx(lost_s)
    assert regret.better == better


def test_a_placement_that_was_as_quick_as_any_is_not_regretted() -> None:
    found = Hindsight()
    found.first_token(1, [choice("a", 1.0), choice("b", 3.0), choice("c", 0.0, excluded="slow")], 10.0, 12.0)
    assert found.prefill.of(1) == PlacementRegret(0.0, "")
    assert found.prefill.totals == HindsightTotals(1, 0, 0.0)
    assert found.prefill.of(2) is None


def test_a_late_token_is_regretted_by_the_alternative_s_prediction() -> None:
    found = Hindsight()
    found.first_token(1, [choice("a", 1.0), choice("b", 3.0)], 10.0, 17.5)
    check(found, 1, 3.5, "b")
    assert found.prefill.totals.lost_s == pytest.approx(3.5)


@pytest.mark.parametrize(("apart_s", "lost_s", "better"), [(5.0, 1.5, "b"), (NEAR_S + 1.0, 3.5, "b")])
def test_an_alternative_was_as_late_as_the_prompt_placed_there_at_that_time(
    apart_s: float, lost_s: float, better: str
) -> None:
    found = Hindsight()
    found.first_token(1, [choice("b", 0.0)], 100.0 - apart_s, 103.0 - apart_s)  # two seconds late
    found.first_token(2, [choice("a", 1.0), choice("b", 3.0)], 100.0, 107.5)
    check(found, 2, lost_s, better)


def test_no_alternative_is_quicker_than_alone_and_a_lost_instance_tells_nothing() -> None:
    found = Hindsight()
    found.first_token(1, [choice("b", 50.0)], 99.0, 100.0)  # fifty seconds early
    found.first_token(2, [choice("a", 1.0), choice("b", 3.0)], 100.0, 102.0)
    check(found, 2, 1.0, "b")
    found.lost("b")
    found.first_token(3, [choice("a", 1.0), choice("b", 3.0)], 100.0, 102.0)
    assert found.prefill.of(3) == PlacementRegret(0.0, "")


def test_memory_is_bounded_and_part_of_the_state() -> None:
    found, digests = Hindsight(), set()
    for number in range(MAX_REMEMBERED + 5):
        found.first_token(number, [choice("a", 1.0)], 10.0, 12.0)
        if number < 5 or number >= MAX_REMEMBERED:
            digests.add(found.digest())
    assert len(digests) == 10
    assert found.prefill.of(4) is None
    assert found.prefill.of(5) == PlacementRegret(0.0, "")


class TestDecode:
    """Answers of ten predicted seconds."""

    def at(self, name: str, finish_s: float, free_blocks: int = 8) -> DecodeChoice:
        return DecodeChoice(name, finish_s / 100, finish_s, blocks=4, there=DecodeLoad(available_blocks=free_blocks))

    def test_all_are_as_slow_as_the_chosen_one_unless_more_is_known(self) -> None:
        found = Hindsight()
        found.answered(1, [self.at("a", 10.0), self.at("b", 12.0)], "a", 0.0, 20.0)
        assert found.decode.of(1) == PlacementRegret(0.0), "24 s there"
        found.answered(2, [self.at("a", 10.0), self.at("b", 8.0)], "a", 1.0, 20.0)
        assert found.decode.of(2) == PlacementRegret(4.0, "b")
        assert found.decode.totals == HindsightTotals(2, 1, 4.0)
        assert found.prefill.totals == HindsightTotals()

    def test_an_alternative_was_as_slow_as_the_answer_placed_there_at_that_time(self) -> None:
        found = Hindsight()
        found.answered(1, [self.at("b", 10.0)], "b", 0.0, 30.0)
        found.answered(2, [self.at("a", 10.0), self.at("b", 8.0)], "a", 1.0, 20.0)
        assert found.decode.of(2) == PlacementRegret(0.0), "24 s there"
        found.answered(3, [self.at("a", 10.0), self.at("b", 8.0)], "a", NEAR_S + 1.0, 20.0)
        assert found.decode.of(3) == PlacementRegret(4.0, "b"), "too long ago"
        found.lost("b")
        found.answered(4, [self.at("a", 10.0), self.at("b", 8.0)], "a", 1.0, 20.0)
        assert found.decode.of(4) == PlacementRegret(4.0, "b")

    def test_a_short_answer_tells_of_a_long_one_by_the_token(self) -> None:
        found = Hindsight()
        found.answered(1, [self.at("b", 10.0)], "b", 0.0, 3.0, length=0.1)
        found.answered(2, [self.at("a", 10.0), self.at("b", 8.0)], "a", 1.0, 40.0, length=2.0)
        assert found.decode.of(2) == PlacementRegret(0.0), "48 s there"

    def test_where_memory_was_lacking_is_no_alternative(self) -> None:
        found = Hindsight()
        found.answered(1, [self.at("a", 10.0), self.at("b", 1.0, free_blocks=3)], "a", 0.0, 20.0)
        assert found.decode.of(1) == PlacementRegret(0.0)

    def test_an_instance_that_was_not_compared_teaches_nothing(self) -> None:
        found = Hindsight()
        found.answered(1, [self.at("a", 10.0)], "b", 0.0, 20.0)
        assert found.decode.of(1) is None
        assert found.decode.totals == HindsightTotals()
