"""What the conductor predicts for a tenant's prompts where others have more: their turns, not the whole queue."""

import pytest

from moonpool.conductor.core.actions import AnnouncePlacement, CallPrefill, CallReserve, FailRequest
from moonpool.conductor.core.events import ClientGone, InstanceJoined
from moonpool.conductor.core.instances import InstanceFacts
from moonpool.conductor.core.instances import InstanceKind as EngineKind
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.tenant_counts import TENANT_MEMORY_S

from .world import GONE, SHAPE, SPEEDS, World

STEP = 100
"""Tokens of a step, which takes 0.1 s."""


def flooded(*, max_num_batched_tokens: int = STEP, count: int = 5, priority: int = 0) -> World:
    """One prefill instance with so many prompts of a tenant, of 0.2 s each; the first of them is under way."""
    world = World(prefills=0, decodes=1, total=1000)
    facts = InstanceFacts(
        "prefill-0", 1, EngineKind.PREFILL, 1000, SHAPE, SPEEDS, max_num_batched_tokens=max_num_batched_tokens
    )
    world.members[facts.id] = facts
    world.post(InstanceJoined(facts))
    for _ in range(count):
        place(world, "flood", priority=priority)
    return world


def place(world: World, tenant: str, *, weight: float = 1.0, priority: int = 0) -> float:
    """Predicted seconds of waiting of a prompt that is placed."""
    number = world.arrive(prompt=200, tenant=tenant, weight=weight, priority=priority)
    world.promise(next(call for call in world.open(CallReserve) if call.request == number))
    plan = world.all(AnnouncePlacement)[-1].plan
    assert plan.candidates[0] == plan.prefill, "what is explained is what was compared with the limit"
    return plan.prefill.queue_s


def test_one_tenant_waits_for_all_that_is_there() -> None:
    world = flooded()
    assert place(world, "flood") == pytest.approx(1.0)


def test_another_tenant_waits_for_the_step_under_way_and_then_in_turn() -> None:
    world = flooded()
    assert place(world, "calm") == pytest.approx(0.1)
    assert place(world, "calm") == pytest.approx(2 * 0.2 + 0.1)
    assert place(world, "flood") == pytest.approx(1.0 + 2 * 0.2), "no more than all of it"


def test_turns_go_by_weight() -> None:
    world = flooded()
    place(world, "calm", weight=3.0)
    assert place(world, "calm", weight=3.0) == pytest.approx(4 / 3 * 0.2 + 0.1)


def test_a_prompt_is_computed_whole_where_steps_have_no_bound() -> None:
    assert place(flooded(max_num_batched_tokens=0), "calm") == pytest.approx(0.2)


def test_an_urgent_one_waits_for_half_of_the_step_under_way() -> None:
    """That is the mean: nobody knows when it began."""
    world = flooded(priority=1)
    assert place(world, "flood") == pytest.approx(0.05)
    assert place(world, "flood", priority=1) == pytest.approx(5 * 0.2 + 0.2)


def test_a_flood_refuses_nobody_but_itself() -> None:
    world = flooded()
    slo = SloLimits(ttft_s=0.4)
    ours = world.arrive(prompt=200, tenant="flood", slo=slo)
    assert isinstance(world.ends[ours], FailRequest)
    calm = world.arrive(prompt=200, tenant="calm", slo=slo)
    assert calm not in world.ends
    assert len(world.open(CallPrefill)) == 5


def full(*, flood: int, total: int = 160) -> World:
    """One decode instance of which a flood has taken what it may, after another tenant's request came and left."""
    world = World(prefills=1, decodes=1, total=total)
    world.post(ClientGone(world.arrive(prompt=8, answer=8, tenant="calm")))
    for call in world.open(CallReserve):
        world.end(call, GONE)
    for _ in range(flood):
        world.arrive(prompt=152, answer=8, tenant="flood")  # ten blocks
        for call in world.open(CallReserve):
            world.promise(call)
    return world


def test_a_flood_leaves_some_room_at_decode_to_who_came_lately() -> None:
    world = full(flood=20)
    assert len(world.promises) == 15, "the sixteenth part is left"
    assert world.core.scheduler.memory_queue.count() == {"flood": 5}
    world.arrive(prompt=152, answer=8, tenant="calm")
    world.promise(world.one(CallReserve))
    assert world.core.scheduler.memory_queue.count() == {"flood": 5}


def test_alone_it_leaves_none() -> None:
    world = full(flood=15)
    world.sleep(TENANT_MEMORY_S + 1.0)
    world.arrive(prompt=152, answer=8, tenant="flood")
    assert world.open(CallReserve) != []


def test_freed_room_wakes_a_flood_only_beyond_what_it_leaves() -> None:
    world = full(flood=18)
    world.report("decode-0", 19)
    assert world.open(CallReserve) == []
    world.report("decode-0", 20)
    assert [call.request for call in world.open(CallReserve)] == [17]


def test_what_could_not_be_placed_otherwise_leaves_less() -> None:
    world = full(flood=0, total=64)
    world.arrive(prompt=62 * 16, answer=8, tenant="flood")
    assert len(world.open(CallReserve)) == 1
