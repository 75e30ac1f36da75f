"""Sequences that lose their conductor: they run on, park, are kept, and are adopted by whoever has the higher fence."""

import pytest

from moonpool.base.logprobs import bytes_per_token
from moonpool.engine.decode.core.actions import (
    DropOutputLog,
    FenceConductor,
    RequestAdopted,
    RequestFreed,
    RequestParked,
    StopRun,
)
from moonpool.engine.decode.core.events import AbortRequest, SearchRules, StreamOpened
from moonpool.engine.decode.core.output_retention import KEY_BYTES, RETAINED_BYTES, TOKEN_BYTES
from moonpool.engine.decode.core.request import NO_STREAM, RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import WAYS, World, config

LONG = 4 * BT


def lonely(blocks: int = 24, answer: int = LONG, **settings: object) -> tuple[World, int]:
    """A sequence whose conductor is lost, while a step runs."""
    world = World(config(blocks, grace_s=2.0, log_ttl_s=30.0, **settings))
    number = world.go(prompt(20), answer, conductor="conductor", resumable=True)
    world.close(1)
    return world, number


def newcomer(world: World, stream: int = 2) -> int:
    world.post(StreamOpened(stream, f"conductor {stream}"))
    return stream


def test_an_orphan_runs_on_and_is_adopted_without_a_gap() -> None:
    world, number = lonely()
    for _ in range(5):
        world.step()
    assert (len(world.answers[number]), len(world.heard[number])) == (6, 1)
    assert world.adopt(number, newcomer(world), 1) == [RequestAdopted(number, 2, (1,))]
    world.tick(100.0)  # its grace does not end any more
    world.work()
    assert world.heard[number] == world.answers[number]
    assert len(world.answers[number]) == LONG
    assert number not in world.failed


def test_after_its_grace_it_parks_when_the_step_is_over_and_computes_nothing() -> None:
    world, number = lonely()
    world.step()
    assert world.core.due() == 2.0
    world.tick(2.0)
    assert world.core.requests[number].status is RequestStatus.RUNNING, "the step still writes to its blocks"
    world.step()
    assert (world.run, list(world.core.requests)) == (None, [])
    assert world.core.blocks.num_used == 0
    assert world.core.blocks.num_cached == 1, "its full block is cache"
    world.assert_at_rest()
    assert world.core.due() == 2.0 + 30.0


def test_the_end_of_its_grace_cuts_the_run() -> None:
    world, number = lonely(run_steps=9)
    assert world.left == 9
    world.step()
    world.tick(2.0)
    assert world.actions[-1] == StopRun(1)
    world.step()
    assert list(world.logged) == [number]
    world.assert_at_rest()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [True, False])
def test_a_parked_one_comes_back_as_preempted_ones_do(way: object, cache: bool) -> None:
    world, number = lonely(6, preemption=way, swap_blocks=50)
    world.tick(2.0)
    world.step()
    assert number in world.logged
    stream = newcomer(world)
    if not cache:  # others have taken its blocks meanwhile
        world.go(prompt(80, 1), 2, stream)
        world.work()
    assert RequestAdopted(number, stream, (1,)) in world.adopt(number, stream, 1)
    assert not world.logged
    world.work()
    assert world.heard[number] == world.answers[number]
    assert len(world.answers[number]) == LONG


def test_it_comes_back_only_when_there_is_room() -> None:
    world, number = lonely(6)
    world.tick(2.0)
    world.step()
    stream = newcomer(world)
    world.go(prompt(80, 1), 8, stream)
    world.adopt(number, stream, 1)
    assert world.core.requests[number].status is RequestStatus.PREEMPTED
    world.work()
    assert world.heard[number] == world.answers[number]


def test_what_is_kept_is_forgotten_after_its_time_and_nobody_gets_it_then() -> None:
    world, number = lonely()
    world.tick(2.0)
    world.step()
    world.tick(29.9)
    assert number in world.logged
    world.tick(0.2)
    assert not world.logged
    assert world.adopt(number, newcomer(world), 1) == []


def test_the_answer_of_one_that_has_ended_is_kept_for_a_while() -> None:
    world, number = lonely(answer=3)
    world.work()
    assert RequestFreed(number, retained=True) in world.actions
    assert world.logged == {number: None}
    assert world.adopt(number, newcomer(world), 1) == [RequestAdopted(number, 2, (1,))]
    assert world.adopt(number, 2, 2) == [RequestAdopted(number, 2, (3,))], "it can be read again"
    world.tick(31.0)
    assert not world.logged


def test_a_cancelled_one_is_kept_too_and_a_request_that_was_not_started_is_not() -> None:
    world, number = lonely()
    world.post(AbortRequest(number, "cancelled"))
    waiting = world.reserve(prompt(20, 1), conductor="conductor", resumable=True)
    assert waiting is not None
    world.post(AbortRequest(waiting, "cancelled"))
    world.step()
    assert world.logged == {number: None}
    assert RequestFreed(waiting) in world.actions


def test_the_higher_fence_wins_and_the_loser_hears_of_it() -> None:
    world, number = lonely()
    second, third = newcomer(world, 2), newcomer(world, 3)
    world.adopt(number, second, 2)
    assert world.adopt(number, third, 2) == [FenceConductor(number, third)]
    assert world.core.requests[number].stream == second
    assert world.adopt(number, third, 3) == [FenceConductor(number, second), RequestAdopted(number, third, (1,))]
    world.close(second)
    assert world.core.requests[number].stream == third, "its stream says nothing about it any more"
    world.work()
    assert world.heard[number] == world.answers[number]


def test_fences_hold_for_what_is_kept() -> None:
    world, number = lonely(answer=2)
    world.work()
    newcomer(world)
    world.adopt(number, 2, 4)
    assert world.adopt(number, 2, 4) == [FenceConductor(number, 2)]
    parked, other = lonely()
    parked.adopt(other, newcomer(parked), 4)
    parked.close(2)
    parked.tick(2.0)
    parked.step()
    assert other in parked.logged
    assert parked.adopt(other, newcomer(parked, 3), 4) == [FenceConductor(other, 3)]
    assert isinstance(parked.adopt(other, 3, 5)[0], RequestAdopted)


def test_a_conductor_that_connects_again_has_placed_its_sequences_anew() -> None:
    world, number = lonely()
    newcomer(world)
    assert world.failed == {}, "that is another one"
    world.post(StreamOpened(3, "conductor"))
    assert world.failed == {number: "the conductor's stream ended"}


def test_a_conductor_that_asks_for_room_again_needs_that_of_its_orphans() -> None:
    world, number = lonely(6)
    world.step()
    world.post(StreamOpened(2, "another"))
    assert world.reserve(prompt(80, 1), conductor="another") is None
    assert world.failed == {}
    assert world.reserve(prompt(80, 1), conductor="conductor") is None, "the step still writes to their blocks"
    assert world.failed == {number: "the conductor's stream ended"}
    world.step()
    assert world.reserve(prompt(80, 1), conductor="conductor") is not None


def test_a_stream_that_closes_while_its_conductor_has_another_ends_its_sequences() -> None:
    world = World(config(24))
    number = world.go(prompt(20), LONG, conductor="conductor", resumable=True)
    world.post(StreamOpened(2, "conductor"))
    world.close(1)
    assert number in world.failed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [True, False])
def test_a_group_parks_and_comes_back_whole_and_who_has_ended_stays_so(way: Preemption, cache: bool) -> None:
    world = World(config(14, grace_s=2.0, log_ttl_s=30.0, preemption=way, swap_blocks=50))
    number = world.go(prompt(2 * BT + 3), (2 * BT, 2, BT), conductor="conductor", resumable=True)
    world.step()
    world.step()
    world.close(1)
    world.tick(2.0)
    world.step()
    assert (world.run, list(world.core.requests), list(world.logged)) == (None, [], [number])
    [parked] = world.core.orphans.retained.parked
    assert [member.id for member in parked.sequences] == [number, number + 2]
    assert parked.ended_tokens == 2
    log = world.core.orphans.retained.get(number)
    assert log is not None
    there = 2 * (2 * BT + 3 + 4)  # of each of two, prompt and answer
    assert log.bytes == RETAINED_BYTES + TOKEN_BYTES * (2 * there + 2 * BT + 3 + 2) + KEY_BYTES * 2 * 2
    stream = newcomer(world)
    if not cache:  # others have taken its blocks meanwhile
        world.go(prompt(10 * BT, 1), 2, stream)
        world.work()
    assert RequestAdopted(number, stream, (3, 2, 3)) in world.adopt(number, stream, 1)
    world.work()
    assert [len(world.answers[other]) for other in range(number, number + 3)] == [2 * BT, 2, BT]
    assert world.heard == world.answers
    newcomer(world, 3)
    assert world.adopt(number, 3, 2) == [RequestAdopted(number, 3, (2 * BT, 2, BT))]
    world.tick(31.0)
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize("parks", [True, False])
def test_a_search_goes_on_as_if_nothing_had_been(parks: bool) -> None:
    """Its hypotheses are compared with those of a plain one by the world."""
    world = World(config(24, grace_s=2.0, log_ttl_s=30.0))
    number = world.go(prompt(BT + 3), (9, 9), search=SearchRules(1.0, "never"), conductor="conductor", resumable=True)
    for _ in range(3):
        world.step()
    world.close(1)
    if parks:
        world.tick(2.0)
        world.step()
        assert world.core.blocks.num_used == 0
        [parked] = world.core.orphans.retained.parked
        log, search = world.core.orphans.retained.get(number), parked.search
        assert log is not None
        assert search is not None
        tokens = 2 * 2 * (BT + 3 + search.length) + len(search.kept) * (BT + 3 + search.length)
        assert log.bytes == RETAINED_BYTES + TOKEN_BYTES * tokens + KEY_BYTES * 2
    assert RequestAdopted(number, 2, (0, 0)) in world.adopt(number, newcomer(world), 1)
    world.work()
    assert list(world.searched) == [number]
    log = world.core.orphans.retained.get(number)
    assert log is not None
    world.tick(31.0)
    world.assert_at_rest()
    world.assert_reruns()


def test_several_answers_without_a_secret_end_with_their_conductor() -> None:
    world = World(config(48))
    number = world.go(prompt(20), (LONG, 2 * LONG), conductor="conductor")
    alone = world.go(prompt(20, 1), LONG, conductor="conductor", resumable=True)
    world.step()
    world.close(1)
    assert world.failed == {number: "the conductor's stream ended"}
    world.step()
    assert (list(world.core.requests), world.logged) == ([alone], {})
    assert RequestFreed(number) in world.actions


def test_an_orphan_whose_kv_never_comes_whole_ends() -> None:
    world = World(config(24, grace_s=2.0))
    number = world.reserve(prompt(20), LONG, conductor="conductor", resumable=True)
    assert number is not None
    world.start(number)
    world.close(1)
    assert world.core.requests[number].stream == NO_STREAM
    world.tick(2.0)
    assert world.failed == {number: "its conductor was lost"}


def test_an_orphan_that_is_being_swapped_out_parks_when_the_copy_is_over() -> None:
    world = World(config(6, grace_s=2.0, preemption=Preemption.SWAP, swap_blocks=50, assumed_answer_tokens=1))
    first = world.go(prompt(20), LONG, conductor="conductor", resumable=True)
    second = world.go(prompt(20, 1), LONG, conductor="conductor", resumable=True)
    while not world.ios:
        world.step()
    assert world.core.requests[second].status is RequestStatus.SWAPPING_OUT
    world.close(1)
    world.tick(2.0)
    world.work()
    assert set(world.logged) == {first, second}
    world.assert_at_rest()
    stream = newcomer(world)
    for number in (first, second):
        world.adopt(number, stream, 1)
    world.work()
    assert world.heard == world.answers


def test_bytes_are_bounded_and_the_oldest_go_first() -> None:
    size = RETAINED_BYTES + 2 * TOKEN_BYTES * 21 + KEY_BYTES * 1
    world = World(config(24, grace_s=0.0, log_ttl_s=30.0, log_bytes=2 * size + 2 * TOKEN_BYTES))
    first, second, third = [
        world.go(prompt(20, seed), LONG, conductor="conductor", resumable=True) for seed in range(3)
    ]
    world.close(1)
    world.tick(0.0)
    world.step()  # the first of them alone is in it, has one token more then, and parks last
    parked = [action.id for action in world.actions if isinstance(action, RequestParked)]
    forgotten = [action.id for action in world.actions if isinstance(action, DropOutputLog)]
    assert (parked, forgotten) == ([second, third, first], [second])
    assert set(world.logged) == {first, third}
    assert world.core.orphans.retained.bytes == 2 * size + 2 * TOKEN_BYTES
    assert world.core.due() == 30.0 == world.core.orphans.retained.due()


def test_log_probabilities_count_with_the_tokens() -> None:
    world = World(config(24, grace_s=0.0, log_ttl_s=30.0))
    plain, scored = [
        world.go(prompt(20, seed), 3, conductor="conductor", resumable=True, logprob_bytes=seed * bytes_per_token(20))
        for seed in range(2)
    ]
    world.work()
    logs = world.core.orphans.retained
    kept = [log.bytes for number in (plain, scored) if (log := logs.get(number)) is not None]
    assert kept == [RETAINED_BYTES + 3 * TOKEN_BYTES, RETAINED_BYTES + 3 * (TOKEN_BYTES + 168)]
    parked = world.go(prompt(20, 2), LONG, conductor="conductor", resumable=True, logprob_bytes=8)
    world.close(1)
    world.tick(0.0)
    world.step()
    log = logs.get(parked)
    assert log is not None
    assert log.bytes == RETAINED_BYTES + 2 * TOKEN_BYTES * 22 + KEY_BYTES + 2 * 8


def test_nothing_is_kept_within_no_bytes() -> None:
    world, number = lonely(log_bytes=0)
    world.tick(2.0)
    world.step()
    assert (world.logged, world.lost) == ({}, [number])
