"""A sequence that has gone on elsewhere meanwhile begins behind what is known of it: that is computed in one go."""

import pytest

from moonpool.engine.decode.core.request import RequestStatus
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config

ANSWER = 6 * BT


def moved(world: World, length: int, known: int, **options: object) -> int:
    """A request whose KV has come, started with a first token and so many behind it."""
    number = world.reserve(prompt(length), ANSWER, **options)  # type: ignore[arg-type]
    assert number is not None
    world.arrive(number)
    world.start(number, known=known)
    return number


@pytest.mark.parametrize("length", [1, BT - 1, BT, 3 * BT + 2])
@pytest.mark.parametrize("known", [1, BT - 2, BT, 3 * BT + 1])
def test_the_next_token_comes_with_one_step(length: int, known: int) -> None:
    world = World(config(64))
    number = moved(world, length, known)
    assert len(world.heard[number]) == known + 1
    world.step()
    assert len(world.heard[number]) == known + 2
    assert world.core.requests[number].status is RequestStatus.RUNNING
    world.work()
    assert world.heard[number] == world.answers[number]
    assert len(world.answers[number]) == ANSWER
    world.assert_at_rest()
    world.assert_reruns()


def test_what_is_known_before_its_kv_has_come_waits_for_it() -> None:
    world = World(config(64))
    number = world.reserve(prompt(2 * BT + 3), ANSWER)
    assert number is not None
    keys = world.asked[number].request.keys
    world.start(number, known=2 * BT)
    assert world.run is None
    assert world.core.requests[number].sequences[0].keys == list(keys), "blocks that come are the prompt's alone"
    del world.sequences[number].tokens[2 * BT + 3 :]
    world.arrive(number)
    world.sequences[number].tokens.extend(world.answers[number])
    world.work()
    assert len(world.answers[number]) == ANSWER
    world.assert_at_rest()


def test_blocks_that_it_fills_are_cached_and_stored_as_its_own() -> None:
    world = World(config(64))
    number = moved(world, 2 * BT, 2 * BT + 1, stores=1)
    keys = world.sequences[number].keys()
    world.step()
    assert len(world.core.blocks.match(keys)) == 4
    for io in list(world.ios):
        world.end_io(io)
    assert [key for _, key in world.stored] == keys[:4]
    world.work()
    world.assert_at_rest()


def test_others_go_on_meanwhile_and_without_room_it_waits() -> None:
    world = World(config(9, assumed_answer_tokens=1))
    first = world.go(prompt(2 * BT), 3 * BT)
    world.step()
    number = world.reserve(prompt(BT, 1), 4 * BT)
    assert number is not None
    world.arrive(number)
    world.start(number, known=2 * BT)
    world.work()
    assert len(world.answers[first]) == 3 * BT
    assert len(world.answers[number]) == 4 * BT
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize("length", [1, BT, 2 * BT + 5])
def test_answers_begin_together_behind_what_is_known_of_each(length: int) -> None:
    """They share the full blocks of their prompt; one that is whole has ended, one of which nothing is known begins."""
    world = World(config(64))
    number = world.reserve(prompt(length), (ANSWER, 2 * BT, 1, 2))
    assert number is not None
    world.arrive(number)
    world.start(number, known=2 * BT - 1)
    assert [len(world.answers[number + other]) for other in range(4)] == [2 * BT, 2 * BT, 1, 2]
    request = world.core.requests[number]
    assert [member.id for member in request.sequences] == [number]
    assert request.ended_tokens == 2 * BT + 1 + 2
    world.work()
    assert len(world.answers[number]) == ANSWER
    world.assert_at_rest()
    world.assert_reruns()


def test_what_members_share_is_there_once() -> None:
    world = World(config(64))
    number = world.reserve(prompt(3 * BT + 2), (ANSWER, ANSWER, ANSWER))
    assert number is not None
    world.arrive(number)
    world.start(number, known=BT)
    tables = [sequence.table for _, sequence in world.group(number)]
    assert [len(table) for table in tables] == [5, 5, 5]
    assert len({block for table in tables for block in table}) == 3 + 3 * 2
    assert world.run is not None
    assert [(chunk.id, chunk.start, chunk.count, chunk.sample) for chunk in world.run.chunks] == [
        (number + other, 3 * BT, BT + 2, False) for other in range(3)
    ]
    world.work()
    assert [len(world.answers[number + other]) for other in range(3)] == [ANSWER] * 3
    world.assert_at_rest()
    world.assert_reruns()
