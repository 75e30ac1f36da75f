"""Instances that drain or are slow are rid of what they have, and no sequence is lost or computed from too far back."""

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.actions import CallPrefill, CallReserve, CompleteRequest, StartDecode, TakeOverSequence
from moonpool.conductor.core.events import CompletionReason, KVDelivered, LoadReported
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.health_monitor import FIRST_TRIAL_S, MIN_REPORTS, SLOW_HOLD_S
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.scheduler import MAX_MOVING, MOVE_RETRY_S
from tests.unit.conductor.core.world import GONE, NO_ROOM, World

FENCED = Failure(FailureKind.INVALID, "another conductor has it", field="resume.count")


def moved(world: World, number: int) -> tuple[StartDecode, StartDecode]:
    """A request whose new place has everything: its old sequence and its new one."""
    old = world.one(StartDecode)
    world.drain(old.target.decode)
    world.rehash(number)
    world.promise(world.one(CallReserve))
    world.first_token(world.one(CallPrefill))
    new = world.open(StartDecode)[-1]
    assert new is not old
    return old, new


@pytest.mark.parametrize("what", [{}, {"choices": 3}], ids=["one", "three"])
def test_a_sequence_goes_on_at_a_draining_instance_until_another_has_it(what: dict[str, int]) -> None:
    world = World()
    number, old = world.streaming(**what)
    assert (old.target.decode, world.tokens[number]) == ("decode-0", 3)
    world.drain("decode-0")
    assert world.rehashes == [number]
    assert world.cancelled == set(), "it goes on"
    world.rehash(number)
    reserve = world.one(CallReserve)
    assert (reserve.decode, reserve.sequence) == ("decode-1", "r1~1")
    world.more(old, 2)
    world.promise(reserve)
    world.first_token(world.one(CallPrefill))
    world.more(old, 1)
    new = world.open(StartDecode)[-1]
    assert (new.target.decode, world.tokens[number]) == ("decode-1", 6)
    assert world.cancelled == set()
    world.more(new, 0)  # what it tells first the answer has
    assert world.cancelled == {old.io}
    world.end(old, GONE)
    world.more(new, 2, CompletionReason.LENGTH, known=True)
    assert (world.ends, world.tokens[number]) == ({number: CompleteRequest(number, CompletionReason.LENGTH)}, 8)
    world.end(new)
    world.finish_all()


def test_a_deferred_answer_which_says_nothing_is_moved_when_all_of_it_is_there() -> None:
    """It begins again at the new place, and whichever ends first gives the answers."""
    world = World()
    number, prefill, old = world.decoding(choices=2, deferred=True)
    world.drain("decode-0")
    assert world.rehashes == [], "its KV is on its way"
    world.post(KVDelivered(prefill.io))
    world.end(prefill)
    world.drain("decode-0")
    assert (world.rehashes, world.cancelled) == ([number], set())
    world.rehash(number)
    world.promise(world.one(CallReserve))
    world.first_token(world.one(CallPrefill))
    new = world.open(StartDecode)[-1]
    assert (new.target.decode, world.cancelled) == ("decode-1", set())
    world.more(old, 8, CompletionReason.LENGTH, known=True)
    assert (world.ends, new.io in world.cancelled) == ({number: CompleteRequest(number, CompletionReason.LENGTH)}, True)
    world.finish_all()


def test_without_another_place_it_stays() -> None:
    world = World()
    number, old = world.streaming()
    world.drain("decode-0")
    world.rehash(number)
    world.end(world.one(CallReserve), NO_ROOM)
    world.sleep(30.0)
    assert (world.cancelled, world.ends) == (set(), {})
    world.more(old, 5, CompletionReason.LENGTH, known=True)
    world.end(old)
    assert world.ends == {number: CompleteRequest(number, CompletionReason.LENGTH)}
    world.finish_all()


def test_when_it_failed_it_is_tried_again_and_costs_no_attempt() -> None:
    world = World(decodes=2)
    number, old = world.streaming()
    for _ in range(5):
        world.drain("decode-0")
        world.rehash(number)
        world.promise(world.one(CallReserve))
        world.end(world.one(CallPrefill), GONE)
        assert (world.cancelled, world.ends) == (set(), {})
        world.drain("decode-0")
        assert world.rehashes == [], "not at once"
        world.sleep(MOVE_RETRY_S)
    world.more(old, 5, CompletionReason.LENGTH, known=True)
    world.end(old)
    world.finish_all()


def test_alone_it_keeps_what_it_has() -> None:
    world = World(decodes=1)
    world.streaming()
    world.drain("decode-0")
    assert (world.rehashes, world.cancelled) == ([], set())
    world.finish_all()


def test_an_answer_that_ends_meanwhile_ends_both() -> None:
    world = World()
    number, _ = world.streaming()
    old, new = moved(world, number)
    world.more(old, 5, CompletionReason.LENGTH, known=True)
    assert world.ends == {number: CompleteRequest(number, CompletionReason.LENGTH)}
    assert world.cancelled == {new.io}, "decode knows that the old one is over"
    world.finish_all()


def test_an_old_instance_that_is_lost_meanwhile_costs_nothing() -> None:
    world = World()
    number, _ = world.streaming()
    old, new = moved(world, number)
    world.leave("decode-0")
    world.end(old, GONE)
    world.more(new, 3)
    assert (world.ends, new.io in world.cancelled) == ({}, False)
    assert world.tokens[number] == 3 + 1 + 3
    world.finish_all()


def test_one_that_another_conductor_takes_meanwhile_ends_here() -> None:
    world = World()
    number, _ = world.streaming()
    old, new = moved(world, number)
    world.end(old, FENCED)
    assert new.io in world.cancelled
    assert number in world.ends
    world.finish_all()


def test_a_resumed_sequence_is_moved_too() -> None:
    world = World()
    number = world.resume(tokens=3)
    adopt = world.one(TakeOverSequence)
    world.more(adopt, 1)
    world.drain("decode-0")
    assert (world.rehashes, world.cancelled) == ([number], set())
    world.rehash(number)
    reserve = world.one(CallReserve)
    assert (reserve.decode, reserve.sequence) == ("decode-1", "r1~1.0")
    world.promise(reserve)
    world.first_token(world.one(CallPrefill))
    world.more(world.one(StartDecode), 1)
    assert (world.cancelled, world.tokens[number]) == ({adopt.io}, 6)
    world.finish_all()


def test_a_few_are_moved_at_once() -> None:
    world = World(total=640)
    numbers = [world.streaming()[0] for _ in range(2 * (MAX_MOVING + 2))]
    here = [start for start in world.open(StartDecode) if start.target.decode == "decode-0"]
    assert len(here) == MAX_MOVING + 2
    world.drain("decode-0")
    world.drain("decode-0")
    assert world.rehashes == [start.request for start in here[:MAX_MOVING]]
    world.rehash(here[0].request)
    world.promise(world.one(CallReserve))
    world.first_token(world.one(CallPrefill))
    world.more(world.open(StartDecode)[-1], 0)
    assert world.rehashes == [start.request for start in here[1 : MAX_MOVING + 1]], "one has gone: another one goes"
    assert len(numbers) == len(world.core.scheduler)
    world.finish_all()


def tell(world: World, name: str, *, slower: float = 1.0, running: int = 1) -> None:
    """An instance reports how fast it is: a prompt of 2,048 tokens takes 2 s, a step of 4 sequences 0.08 s."""
    speeds = Speeds(prefill_per_token_s=0.001 * slower, decode_per_sequence_s=0.02 * slower)
    world.post(LoadReported(name, LoadFacts(running=running, free_blocks=64, speeds=speeds)))


def teach(world: World, name: str) -> None:
    """So much is heard of an instance that it is judged."""
    for lesson in range(MIN_REPORTS + 2):
        tell(world, name, slower=1.0 + lesson % 2 / 10)


def found_slow(world: World, name: str) -> None:
    world.drained = True
    teach(world, name)
    tell(world, name, slower=10.0)
    world.sleep(SLOW_HOLD_S)
    tell(world, name, slower=10.0)


def test_prompts_at_a_slow_prefill_instance_are_placed_anew() -> None:
    world = World(slow_factor=6.0)
    number = world.arrive()
    world.promise(world.one(CallReserve))
    prefill = world.one(CallPrefill)
    assert prefill.plan.prefill.id == "prefill-0"
    found_slow(world, "prefill-0")
    assert (world.cancelled, world.rehashes) == ({prefill.io}, [number])
    world.rehash(number)
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill).plan.prefill.id == "prefill-1"
    world.finish_all()


def test_a_prefill_instance_whose_prompts_have_their_tokens_is_not_disturbed() -> None:
    world = World(slow_factor=6.0)
    world.decoding()
    found_slow(world, "prefill-0")
    assert (world.cancelled, world.rehashes) == (set(), [])
    world.finish_all()


def test_a_slow_decode_instance_is_relieved_and_comes_back_after_its_trial() -> None:
    world = World(slow_factor=6.0)
    for name in ("decode-0", "decode-1"):
        teach(world, name)
    number, old = world.streaming()
    found_slow(world, "decode-0")
    assert world.rehashes == [number]
    world.rehash(number)
    world.promise(world.one(CallReserve))
    world.first_token(world.one(CallPrefill))
    world.more(world.open(StartDecode)[-1], 0)
    assert world.cancelled == {old.io}
    world.end(old, GONE)
    assert decodes_of(world, 3) == ["decode-1"] * 3
    world.sleep(FIRST_TRIAL_S)
    tell(world, "decode-0", slower=10.0, running=0)
    tell(world, "decode-1", slower=0.9)
    assert decodes_of(world, 2) == ["decode-0", "decode-1"], "one request only, though the other one is quicker"
    tell(world, "decode-0", slower=1.5)
    assert "decode-0" in decodes_of(world, 2)
    world.finish_all()


def decodes_of(world: World, count: int) -> list[str]:
    """Where the next requests go."""
    found = []
    for _ in range(count):
        world.arrive()
        reserve = world.open(CallReserve)[-1]
        found.append(reserve.decode)
        world.promise(reserve)
    return found
