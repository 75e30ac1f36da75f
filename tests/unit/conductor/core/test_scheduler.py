"""What must hold in a request's life, one case each."""

import pytest

from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.conductor.core.actions import (
    CallPrefill,
    CallReserve,
    CancelReservation,
    CompleteRequest,
    FailRequest,
    LeaveSequence,
    Rehash,
    RenewReservation,
    StartDecode,
)
from moonpool.conductor.core.events import ClientGone, CompletionReason, KVDelivered, StopRequested
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.scheduler import DELIVERY_TIMEOUT_S

from .world import BLOCK, GONE, LEASE_S, LIMITS, NO_ROOM, World

BIG, SMALL = 40 * BLOCK, BLOCK


def ended(world: World) -> CompleteRequest | FailRequest:
    (end,) = world.ends.values()
    assert isinstance(end, CompleteRequest | FailRequest)
    return end


def test_a_request_is_reserved_prefilled_decoded_and_gives_everything_back() -> None:
    world = World()
    number, prefill, start = world.decoding()
    world.post(KVDelivered(prefill.io))
    world.end(prefill)
    world.more(start, 6)
    world.more(start, 1, CompletionReason.LENGTH, known=True)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)
    world.end(start)
    assert not world.all(CancelIo)
    assert not world.all(CancelReservation)
    world.finish_all()


def test_an_answer_that_ends_here_is_cancelled_at_decode_and_its_prefill_may_go_on_for_a_while() -> None:
    world = World()
    _, prefill, start = world.decoding()
    world.more(start, 2, CompletionReason.STOP)
    assert world.all(CancelIo) == [CancelIo(start.io)]
    world.sleep(60.0)
    assert world.all(CancelIo) == [CancelIo(start.io), CancelIo(prefill.io)]
    world.finish_all()


# --- losing a prefill -------------------------------------------------------------------------------------------------


def test_losing_a_prefill_after_its_kv_was_delivered_does_not_end_its_sequences() -> None:
    world = World()
    number, prefill, start = world.decoding()
    world.post(KVDelivered(prefill.io))
    world.leave("prefill-0")
    world.end(prefill, GONE)
    world.sleep(10 * DELIVERY_TIMEOUT_S)
    world.more(start, 7, CompletionReason.LENGTH, known=True)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)
    assert world.all(Rehash) == []


def test_losing_a_prefill_while_decode_streams_does_not_end_its_sequences() -> None:
    world = World()
    number, _, start = world.decoding()
    world.more(start)
    world.leave("prefill-0")
    world.sleep(10 * DELIVERY_TIMEOUT_S)
    world.more(start, 6, CompletionReason.LENGTH, known=True)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)


def test_when_a_prefill_is_lost_after_its_token_decodes_word_counts() -> None:
    world = World()
    _, prefill, start = world.decoding()
    world.end(prefill, GONE)
    world.sleep(DELIVERY_TIMEOUT_S / 2)
    world.more(start)  # decode had everything
    world.sleep(10 * DELIVERY_TIMEOUT_S)
    assert world.all(Rehash) == []


def test_a_torn_transfer_is_placed_anew_and_decode_is_not_blamed() -> None:
    world = World(prefills=2, decodes=2)
    number, _, start = world.decoding()
    world.report("decode-1", 0)
    world.leave("prefill-0")
    world.end(start, Failure(FailureKind.STREAM, "the sender's stream broke"))
    world.rehash(number)
    again = world.one(CallReserve)
    assert again.decode == start.target.decode
    world.promise(again)
    assert world.one(CallPrefill).plan.prefill.id == "prefill-1"


def test_a_torn_transfer_of_which_decode_says_nothing_is_placed_anew() -> None:
    world = World()
    number, _, start = world.decoding()
    world.leave("prefill-0")
    world.sleep(DELIVERY_TIMEOUT_S)
    assert CancelIo(start.io) in world.actions
    assert world.rehashes == [number]
    world.finish_all()


def test_a_prefill_that_tells_of_a_failed_transfer_is_not_waited_for() -> None:
    world = World()
    number, prefill, start = world.decoding()
    world.end(prefill, Failure(FailureKind.TRANSFER, "a slice is missing"))
    assert world.rehashes == [number]
    assert CancelIo(start.io) in world.actions


def test_losing_decode_places_the_request_anew_elsewhere_with_the_tokens_so_far() -> None:
    world = World()
    number, _, start = world.decoding(answer=8)
    world.more(start, 3)
    world.leave("decode-0")
    world.end(start, GONE)
    world.rehash(number)
    again = world.one(CallReserve)
    assert (again.decode, again.sequence) == ("decode-1", "r1~1")
    world.promise(again)
    assert world.one(CallPrefill).plan.demand.prompt_tokens == 40 + 4


# --- promises ---------------------------------------------------------------------------------------------------------


def test_a_promise_does_not_die_while_its_prompt_waits_at_prefill() -> None:
    world = World()
    world.arrive()
    world.promise(world.one(CallReserve))
    silent, before = 0.0, world.now
    for _ in range(20):
        world.sleep(LEASE_S / 4)
        if any(isinstance(action, RenewReservation) for action in world.actions):
            before = world.now
        silent = max(silent, world.now - before)
        world.actions.clear()
    assert silent < LEASE_S / 2
    world.first_token(world.one(CallPrefill))
    world.sleep(LEASE_S)
    assert world.all(RenewReservation) == []


def test_a_promise_that_comes_after_its_request_has_ended_is_given_back() -> None:
    world = World()
    number = world.arrive()
    call = world.one(CallReserve)
    world.post(ClientGone(number))
    assert world.cluster.claims, "the call may still get its promise, which counts until then"
    world.promise(call)
    assert [undo.target.transfer_id for undo in world.all(CancelReservation)] == [1]
    world.finish_all()


def test_a_reserve_that_takes_too_long_is_not_waited_for_and_its_late_promise_is_given_back() -> None:
    world = World()
    world.arrive()
    slow = world.one(CallReserve)
    world.sleep(LIMITS.reserve_timeout_s)
    other = next(call for call in world.open(CallReserve) if call is not slow)
    assert (slow.decode, other.decode) == ("decode-0", "decode-1")
    world.promise(other)
    assert world.one(CallPrefill).target == world.promises[1]
    world.promise(slow)
    assert [undo.target.decode for undo in world.all(CancelReservation)] == ["decode-0"]
    world.finish_all()


def test_a_late_promise_is_used_when_there_is_no_other() -> None:
    world = World(decodes=1)
    world.arrive()
    slow = world.one(CallReserve)
    world.sleep(LIMITS.reserve_timeout_s)
    world.promise(slow)
    assert world.one(CallPrefill).target == world.promises[1]


def test_once_a_late_promise_is_used_the_call_that_is_still_out_changes_nothing() -> None:
    world = World()
    number = world.arrive()
    slow = world.one(CallReserve)
    world.sleep(LIMITS.reserve_timeout_s)
    other = next(call for call in world.open(CallReserve) if call is not slow)
    world.promise(slow)
    world.first_token(world.one(CallPrefill))
    start = world.one(StartDecode)
    world.sleep(LIMITS.reserve_timeout_s)
    world.promise(other)
    assert [undo.target.decode for undo in world.all(CancelReservation)] == [other.decode]
    world.more(start, 7, CompletionReason.LENGTH, known=True)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)


def test_a_promise_of_an_instance_that_was_lost_meanwhile_is_not_used() -> None:
    world = World()
    world.arrive()
    call = world.one(CallReserve)
    world.leave("decode-0")
    world.promise(call)
    assert [undo.target.decode for undo in world.all(CancelReservation)] == ["decode-0"]
    assert [call.decode for call in world.open(CallReserve)] == ["decode-1"]


def test_a_promise_whose_answer_is_lost_is_given_back_by_its_name() -> None:
    world = World()
    world.arrive()
    lost = world.one(CallReserve)
    world.end(lost, GONE)
    [undo] = world.all(CancelReservation)
    assert (undo.sequence, undo.target.decode, undo.target.transfer_id) == (lost.sequence, lost.decode, 0)
    world.end(world.open(CallReserve)[0], NO_ROOM)
    assert world.all(CancelReservation) == [undo], "who refuses has promised nothing"
    world.finish_all()


def test_at_most_two_reserves_of_a_request_are_out_at_once() -> None:
    world = World(decodes=5)
    world.arrive()
    world.sleep(20 * LIMITS.reserve_timeout_s)
    assert len(world.all(CallReserve)) == 2
    world.end(world.open(CallReserve)[0], GONE)
    assert len(world.all(CallReserve)) == 3
    world.finish_all()


def test_an_instance_that_was_restarted_between_plan_and_promise_gets_it_back() -> None:
    world = World()
    world.arrive()
    world.promise(world.one(CallReserve), epoch=2)
    assert [undo.target.epoch for undo in world.all(CancelReservation)] == [2]
    assert world.one(CallReserve).decode == "decode-1"


# --- ends -------------------------------------------------------------------------------------------------------------


def test_after_the_last_retry_the_failure_is_told() -> None:
    world = World()
    number = world.arrive()
    for _ in range(LIMITS.retries + 1):
        world.promise(world.one(CallReserve))
        world.end(world.one(CallPrefill), Failure(FailureKind.STREAM, "broken"))
        world.sleep(10.0)
        for request in list(world.rehashes):
            world.rehash(request)
    end = ended(world)
    assert isinstance(end, FailRequest)
    assert end.failure.kind is FailureKind.UNAVAILABLE
    assert end.failure.message.startswith("given up after 4 placements")
    assert number in world.ends
    world.finish_all()


def test_damaged_transfers_are_tried_again_until_they_are_no_chance() -> None:
    """Few of many frames are damaged: that all attempts meet one is possible, and grows unlikely."""
    world, damaged = World(), Failure(FailureKind.TRANSFER, "a frame came damaged")
    world.arrive()
    attempts = 0
    while not world.ends:
        world.promise(world.one(CallReserve))
        world.end(world.one(CallPrefill), damaged)
        attempts += 1
        for _ in range(40):
            for request in list(world.rehashes):
                world.rehash(request)
            if world.open(CallReserve) or world.ends:
                break
            world.sleep(0.1)
    assert LIMITS.retries + 1 < attempts < 12
    assert LIMITS.recovery_s <= world.now < 2 * LIMITS.recovery_s
    world.finish_all()


def test_an_invalid_request_is_not_tried_again() -> None:
    world = World()
    world.arrive()
    world.promise(world.one(CallReserve))
    world.end(world.one(CallPrefill), Failure(FailureKind.INVALID, "no", field="prompt"))
    end = ended(world)
    assert isinstance(end, FailRequest)
    assert end.failure.field == "prompt"


@pytest.mark.parametrize("told", ["in time", "after the attempt's end", "with the new keys alone"])
def test_tokens_count_once_whenever_their_attempt_ends(told: str) -> None:
    world = World()
    number, _, start = world.decoding(answer=8)
    if told == "in time":
        world.more(start, 2)
    world.leave("decode-0")
    if told == "after the attempt's end":
        world.more(start, 2)
    world.end(start)
    if told == "with the new keys alone":
        world.tokens[number] += 2
    world.rehash(number)
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill).plan.demand.prompt_tokens == 40 + 3


def test_an_answer_that_was_complete_before_its_instance_was_lost_is_complete() -> None:
    world = World()
    number, _, start = world.decoding()
    world.leave("decode-0")
    world.more(start, 7, CompletionReason.LENGTH, known=True)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)
    world.finish_all()


def test_a_draining_conductor_leaves_answers_to_another_one_and_refuses_who_has_none() -> None:
    world = World()
    first, prefill, start = world.decoding()
    world.more(start)
    second = world.arrive()
    for number in (first, second):
        world.post(StopRequested(number))
    assert (world.all(LeaveSequence), world.all(CancelIo)) == ([LeaveSequence(start.io)], []), (
        "KV may still be on its way to decode"
    )
    assert prefill.io in world.calls
    assert world.ends[first] == CompleteRequest(first, CompletionReason.CANCELLED)
    end = world.ends[second]
    assert isinstance(end, FailRequest)
    assert end.failure.kind is FailureKind.UNAVAILABLE
    world.finish_all()


def test_an_answer_that_cannot_be_told_fails_and_is_not_placed_anew() -> None:
    world, failure = World(), Failure(FailureKind.INTERNAL, "a defect")
    number, _, start = world.decoding()
    world.post(StopRequested(number, failure))
    assert ended(world) == FailRequest(number, failure)
    assert start.io in world.cancelled
    world.finish_all()


def test_a_request_ends_by_its_deadline_wherever_it_is() -> None:
    world = World()
    world.arrive(limit_s=1.0)
    _, _, _ = world.decoding(limit_s=1.0)
    world.sleep(1.0)
    kinds = {end.failure.kind for end in world.ends.values() if isinstance(end, FailRequest)}
    assert (len(world.ends), kinds) == (2, {FailureKind.DEADLINE})
    world.finish_all()


def test_a_request_for_which_no_decode_could_be_asked_tries_again_until_one_is_there() -> None:
    world = World(decodes=1)
    world.arrive()
    world.end(world.one(CallReserve), GONE)
    assert not world.ends
    world.sleep(0.1)
    (number,) = world.rehashes
    world.rehash(number)
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill)


def test_an_answer_waits_for_an_instance_to_come_back_within_the_recovery_time() -> None:
    world = World(decodes=1)
    number, _, start = world.decoding()
    world.leave("decode-0")
    world.end(start, GONE)
    world.sleep(1.0)
    world.rehash(number)
    world.sleep(LIMITS.recovery_s / 2)
    assert not world.ends
    world.join_decode("decode-0", epoch=2)
    assert world.one(CallReserve).epoch == 2


def test_without_engines_a_new_request_is_refused_at_once() -> None:
    world = World(prefills=1, decodes=0)
    world.arrive()
    end = ended(world)
    assert isinstance(end, FailRequest)
    assert (end.failure.kind, end.refused) == (FailureKind.UNAVAILABLE, True)


def test_one_token_needs_no_decode() -> None:
    world = World()
    number = world.arrive(answer=1)
    assert world.all(CallReserve) == []
    world.first_token(world.one(CallPrefill), CompletionReason.LENGTH)
    assert ended(world) == CompleteRequest(number, CompletionReason.LENGTH)
    assert world.all(StartDecode) == []
    world.finish_all()


def test_tokens_that_a_leaving_client_had_are_counted_though_no_call_told_of_them() -> None:
    world = World()
    number, _, start = world.decoding(answer=8)
    world.more(start, 2)
    request = world.core.scheduler.requests[number]
    before = request.generated
    world.post(ClientGone(number, 3))
    assert request.generated == before + 3
