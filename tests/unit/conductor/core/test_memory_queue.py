"""Who waits for room at decode, and who is woken by a report."""

from moonpool.conductor.core.actions import CallReserve, FailRequest
from moonpool.conductor.core.events import ClientGone
from moonpool.conductor.core.failures import NO_DECODE_ROOM, FailureKind
from moonpool.conductor.core.memory_queue import HOLD_AFTER_S
from moonpool.conductor.core.request_spec import SloLimits

from .world import BLOCK, GONE, LIMITS, NO_ROOM, World

BIG, SMALL = 40 * BLOCK, BLOCK


def waiting(*needs: int, room: int = 0) -> World:
    """One decode instance of 64 blocks with so much room by its report, and requests that found none."""
    world = World(decodes=1)
    world.report("decode-0", room)
    for need in needs:
        world.arrive(prompt=need - 8, answer=8)
        world.end(world.one(CallReserve), NO_ROOM)
    assert len(world.core.scheduler.memory_queue) == len(needs)
    return world


def test_one_request_too_big_for_the_room_of_now_does_not_make_the_others_wait() -> None:
    world = waiting(BIG, SMALL, SMALL)
    world.report("decode-0", 10)
    assert [call.request for call in world.open(CallReserve)] == [2, 3]
    assert len(world.core.scheduler.memory_queue) == 1


def test_freed_room_wakes_only_those_that_fit_in_order_of_arrival() -> None:
    world = waiting(4 * BLOCK, 4 * BLOCK, 4 * BLOCK)
    plans = world.cluster.plans
    world.report("decode-0", 9)
    assert [call.request for call in world.open(CallReserve)] == [1, 2]
    assert world.cluster.plans == plans + 2, "a report plans those it wakes only"
    world.report("decode-0", 9)
    assert world.cluster.plans == plans + 2


def test_room_for_what_answers_are_expected_to_need_wakes() -> None:
    world = World(decodes=1)
    world.report("decode-0", 0)
    world.arrive(prompt=BLOCK, answer=20 * BLOCK)
    world.end(world.one(CallReserve), NO_ROOM)
    world.report("decode-0", 2)
    assert world.open(CallReserve) == []
    world.report("decode-0", 2, answer_tokens=BLOCK)
    assert [call.request for call in world.open(CallReserve)] == [1]


def test_what_the_client_expects_of_an_answer_counts_before_what_decode_expects() -> None:
    world = World(decodes=1)
    world.report("decode-0", 0)
    for expected in (BLOCK, 10 * BLOCK):
        world.arrive(prompt=BLOCK, answer=20 * BLOCK, expected=expected)
        world.end(world.one(CallReserve), NO_ROOM)
    world.report("decode-0", 2, answer_tokens=4 * BLOCK)
    assert [call.request for call in world.open(CallReserve)] == [1]
    assert len(world.core.scheduler.memory_queue) == 1


def test_where_seeming_room_was_refused_one_finds_out_for_all() -> None:
    world = waiting(SMALL, SMALL, SMALL, room=20)
    world.report("decode-0", 20)
    assert [call.request for call in world.open(CallReserve)] == [1]
    world.end(world.one(CallReserve), NO_ROOM)
    world.report("decode-0", 20)
    assert [call.request for call in world.open(CallReserve)] == [1]
    world.promise(world.one(CallReserve))
    world.report("decode-0", 20)
    assert [call.request for call in world.open(CallReserve)] == [2, 3]


def test_who_is_refused_again_waits_at_the_same_place() -> None:
    world = waiting(SMALL, SMALL)
    world.report("decode-0", 1)
    world.end(world.one(CallReserve), NO_ROOM)
    world.report("decode-0", 2)
    assert [call.request for call in world.open(CallReserve)] == [1, 2]


def test_a_big_request_does_not_starve() -> None:
    world = waiting(BIG)
    world.sleep(HOLD_AFTER_S)
    world.report("decode-0", 10)
    world.arrive(prompt=1, answer=8)  # would fit, but the instance is held for the first
    assert world.open(CallReserve) == []
    world.report("decode-0", 39)
    assert world.open(CallReserve) == []
    world.report("decode-0", 40)
    assert [call.request for call in world.open(CallReserve)] == [1]
    world.promise(world.one(CallReserve))
    world.report("decode-0", 50)
    assert [call.request for call in world.open(CallReserve)] == [2]


def test_waiting_for_room_ends_within_its_limit_with_the_refusal() -> None:
    world = waiting(BIG)
    world.sleep(LIMITS.room_wait_s - 0.1)
    assert not world.ends
    world.sleep(0.1)
    (end,) = world.ends.values()
    assert isinstance(end, FailRequest)
    assert (end.failure.kind, end.failure.reason, end.refused) == (FailureKind.OVERLOADED, NO_DECODE_ROOM, True)


def test_waiting_for_room_does_not_outlast_the_ttft_limit() -> None:
    world = World(decodes=1)
    world.arrive(slo=SloLimits(ttft_s=3.0))
    world.end(world.one(CallReserve), NO_ROOM)
    world.sleep(3.0)
    assert isinstance(world.ends[1], FailRequest)


def test_an_answer_that_lost_its_place_does_not_overtake_those_who_came_before() -> None:
    world = World(decodes=1)
    world.report("decode-0", 3)
    first = world.arrive(prompt=20, answer=8)
    world.end(world.one(CallReserve), NO_ROOM)
    second, _, start = world.decoding(prompt=1, answer=8)
    world.end(start, GONE)
    world.sleep(0.1)
    world.rehash(second)
    world.end(world.one(CallReserve), NO_ROOM)
    world.report("decode-0", 2)
    assert [call.request for call in world.open(CallReserve)] == [first]


def test_the_refusal_of_an_instance_that_has_left_is_not_kept() -> None:
    digests = set()
    for result in (NO_ROOM, GONE):
        world = World()
        request, call = world.arrive(), world.one(CallReserve)
        world.leave(call.decode, lost="")
        world.end(call, result)
        world.post(ClientGone(request))
        world.finish_all()
        digests.add(world.core.scheduler.digest())
    assert len(digests) == 1
