"""Requests that wait for a placement that keeps their limits: in fair order, until it is there or time is over."""

from dataclasses import replace

import pytest

from moonpool.conductor.core.actions import AnnouncePlacement, CallPrefill, CallReserve, FailRequest
from moonpool.conductor.core.events import ClientGone
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.slo_queue import MAX_RETRIES_AT_ONCE, MAX_RETRY_PAUSE_S, RETRY_PAUSE_S

from .world import GONE, LIMITS, World

LONG = 600
"""Tokens of a prompt that takes 0.6 s."""
PATIENT = SloLimits(ttft_s=0.3, queue_s=5.0)
SLOW = Failure(FailureKind.OVERLOADED, "slow", reason="tbt_slo", predicted_tbt_s=1.0, slo_s=0.5, retry_after_s=1.0)


def busy(queued: int = 1024, queued_bytes: int = 1 << 20) -> tuple[World, CallPrefill]:
    """One prefill instance with a long prompt."""
    limits = replace(LIMITS, max_queued=queued, max_queued_bytes=queued_bytes)
    world = World(prefills=1, decodes=1, limits=limits, total=1000)
    world.arrive(prompt=LONG, tenant="first")
    world.promise(world.one(CallReserve))
    return world, world.one(CallPrefill)


def refusal(world: World, number: int) -> Failure:
    end = world.ends[number]
    assert isinstance(end, FailRequest)
    assert end.refused
    return end.failure


def test_without_a_deadline_it_is_refused_at_once() -> None:
    world, _ = busy()
    number = world.arrive(slo=replace(PATIENT, queue_s=0.0))
    assert refusal(world, number).reason == "ttft_slo"


def test_it_waits_until_its_limit_can_be_kept() -> None:
    world, long = busy()
    world.arrive(slo=PATIENT)
    assert (len(world.core.scheduler.slo_queue), world.core.scheduler.slo_queue.nbytes, world.ends) == (1, 160, {})
    world.sleep(0.2)
    assert world.open(CallReserve) == []
    world.first_token(long)
    world.sleep(MAX_RETRY_PAUSE_S)
    assert [call.request for call in world.open(CallReserve)] == [2]
    assert len(world.core.scheduler.slo_queue) == 0


def test_what_it_waits_does_not_count_in_its_limit_and_is_told() -> None:
    world, long = busy()
    world.arrive(slo=PATIENT)
    world.sleep(0.2)
    world.first_token(long)
    world.sleep(MAX_RETRY_PAUSE_S)
    world.promise(world.one(CallReserve))
    told = world.all(AnnouncePlacement)[-1]
    assert told.request == 2
    assert 0.3 < told.queued_s == told.waited_s < 0.3 + MAX_RETRY_PAUSE_S


def test_after_its_time_it_is_refused_with_what_was_predicted_last() -> None:
    world, _ = busy()
    for _ in range(20):
        world.arrive(prompt=LONG, tenant="first")
    number = world.arrive(slo=PATIENT)
    assert number not in world.ends
    world.sleep(4.9)
    assert number not in world.ends
    world.sleep(0.2)
    told = refusal(world, number)
    assert (told.kind, told.reason, told.slo_s) == (FailureKind.OVERLOADED, "ttft_slo", 0.3)
    assert told.predicted_ttft_s > 0.3
    assert told.retry_after_s > 0.0
    assert told.message.startswith("after 5.000 s in the queue: predicted time to first token")
    assert len(world.core.scheduler.slo_queue) == 0


def test_who_has_left_waits_no_more() -> None:
    world, long = busy()
    number = world.arrive(slo=PATIENT)
    world.post(ClientGone(number))
    assert (len(world.core.scheduler.slo_queue), world.core.scheduler.slo_queue.nbytes) == (0, 0)
    world.post(ClientGone(1))
    world.end(long, GONE)
    world.finish_all()


def test_what_decode_finds_too_slow_waits_as_well() -> None:
    world = World(prefills=1, decodes=1)
    world.arrive(slo=SloLimits(tbt_s=0.5, queue_s=5.0))
    world.end(world.one(CallReserve), SLOW)
    assert len(world.core.scheduler.slo_queue) == 1
    world.sleep(MAX_RETRY_PAUSE_S)
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill).request == 1


def test_waiting_for_room_has_the_same_deadline() -> None:
    world = World(prefills=1, decodes=1)
    number = world.arrive(slo=SloLimits(ttft_s=1.0, queue_s=40.0))
    world.end(
        world.one(CallReserve), Failure(FailureKind.OVERLOADED, "full", reason="no_decode_room", retry_after_s=1.0)
    )
    world.sleep(39.0)
    assert number not in world.ends
    world.sleep(1.0)
    assert refusal(world, number).reason == "no_decode_room"


def test_a_full_queue_refuses_the_last_of_whoever_has_most_in_it() -> None:
    world, _ = busy(queued=3)
    flood = [world.arrive(slo=PATIENT, tenant="flood") for _ in range(3)]
    assert refusal(world, world.arrive(slo=PATIENT, tenant="flood")).reason == "ttft_slo"
    calm = world.arrive(slo=PATIENT, tenant="calm")
    assert refusal(world, flood[-1]).reason == "ttft_slo"
    assert calm not in world.ends
    assert world.core.scheduler.slo_queue.count() == {"flood": 2, "calm": 1}


def test_a_queue_is_bounded_in_bytes() -> None:
    world, _ = busy(queued_bytes=4 * 1000)
    big, small = world.arrive(prompt=700, slo=PATIENT, tenant="a"), world.arrive(prompt=300, slo=PATIENT, tenant="b")
    assert not world.ends
    assert refusal(world, world.arrive(prompt=10, slo=PATIENT, tenant="a")).reason == "ttft_slo"
    assert {big, small}.isdisjoint(world.ends)
    world.arrive(prompt=10, slo=PATIENT, tenant="b")
    assert refusal(world, big).reason == "ttft_slo"


def test_the_queue_is_served_in_fair_order() -> None:
    world, long = busy()
    flood = [world.arrive(prompt=250, slo=PATIENT, tenant="flood") for _ in range(4)]
    calm, urgent = (world.arrive(prompt=250, slo=PATIENT, tenant="calm", priority=priority) for priority in (0, -1))
    world.first_token(long)
    order = []
    for _ in range(200):
        world.sleep(RETRY_PAUSE_S)
        for call in world.open(CallReserve):
            order.append(call.request)
            world.promise(call)
            world.first_token(next(other for other in world.open(CallPrefill) if other.request == call.request))
    assert order == [urgent, flood[0], flood[1], calm, *flood[2:]], "equals go by arrival"


def test_a_look_plans_a_few_only() -> None:
    world, _ = busy()
    for _ in range(100):
        world.arrive(slo=PATIENT)
    plans = world.cluster.plans
    world.sleep(0.5)
    assert world.cluster.plans - plans <= MAX_RETRIES_AT_ONCE * 0.5 / RETRY_PAUSE_S


@pytest.mark.parametrize("rest_s", [0.0, 1.0])
def test_who_had_much_without_waiting_goes_behind_until_nobody_has_waited_for_as_long(rest_s: float) -> None:
    """What is placed at once is paid for like what has waited."""
    world = World(prefills=1, decodes=1, total=1000)
    for tenant in ("flood", "flood", "other"):
        number = world.arrive(prompt=200, tenant=tenant)
        world.promise(world.one(CallReserve))
        world.first_token(next(call for call in world.open(CallPrefill) if call.request == number))
    world.sleep(rest_s)
    world.arrive(prompt=LONG, tenant="other")
    world.promise(world.one(CallReserve))
    flood = world.arrive(prompt=250, slo=PATIENT, tenant="flood")
    calm = world.arrive(prompt=250, slo=PATIENT, tenant="calm")
    world.first_token(next(call for call in world.open(CallPrefill) if call.request == 4))
    world.sleep(MAX_RETRY_PAUSE_S)
    assert [call.request for call in world.open(CallReserve)] == ([flood, calm] if rest_s else [calm, flood])
