"""The social rule by hand: what a placement takes from others, and the place that a prompt gets in a queue."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.placement.policies import POLICIES
from moonpool.conductor.placement.policies.social import LATE_PATIENCE, LIMIT_S, PATIENCE
from tests.examples import examples

from ..core.worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(4)]


def world(*, instances: int = 2, policy: str = "social") -> World:
    engines = (facts(f"prefill-{number}", speeds=SECOND_PER_TOKEN) for number in range(instances))
    return World(facts("decode-0"), *engines, policy=POLICIES[policy])


def placed(found: World, name: str, busy_s: float, rank: float, number: int, tenant: str = "") -> None:
    found.cluster.claim_prefill(name, busy_s, 0.0, queue_key=QueueKey(tenant, rank, number))


def best(found: World, tokens: int, **asked: object) -> PrefillChoice:
    return found.plan(tokens, **{"keys": KEYS[: tokens // 16], "limit_s": 1e4, **asked}).prefill


def test_an_idle_cluster_is_served_as_by_the_least_time_to_first_token() -> None:
    for held in ([], KEYS[:1], KEYS[:3]):
        choices = []
        for policy in ("social", "kvcache_centric"):
            found = world(policy=policy)
            found.events("prefill-1", held)
            choices.append(found.plan(64, keys=KEYS).prefill)
        social, own = choices
        assert (social.id, social.ttft_s) == (own.id, own.ttft_s)


def test_a_short_prompt_goes_before_long_ones_and_counts_those_that_it_delays() -> None:
    found = world(instances=1)
    placed(found, "prefill-0", 100.0, 1000.0, 1)
    placed(found, "prefill-0", 2.0, 20.0, 2)
    choice = best(found, 4)
    assert choice.delay_s == pytest.approx(PATIENCE * 4.0)
    assert choice.queue_s == pytest.approx(2.0 + 50.0), "the short one, and half of what may be under way"
    assert best(found, 4, priority=20).queue_s == pytest.approx(102.0), "a lower priority goes behind"


@pytest.mark.parametrize(("ahead_s", "chosen"), [(8.0, "prefill-1"), (8.9, "prefill-0")])
def test_it_takes_the_later_place_where_its_own_loss_is_less_than_that_of_others(ahead_s: float, chosen: str) -> None:
    """At the first instance the prompt waits 4.5 s and goes before another one, which loses four seconds."""
    found = world()
    placed(found, "prefill-0", 9.0, 500.0, 1)
    placed(found, "prefill-1", ahead_s, 0.0, 2)
    assert best(found, 4).id == chosen


@pytest.mark.parametrize(("queued_s", "chosen"), [(4.0, "prefill-0"), (12.0, "prefill-1")])
def test_it_gives_up_half_the_mean_queue_at_most(queued_s: float, chosen: str) -> None:
    """The place that delays nobody is three seconds later than the soonest."""
    found = world()
    placed(found, "prefill-0", queued_s, 500.0, 1)
    placed(found, "prefill-1", queued_s / 2 + 3.0, 0.0, 2)
    assert best(found, 4).id == chosen


@pytest.mark.parametrize(("others_s", "prompts", "chosen"), [(0.0, 1, "prefill-1"), (200.0, 4, "prefill-0")])
def test_the_more_is_queued_the_more_the_cheap_place_is_worth(others_s: float, prompts: int, chosen: str) -> None:
    """The holder of three quarters of the prompt has 60 s more of queue, and saves the prompt 48 s."""
    found = world(instances=3)
    found.events("prefill-0", KEYS[:3])
    for number, busy_s in enumerate((60.0 + others_s, others_s, others_s)):
        for part in range(prompts if busy_s else 0):
            placed(found, f"prefill-{number}", busy_s / prompts, -1.0, 4 * number + part)
    assert best(found, 64).id == chosen


class TestFullCaches:
    """The first instance has no free blocks, and the other has: which of the two equal ones gets a new prompt?"""

    def asked(self, holders: list[str]) -> PrefillChoice:
        """A new prompt, after one whose blocks these instances hold; the first instance is a second sooner."""
        found = world()
        if "kvstore-0" in holders:
            found.join(facts("kvstore-0"))
        for name in holders:
            found.events(name, KEYS)
        found.report("prefill-0", drain_s=20.0, running=1, free_blocks=0)
        found.report("prefill-1", drain_s=21.0, running=1, free_blocks=50)
        best(found, 64)
        return best(found, 4, keys=[b"n" * 32])

    @pytest.mark.parametrize("holders", [["prefill-0"], ["prefill-1"]])
    def test_a_prompt_goes_where_nothing_leaves_if_what_leaves_would_be_computed_again(
        self, holders: list[str]
    ) -> None:
        assert self.asked(holders).id == "prefill-1"

    @pytest.mark.parametrize("holders", [[], ["prefill-0", "prefill-1"], ["prefill-0", "kvstore-0"]])
    def test_and_where_it_is_sooner_if_what_leaves_was_not_asked_for_or_is_elsewhere(self, holders: list[str]) -> None:
        assert self.asked(holders).id == "prefill-0"

    def test_an_instance_with_free_blocks_for_all_new_ones_loses_nothing(self) -> None:
        found = world()
        found.events("prefill-0", KEYS)
        for name, free in (("prefill-0", 4), ("prefill-1", 50)):
            found.report(name, drain_s=20.0 + (name == "prefill-1"), running=1, free_blocks=free)
        best(found, 64)
        assert best(found, 4, keys=[b"n" * 32]).id == "prefill-0"


class TestLimits:
    def alone(self, tokens: int, limit_s: float | None, ahead: list[tuple[float, float]]) -> PrefillChoice:
        found = world(instances=1)
        for number, (busy_s, rank) in enumerate(ahead):
            placed(found, "prefill-0", busy_s, rank, number)
        return best(found, tokens, limit_s=limit_s)

    def test_a_prompt_gives_way_for_a_third_of_its_limit_at_most(self) -> None:
        assert self.alone(4, 30.0, [(20.0, -1.0)]).delay_s == pytest.approx(10.0)
        assert self.alone(4, None, [(20.0, -1.0)]).delay_s == pytest.approx(LIMIT_S / 3)

    @pytest.mark.parametrize(("queue_s", "delay_s"), [(0.0, 0.0), (12.0, 6.0), (90.0, 40.0)])
    def test_and_for_half_of_the_mean_queue(self, queue_s: float, delay_s: float) -> None:
        """Ten times its work is the most."""
        assert self.alone(4, 300.0, [(queue_s, -1.0)]).delay_s == pytest.approx(delay_s)

    def test_one_that_would_be_late_gives_up_half_the_mean_queue(self) -> None:
        assert self.alone(24, 30.0, [(20.0, 0.5)]).delay_s == pytest.approx(10.0)
        assert self.alone(40, 30.0, []).delay_s == 0.0
        assert self.alone(4, 0.0, [(20.0, 0.5)]).delay_s == pytest.approx(LATE_PATIENCE * 4.0)

    @pytest.mark.parametrize(("minutes", "delay_s"), [(5, 21.1), (20, 480.0)])
    def test_and_more_once_the_queue_has_long_been_half_the_limit(self, minutes: int, delay_s: float) -> None:
        found = world(instances=1)
        for minute in range(minutes + 1):
            found.report("prefill-0", now=60.0 * minute, drain_s=20.0, running=1)
            choice = best(found, 24, limit_s=30.0, now=60.0 * minute)
        assert choice.delay_s == pytest.approx(delay_s, abs=0.1)


def test_tenants_wait_for_their_turns() -> None:
    found = world(instances=1)
    for number in range(4):
        placed(found, "prefill-0", 10.0, 0.0, number, tenant="many")
    choice = best(found, 4, queue_key=QueueKey("few", 0.0, 9))
    assert choice.queue_s == pytest.approx(10.0), "the step under way: its turn comes next"


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.0, 100.0)), max_size=8),
    st.integers(1, 60),
    st.floats(0.0, 30.0),
)
def test_no_place_waits_longer_than_the_whole_queue(there: list[tuple[float, float]], tokens: int, now: float) -> None:
    found = world(instances=1)
    for number, (busy_s, rank) in enumerate(there):
        placed(found, "prefill-0", busy_s, rank, number)
    choice = best(found, tokens, now=now)
    assert 0.0 <= choice.queue_s <= max(0.0, sum(busy_s for busy_s, _ in there) - now) + 1e-9


def test_many_instances_are_not_all_looked_at_and_the_best_is_found() -> None:
    found = world(instances=40)
    for number in range(40):
        placed(found, f"prefill-{number}", 50.0 - (number == 31), -1.0, number)
    assert best(found, 4).id == "prefill-31"
