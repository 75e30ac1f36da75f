"""Instances that seemed slow when they were measured at their start, and to which no request went since."""

from dataclasses import replace

import pytest

from moonpool.scheduling.latency import Speeds
from services.conductor.core.decode_pool import PlacedAnswer

from .worlds import SECOND_PER_TOKEN, World, facts

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
