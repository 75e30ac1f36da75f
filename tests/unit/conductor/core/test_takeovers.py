"""Resumed requests: their sequence is taken over where it is; else they are placed anew with the tokens they have."""

import pytest

from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.conductor.core.actions import (
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CompleteRequest,
    DropRequest,
    FailRequest,
    LeaveSequence,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.attempt_calls import LINGER_S
from moonpool.conductor.core.events import ClientGone, CompletionReason, StopRequested
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.request_spec import DecodeReservation
from tests.unit.conductor.core.world import World

UNKNOWN = Failure(FailureKind.STREAM, "decode-0 cannot go on: there is no such sequence here (any more)")
FENCED = Failure(FailureKind.INVALID, "another conductor has it", field="resume.count")


def test_a_sequence_is_taken_over_where_it_is() -> None:
    world = World()
    number = world.resume(tokens=3)
    adopt = world.one(TakeOverSequence)
    assert adopt == TakeOverSequence(adopt.io, number, "r1", DecodeReservation("decode-0", 1, "", 77, 1, 0), 1)
    world.more(adopt, 2)
    world.more(adopt, 3, CompletionReason.LENGTH, known=True)
    assert world.ends == {number: CompleteRequest(number, CompletionReason.LENGTH)}
    assert world.cancelled == set(), "decode knows that it is over"
    assert (world.all(CallReserve), world.all(AnnouncePlacement)) == ([], [])
    world.end(adopt)
    world.finish_all()


def test_a_sequence_that_was_taken_over_is_ours_until_it_ends() -> None:
    world = World(decodes=0)
    world.join_decode("decode-0")
    world.resume(tokens=3, answer=8)
    adopt = world.one(TakeOverSequence)
    world.report("decode-0", 60, running=1, context_tokens=43)
    decode = world.cluster.decodes.get("decode-0")
    assert decode is not None
    assert (decode.own_sequences, decode.sequences, decode.available_blocks) == (1, 1, 60)
    world.more(adopt, 5, CompletionReason.LENGTH, known=True)
    world.end(adopt)
    assert (world.cluster.claims, decode.busy) == ([], False)
    world.finish_all()


def test_prefill_goes_on_sending_to_a_sequence_that_another_conductor_has_taken_over() -> None:
    """It was started before all of its KV had come: cancelling would end it there."""
    world = World()
    number = world.arrive()
    world.promise(world.one(CallReserve))
    call = world.one(CallPrefill)
    world.first_token(call)
    world.end(world.one(StartDecode), FENCED)
    assert world.ends == {number: FailRequest(number, FENCED)}
    assert world.cancelled == set()
    world.sleep(LINGER_S)
    assert world.cancelled == {call.io}, "not for ever"
    world.end(call)
    world.finish_all()


def test_a_stop_text_ends_the_sequence_at_decode() -> None:
    world = World()
    number = world.resume()
    adopt = world.one(TakeOverSequence)
    world.more(adopt, 1, CompletionReason.STOP)
    assert (world.ends[number], world.cancelled) == (CompleteRequest(number, CompletionReason.STOP), {adopt.io})
    world.finish_all()


def test_what_decode_does_not_know_is_placed_anew_with_the_tokens_that_are_there() -> None:
    world = World()
    number = world.resume(tokens=3)
    adopt = world.one(TakeOverSequence)
    world.more(adopt, 2)  # a log that ends early tells what it has
    world.end(adopt, UNKNOWN)
    assert world.rehashes == [number]
    world.rehash(number)
    reserve = world.one(CallReserve)
    assert reserve.sequence == "r1~1.0", "no earlier attempt had this name"
    world.promise(reserve)
    world.first_token(world.one(CallPrefill))
    world.more(world.one(StartDecode), 2, CompletionReason.LENGTH, known=True)
    assert world.tokens[number] == 3 + 2 + 1 + 2
    assert world.ends[number] == CompleteRequest(number, CompletionReason.LENGTH)
    world.end(world.one(StartDecode))
    world.finish_all()


def test_a_new_conductor_waits_for_the_instance_to_join() -> None:
    world = World(decodes=0)
    number = world.resume()
    assert world.calls == {}
    world.join_decode("decode-1")
    assert world.calls == {}, "another one is not asked yet"
    world.sleep(1.0)
    world.join_decode("decode-0")
    assert world.one(TakeOverSequence).request == number
    world.finish_all()


def test_it_does_not_wait_for_ever() -> None:
    world = World(decodes=0)
    world.join_decode("decode-1")
    world.resume()
    world.sleep(4.9)
    assert world.calls == {}
    world.sleep(0.2)
    assert world.one(CallReserve).decode == "decode-1"
    world.finish_all()


@pytest.mark.parametrize("late", [False, True])
def test_an_instance_that_was_restarted_knows_nothing(late: bool) -> None:
    world = World(decodes=0)
    if late:
        world.resume()
        world.join_decode("decode-0", 2)
    else:
        world.join_decode("decode-0", 2)
        world.resume()
    assert world.one(CallReserve).epoch == 2
    world.finish_all()


def test_a_lost_instance_is_not_waited_for() -> None:
    world = World()
    number = world.resume()
    adopt = world.one(TakeOverSequence)
    world.leave("decode-0")
    assert world.cancelled == {adopt.io}
    world.more(adopt)  # a late one still counts
    world.end(adopt)
    world.rehash(number)
    assert world.one(CallReserve).decode == "decode-1"
    assert number not in world.ends
    world.finish_all()


def test_a_request_that_another_conductor_has_is_not_placed_anew() -> None:
    world = World()
    number = world.resume()
    world.end(world.one(TakeOverSequence), FENCED)
    assert world.ends == {number: FailRequest(number, FENCED)}
    world.finish_all()


def test_a_sequence_of_ours_that_another_conductor_has_taken_over_is_not_placed_anew() -> None:
    world = World()
    number, _, start = world.decoding()
    world.end(start, FENCED)
    assert world.ends == {number: FailRequest(number, FENCED)}
    world.finish_all()


def test_a_client_that_leaves_ends_what_was_adopted() -> None:
    world = World()
    first, second = world.resume(), world.resume("decode-9")
    adopt = world.one(TakeOverSequence)
    for number in (first, second):
        world.post(ClientGone(number))
    assert world.ends == {first: DropRequest(first), second: DropRequest(second)}
    assert world.cancelled == {adopt.io}
    world.finish_all()


@pytest.mark.parametrize("choices", [1, 3])
def test_a_drain_leaves_it_to_the_next_conductor(choices: int) -> None:
    world = World()
    number = world.resume(choices=choices)
    adopt = world.one(TakeOverSequence)
    world.post(StopRequested(number))
    assert world.ends == {number: CompleteRequest(number, CompletionReason.CANCELLED)}
    assert (world.all(LeaveSequence), world.all(CancelIo)) == ([LeaveSequence(adopt.io)], [])
    world.finish_all()


def test_a_request_without_a_promise_then_is_placed_like_any_other() -> None:
    world = World()
    world.resume("")
    assert world.one(CallReserve).sequence == "r1~1.0"
    world.finish_all()


def test_several_answers_are_taken_over_together_and_placed_anew_from_their_prompt() -> None:
    world = World()
    number = world.resume(tokens=5, choices=3)
    adopt = world.one(TakeOverSequence)
    assert adopt == TakeOverSequence(adopt.io, number, "r1", DecodeReservation("decode-0", 1, "", 77, 1, 0), 1)
    decode = world.cluster.decodes.get("decode-0")
    assert decode is not None
    assert (decode.sequences, decode.context_tokens) == (3, 3 * 40)
    world.more(adopt, 4)
    world.end(adopt, UNKNOWN)
    world.rehash(number)
    world.promise(world.one(CallReserve))
    prefill = world.one(CallPrefill)
    assert prefill.plan.demand.prompt_tokens == 40
    assert prefill.plan.demand.choices == 3
    world.first_token(prefill)
    world.more(world.one(StartDecode), 3, CompletionReason.LENGTH, known=True)
    assert world.ends[number] == CompleteRequest(number, CompletionReason.LENGTH)
    world.end(world.one(StartDecode))
    world.finish_all()


def test_answers_that_have_grown_begin_a_new_series_of_failures() -> None:
    """Several too: they lose an instance now and then in a long life."""
    world = World(decodes=6)
    number = world.resume(tokens=0, choices=2, answer=400)
    world.end(world.one(TakeOverSequence), UNKNOWN)
    for _ in range(6):
        world.sleep(20.0)
        world.rehash(number)
        world.promise(world.one(CallReserve))
        world.first_token(world.one(CallPrefill))
        start = world.one(StartDecode)
        world.more(start, 2)
        world.sleep(20.0)
        world.end(start, Failure(FailureKind.STREAM, "lost"))
    assert number not in world.ends
    world.finish_all()


def test_a_deferred_answer_that_ends_decode_time_and_again_is_given_up() -> None:
    """Candidates from prefill are no progress, however much time lies between two failures."""
    world = World(decodes=6)
    number = world.arrive(choices=2, deferred=True)
    for attempt in range(4):
        if attempt:
            world.sleep(20.0)
            world.rehash(number)
        world.promise(world.one(CallReserve))
        world.first_token(world.one(CallPrefill))
        start = world.one(StartDecode)
        world.sleep(20.0)
        world.end(start, Failure(FailureKind.STREAM, "lost"))
    assert isinstance(world.ends.get(number), FailRequest)
    world.finish_all()
