"""Ranks find what a full scan finds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.block_trie import blocks_at
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.latency_model import DecodeLatencyModel, PrefillLatencyModel
from moonpool.conductor.core.load_ranking import SHORTLIST, LoadRanking, RankedMatch, SpeedClass
from moonpool.conductor.core.prefill_pool import PrefillPool, PromptToPlace
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.placement.base import PlacementRequest
from moonpool.conductor.placement.policies import POLICIES
from tests.examples import examples

from .worlds import SECOND_PER_TOKEN, SHAPE, World, decode_at, facts, prefill_at

PROMPT = PromptToPlace(PlacementRequest(64, 4), QueueKey("", 0.0, 1))


def per_token(seconds: float) -> Speeds:
    return Speeds(prefill_per_token_s=seconds)


def ranks() -> LoadRanking:
    return LoadRanking(1.1, lambda speeds: (speeds.prefill_per_token_s,))


def put(to: LoadRanking, slot: int, speed: float, load: float = 0.0, turn: int = 0) -> None:
    to.put(slot, per_token(speed), lambda _: load, turn)


def test_the_least_loaded_comes_first_then_who_was_chosen_least_recently() -> None:
    found = ranks()
    put(found, 0, 1.0, load=5.0)
    put(found, 1, 1.0, load=3.0, turn=2)
    put(found, 2, 1.0, load=3.0, turn=1)
    best = found.search(0b111, [], lambda _, blocks: 1.0, lambda load: load)
    assert [(match.seconds, match.place.slot) for match in best] == [(4.0, 2), (4.0, 1), (6.0, 0)]
    assert [match.place.slot for match in found.search(0b011, [], lambda _, blocks: 1.0, lambda load: load)] == [1, 0]
    found.check_invariants()


def test_a_longer_prefix_weighs_against_a_queue() -> None:
    found = ranks()
    put(found, 0, 1.0, load=5.0)
    put(found, 1, 1.0)
    put(found, 2, 1.0)
    prefixes = [(2, 0b011), (4, 0b001)]
    best = found.search(0b111, prefixes, lambda _, blocks: 10.0 - blocks, lambda load: load)
    assert [(match.place.slot, match.blocks, match.seconds) for match in best] == [
        (1, 2, 8.0),
        (2, 0, 10.0),
        (0, 4, 11.0),
    ]


def test_a_class_keeps_a_member_whose_speed_is_at_its_border() -> None:
    found = ranks()
    put(found, 0, 1.0)
    put(found, 1, 1.04)
    assert found.class_speeds(1) == per_token(1.0)
    put(found, 1, 1.06)  # beyond half a width: who joins now would not be of the class, who is there stays
    put(found, 2, 1.06)
    assert found.class_speeds(1) == per_token(1.0)
    assert found.class_speeds(2) == per_token(1.06)
    put(found, 1, 1.08)
    assert found.class_speeds(1) == per_token(1.06)
    found.check_invariants()


def test_speeds_that_are_not_known_are_a_class_of_their_own() -> None:
    found = ranks()
    put(found, 0, 0.0)
    put(found, 1, 0.0)
    put(found, 2, 1e-9)
    assert (found.levels(0), found.levels(1)) == ((None,), (None,))
    assert found.levels(2) != (None,)


def test_what_leaves_is_not_found() -> None:
    found = ranks()
    put(found, 0, 1.0)
    put(found, 1, 2.0)
    found.remove(0)
    assert (found.mask, len(found)) == (0b10, 1)
    assert [match.place.slot for match in found.search(-1, [], lambda _, blocks: 0.0, lambda load: load)] == [1]
    found.remove(1)
    assert found.search(-1, [], lambda _, blocks: 0.0, lambda load: load) == []
    found.check_invariants()


LOADS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
SPEEDS = st.sampled_from([0.0, 1.0, 1.01, 1.05, 2.0, 10.0])
MEMBERS = st.lists(st.tuples(SPEEDS, LOADS, st.integers(0, 3)), min_size=1, max_size=70)
BITS = st.integers(0, (1 << 70) - 1)
PREFIXES = st.lists(st.tuples(st.integers(1, 9), BITS), max_size=4).map(
    lambda pairs: [
        (blocks, nested(pairs, place)) for place, blocks in enumerate(sorted({blocks for blocks, _ in pairs}))
    ]
)


def nested(pairs: Sequence[tuple[int, int]], place: int) -> int:
    """Masks that only shrink, as along a chain."""
    mask = -1
    for _, bits in pairs[: place + 1]:
        mask &= bits | bits << 1
    return mask & ((1 << 70) - 1)


@settings(max_examples=examples(200))
@given(MEMBERS, BITS, PREFIXES, st.integers(1, 9), st.floats(0.0, 3.0), BITS)
def test_a_search_equals_a_full_scan(
    placed: list[tuple[float, float, int]],
    allowed: int,
    prefixes: list[tuple[int, int]],
    limit: int,
    now: float,
    fitting: int,
) -> None:
    found = ranks()
    for slot, (speed, load, turn) in enumerate(placed):
        put(found, slot, speed, load, turn)
    found.check_invariants()

    def cost(found: SpeedClass, blocks: int) -> float:
        return found.speeds.prefill_per_token_s * (10 - blocks)

    def wait(load: float) -> float:
        return max(load - now, 0.0)

    def fits(slot: int) -> bool:
        return bool(fitting >> slot & 1)

    everyone = []
    for slot in range(len(placed)):
        if allowed >> slot & 1 and fits(slot):
            blocks, place = blocks_at(prefixes, slot), found.place(slot)
            seconds = found.class_speeds(slot).prefill_per_token_s * (10 - blocks) + wait(place.load)
            everyone.append(RankedMatch(seconds, place, blocks))
    assert found.search(allowed, prefixes, cost, wait, limit, fits) == sorted(everyone)[:limit]


BASES = [
    Speeds(prefill_per_token_s=1e-4, prefill_per_pair_s=1e-8, load_bytes_per_s=1e6, decode_base_s=0.01),
    Speeds(prefill_per_token_s=5e-4, load_bytes_per_s=1e5, decode_base_s=0.03, decode_per_sequence_s=1e-3),
    Speeds(prefill_base_s=0.01, decode_per_context_token_s=1e-6, transfer_bytes_per_s=1e5),
]
ENGINES = st.lists(
    st.tuples(
        st.sampled_from(BASES),
        st.floats(0.9, 1.3),
        st.sampled_from([0.0, 0.01, 0.1, 3.0]),
        st.integers(0, 40),
        st.sampled_from([50, 100]),
    ),
    min_size=1,
    max_size=60,
)
STORED = st.builds(
    PrefixHolder,
    st.sampled_from(["kvstore-0", "prefill-0"]),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e-3, 2.0]),
    st.sampled_from([0.0, 1e5, 1e7]),
    st.booleans(),
)


@settings(max_examples=examples(100))
@given(ENGINES, PREFIXES, st.lists(STORED, max_size=3), st.sampled_from([1, 60]), st.integers(1, 4))
def test_the_best_prefills_equal_a_full_scan(
    engines: list[tuple[Speeds, float, float, int, int]],
    prefixes: list[tuple[int, int]],
    sources: list[PrefixHolder],
    need: int,
    stages: int,
) -> None:
    pool, now = PrefillPool(POLICIES["kvcache_centric"]), 0.05
    for slot, (base, factor, free_at, _, blocks) in enumerate(engines):
        speeds = base.slowed_prefill(factor)
        instance = facts(
            f"prefill-{slot}", speeds=speeds, total_blocks=blocks, stages=stages, max_num_batched_tokens=64
        )
        pool.add(prefill_at(slot, instance, free_at))
    pool.check_invariants()
    demand = Demand(prompt_tokens=9 * 16 + 1, prompt_blocks=need, total_blocks=need, decode_tokens=1)
    model = PrefillLatencyModel(demand, SHAPE, sources, 1.0)

    def seconds(speeds: Speeds, slot: int) -> float:
        queue_s = max(pool.by_slot[slot].free_at - now, 0.0)
        return model.cost(speeds, stages, 64, blocks_at(prefixes, slot)).alone_s + queue_s

    large = [slot for slot, instance in pool.by_slot.items() if instance.facts.total_blocks >= need]
    first = sorted((seconds(pool.ranks.class_speeds(slot), slot), pool.ranks.place(slot)) for slot in large)[:SHORTLIST]
    best = sorted((seconds(pool.by_slot[p.slot].learnt.speeds, p.slot), p) for _, p in first)
    choices = [choice for choice in pool.choose(demand, model, prefixes, now, 0, PROMPT) if not choice.excluded]
    assert [choice.id for choice in choices] == [pool.by_slot[place.slot].facts.id for _, place in best]
    assert [choice.known_s for choice in choices] == [total for total, _ in best]


@settings(max_examples=examples(100))
@given(ENGINES, PREFIXES, BITS, st.integers(0, 40))
def test_the_best_decodes_are_those_of_a_full_scan(
    engines: list[tuple[Speeds, float, float, int, int]], prefixes: list[tuple[int, int]], suspects: int, need: int
) -> None:
    pool = DecodePool()
    for slot, (base, factor, _, sequences, room) in enumerate(engines):
        instance = facts(f"decode-{slot}", speeds=base.slowed_decode(factor), total_blocks=100)
        pool.add(decode_at(slot, instance, sequences, room=max(0, room - sequences)))
    pool.check_invariants()
    demand = Demand(prompt_tokens=9 * 16, prompt_blocks=9, total_blocks=need, decode_tokens=100)
    model = DecodeLatencyModel(demand, SHAPE)

    def order(slot: int) -> tuple[bool, bool, float, object]:
        speeds, place = pool.ranks.class_speeds(slot), pool.ranks.place(slot)
        seconds = model.fixed_s(speeds, blocks_at(prefixes, slot)) + model.load_s(place.load)
        crowded = pool.by_slot[slot].available_blocks < need
        return bool(suspects >> slot & 1), crowded, seconds, place

    best = sorted(pool.by_slot, key=order)[:SHORTLIST]
    choices = [pool.get(choice.id) for choice in pool.choose(demand, model, prefixes, suspects, PROMPT.request, "")]
    assert {choice.slot for choice in choices if choice is not None} == set(best)
    groups = [order(instance.slot)[:2] for instance in choices if instance is not None]
    assert groups == sorted(groups), "suspects last, crowded ones after those with room"


DECODE = facts("decode-0")
STEP = Speeds(decode_base_s=0.01, transfer_bytes_per_s=1e12)


@pytest.mark.parametrize(("slower", "first"), [(2.0, 11), (20.0, 107)])
def test_a_decode_that_seemed_slow_at_its_start_is_tried_once(slower: float, first: int) -> None:
    """The slower, the later: it must pay. What it measures at work then counts."""
    world = World(facts("prefill-0"), facts("decode-0", speeds=STEP))
    world.join(facts("decode-1", speeds=replace(STEP, decode_base_s=0.01 * slower)))
    world.report("decode-0", running=1, free_blocks=100)
    chosen = []
    for _ in range(300):
        chosen.append(world.plan().decodes[0].id)
        world.cluster.release(world.cluster.claim_decode(chosen[-1], PlacedAnswer(1, 1)), 0.0)
    assert [at for at, name in enumerate(chosen) if name == "decode-1"] == [first]


def test_a_prefill_that_seemed_slow_at_its_start_is_tried_and_shows_what_it_is() -> None:
    slow = replace(SECOND_PER_TOKEN, prefill_per_token_s=20.0)
    world = World(DECODE, facts("prefill-0", speeds=SECOND_PER_TOKEN), facts("prefill-1", speeds=slow))
    chosen = []
    for number in range(170):
        now = 1000.0 * number
        plan = world.plan(now=now)
        chosen.append(plan.prefill.id)
        claim = world.cluster.claim_prefill(chosen[-1], plan.prefill.busy_s, now)
        world.cluster.first_token(plan, 64, 64.0, 0.0, now)
        world.cluster.release(claim, now + 64)
        world.report(chosen[-1], now=now + 65, drain_s=0.0, speeds=SECOND_PER_TOKEN)
    first = chosen.index("prefill-1")
    assert first == 160
    assert chosen[first:].count("prefill-1") > 3


def test_among_many_it_is_found_although_no_search_would() -> None:
    slow = replace(SECOND_PER_TOKEN, prefill_per_token_s=2.0)
    world = World(DECODE, *(facts(f"prefill-{number}", speeds=SECOND_PER_TOKEN) for number in range(30)))
    world.join(facts("prefill-30", speeds=slow))
    for number in range(400):
        now = 1000.0 * number
        plan = world.plan(now=now)
        if plan.prefill.id == "prefill-30":
            break
        world.cluster.release(world.cluster.claim_prefill(plan.prefill.id, 64.0, now), now + 64)
    assert number == 248
