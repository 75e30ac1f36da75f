"""When prefill instances will be free, and which prefixes they are computing."""

import itertools
import random

import pytest

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.conductor.core.events import StalePlacement
from moonpool.conductor.core.in_flight_prefixes import (
    COMPARED_LENGTHS,
    REPORTS_AWAITED,
    InFlightPrefixes,
    with_in_flight,
)
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.stale_placement import StalePlacementCheck
from moonpool.conductor.placement.base import QueueWait
from moonpool.conductor.placement.policies import POLICIES

from .worlds import BLOCK_SIZE, SECOND_PER_TOKEN, World, facts, prefill_at

NOW = 2.0**20 - 8.0
"""Seconds of a clock that began twelve days ago. The next power of two is among the sums: numbers beyond it are twice
as coarse, so what is added there and taken away here is not the same. Where all are as coarse, sums are exact."""
SEED = 7


def test_claims_and_releases_leave_less_than_a_microsecond() -> None:
    draw = random.Random(SEED)
    instance = prefill_at(0, facts("prefill-0"), NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    before = instance.free_at
    waiting: list[int] = []
    for number in range(200_000):
        instance.claim(number, draw.expovariate(2.0), NOW)
        waiting.append(number)
        while len(waiting) > draw.randrange(64):
            at = draw.randrange(len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
            instance.release(waiting.pop(), NOW)
    for number in waiting:
        instance.release(number, NOW)
    print(f"seed {SEED}: off by {instance.free_at - before:.1e} s")
    assert instance.prompts == {}
    assert instance.free_at == pytest.approx(before, abs=1e-6)


def test_a_report_begins_anew_whatever_was_left() -> None:
    instance = prefill_at(0, facts("prefill-0"), NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    for number in range(1000):
        instance.claim(number, 0.1 + 1e-9 * number, NOW)
    for number in range(1000):
        instance.release(number, NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    assert instance.free_at == NOW + 3.0


def test_where_prompts_are_computed_as_they_come_all_that_are_there_go_first() -> None:
    waits = {}
    for arrival_order in (False, True):
        instance = prefill_at(0, facts("prefill-0", arrival_order=arrival_order), NOW)
        for number, tenant in enumerate(("a", "b")):
            instance.claim(number, 4.0, NOW, QueueKey(tenant, NOW + 10.0, number))
        early = QueueKey("a", NOW, 2)
        waits[arrival_order] = instance.wait(early, NOW), instance.queue_s(early, 8.0)
        assert any(prompt.overtaken for prompt in instance.prompts.values()) is False
    assert waits[True] == (QueueWait(8.0, 0), 8.0)
    assert waits[False][0].seconds < 8.0
    assert waits[False][1] < 8.0


KEYS = [bytes([number]) * 32 for number in range(20)]
OTHERS = KEYS[:6] + [bytes([100 + number]) * 32 for number in range(14)]


def test_chains_are_compared_at_lengths_a_fifth_apart() -> None:
    assert COMPARED_LENGTHS[:12] == (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16)
    assert all(after / before <= 1.25 for before, after in itertools.pairwise(COMPARED_LENGTHS[3:]))


def test_who_computes_the_beginning_of_a_chain_and_how_much_of_it() -> None:
    in_flight = InFlightPrefixes()
    assert in_flight.match(KEYS) == {}
    in_flight.placed(1, "prefill-0", KEYS)
    in_flight.placed(2, "prefill-1", OTHERS)
    in_flight.placed(3, "prefill-0", OTHERS[:6])
    in_flight.placed(4, "prefill-2", [])
    in_flight.check_invariants()
    assert in_flight.match(KEYS) == {"prefill-0": 19, "prefill-1": 6}
    assert in_flight.match(KEYS[:9]) == {"prefill-0": 8, "prefill-1": 6}
    assert in_flight.match(OTHERS) == {"prefill-0": 6, "prefill-1": 19}
    assert in_flight.match([]) == {}
    assert in_flight.computed(1) == "prefill-0"
    assert in_flight.computed(1) == ""
    in_flight.released(1)
    assert in_flight.match(KEYS) == {"prefill-0": 19, "prefill-1": 6}, "until its blocks are reported"
    in_flight.keys_reported("prefill-0", lambda key: key == KEYS[18])
    assert in_flight.match(KEYS) == {"prefill-0": 6, "prefill-1": 6}
    for claim in (2, 3, 4, 5):
        in_flight.released(claim)
    in_flight.check_invariants()
    assert in_flight.match(KEYS) == {}
    assert in_flight.digest() == InFlightPrefixes().digest()


def test_what_is_coming_is_laid_over_what_is_held() -> None:
    held = [(2, 0b1110), (5, 0b0100)]
    assert with_in_flight(held, []) == held
    assert with_in_flight(held, [(5, 0), (3, 1)]) == [(2, 0b1111), (3, 0b0111), (5, 0b0101)]
    assert with_in_flight(held, [(1, 1)]) == [(1, 0b1110), (2, 0b1110), (5, 0b0100)], "who holds more has more"


@pytest.mark.parametrize("queue_s", [40.0, 20.0])
def test_a_prompt_waits_for_its_prefix_where_that_is_sooner(queue_s: float) -> None:
    """At the other instance it would be computed again; and what does not exist yet is loaded by nobody."""
    engines = [facts(name, speeds=SECOND_PER_TOKEN) for name in ("prefill-0", "prefill-1")]
    world = World(facts("decode-0"), *engines, peers=True)
    first = world.cluster.claim_prefill("prefill-0", 64.0, 0.0)
    world.cluster.prefills.in_flight.placed(first, "prefill-0", KEYS[:4])
    world.report("prefill-1", drain_s=queue_s)
    plan = world.plan(4 * BLOCK_SIZE + 8, keys=KEYS[:4])
    best, other = plan.candidates
    wanted = [("prefill-0", 4, 64.0, 8.0), ("prefill-1", 0, queue_s, 72.0)]
    assert (
        sorted((choice.id, choice.local_blocks, choice.queue_s, choice.prefill_s) for choice in (best, other)) == wanted
    )
    assert (best.id, plan.sources) == ("prefill-0", ())
    world.cluster.release(first, 1.0)
    assert held(world) == [0, 0]


def held(world: World) -> list[int]:
    return [candidate.local_blocks for candidate in world.plan(4 * BLOCK_SIZE + 8, keys=KEYS[:4]).candidates]


def computed(*others: InstanceFacts) -> World:
    """A prompt of four blocks has its token; they are not reported."""
    world = World(facts("decode-0"), facts("prefill-0", speeds=SECOND_PER_TOKEN), *others)
    claim = world.cluster.claim_prefill("prefill-0", 64.0, 0.0)
    world.cluster.prefills.in_flight.placed(claim, "prefill-0", KEYS[:4])
    world.cluster.prefills.computed(claim)
    world.cluster.release(claim, 0.0)
    assert held(world)[0] == 4
    return world


def test_what_is_computed_counts_until_it_is_reported() -> None:
    world = computed()
    world.events("prefill-0", KEYS[:2])
    assert held(world) == [4]
    world.events("prefill-0", KEYS[2:4])
    assert held(world) == [4]
    world.events("prefill-0", [], KEYS[1:4])
    assert held(world) == [1], "what was reported is known from reports alone"


def test_what_is_not_reported_soon_was_not_kept() -> None:
    world = computed()
    world.report("prefill-0")
    assert held(world) == [4], "this report may have been on its way with the token"
    world.report("prefill-0")
    assert held(world) == [0]


def test_who_says_that_it_is_busy_reports_nothing() -> None:
    world = computed()
    for number in range(REPORTS_AWAITED):
        StalePlacementCheck(world.cluster).answered("prefill-0", StalePlacement(1.0 + number, taken=7), 0.0)
    assert held(world) == [4]


def test_who_leaves_reports_nothing() -> None:
    world = computed(facts("prefill-1", speeds=SECOND_PER_TOKEN))
    late = world.cluster.claim_prefill("prefill-0", 64.0, 0.0)
    world.cluster.prefills.in_flight.placed(late, "prefill-0", KEYS[:4])
    world.cluster.leave("prefill-0")
    world.cluster.prefills.computed(late)
    world.cluster.release(late, 0.0)
    world.join(facts("prefill-0", speeds=SECOND_PER_TOKEN))
    assert held(world) == [0, 0]


def test_who_has_a_part_of_what_is_coming_is_named_in_case_that_it_does_not_come() -> None:
    world = World(facts("decode-0"), facts("prefill-0", speeds=SECOND_PER_TOKEN), peers=True)
    world.events("decode-0", KEYS[:3])
    world.events("prefill-0", KEYS[:1])
    first = world.cluster.claim_prefill("prefill-0", 1.0, 0.0)
    world.cluster.prefills.in_flight.placed(first, "prefill-0", KEYS[:4])
    plan = world.plan(4 * BLOCK_SIZE + 8, keys=KEYS[:4])
    assert (plan.prefill.local_blocks, plan.prefill.source) == (4, "")
    assert [(source.id, source.blocks) for source in plan.sources] == [("decode-0", 3)]


def test_a_short_queue_elsewhere_is_sooner() -> None:
    engines = [facts(name, speeds=SECOND_PER_TOKEN) for name in ("prefill-0", "prefill-1")]
    world = World(facts("decode-0"), *engines, policy=POLICIES["kvcache_centric"])
    first = world.cluster.claim_prefill("prefill-0", 64.0 + 9.0, 0.0)
    world.cluster.prefills.in_flight.placed(first, "prefill-0", KEYS[:4])
    assert world.plan(4 * BLOCK_SIZE + 8, keys=KEYS[:4]).prefill.id == "prefill-1"
