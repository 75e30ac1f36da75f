"""When preempted sequences come back, and in which order."""

import random

import pytest

from moonpool.engine.decode.core.actions import SwapOut
from moonpool.engine.decode.core.block_budget import peak_blocks
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config


@pytest.mark.parametrize(
    ("lives", "most"),
    [
        ([], 0),
        ([(3, 5)], 3),
        ([(0, 5), (3, 5)], 0),
        ([(1, 2), (4, 2)], 2),
        ([(1, 0), (4, 9)], 4),
        ([(2, 1), (2, 1), (2, 1)], 6),
    ],
)
def test_what_is_needed_before_somebody_ends(lives: list[tuple[int, int]], most: int) -> None:
    """Two that take one and four blocks need two before the first one's end; its two then serve the other's growth."""
    assert peak_blocks(lives) == most


def test_what_is_needed_is_that_of_playing_it_through() -> None:
    rng = random.Random("lives")
    for _ in range(200):
        lives = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(8))]
        needed = []
        for moment in range(7):
            growth = sum(moment for claim, _ in lives if claim >= moment)
            needed.append(growth - sum(frees for claim, frees in lives if claim < moment))
        assert peak_blocks(lives) == max(needed)


def crowd(way: Preemption, count: int) -> World:
    """Sequences of a block each that all need their second one in the same step, in a pool of as many blocks."""
    world = World(config(count, preemption=way, swap_blocks=40, assumed_answer_tokens=1))
    world.go(prompt(BT - 2), 2 * BT)  # its first step is over before the others join
    for seed in range(1, count):
        world.go(prompt(BT - 1, seed), 2 * BT)
    world.step()
    assert world.run is not None
    assert len(world.run.batch) == count
    world.step()
    return world


def test_as_many_give_up_at_once_as_are_needed() -> None:
    """Those who wait for blocks do not wait for one copy after the other."""
    world = crowd(Preemption.SWAP, 8)
    out = [action.id for action in world.ios.values() if isinstance(action, SwapOut)]
    assert out == [8, 7, 6, 5]
    assert world.core.preempted.blocks_being_freed == 4
    world.work()
    world.assert_at_rest()


def test_who_has_waited_longest_comes_back_first() -> None:
    world = crowd(Preemption.RECOMPUTE, 6)
    parked = [request.id for request in world.core.preempted.queue]
    assert parked == [6, 5, 4]
    came = []
    for _ in range(400):
        if world.run is None:
            break
        world.step()
        now = [request.id for request in world.core.preempted.queue]
        came += [number for number in parked if number not in now and number not in came]
    assert came == parked
    world.assert_at_rest()


def test_nobody_comes_back_past_those_who_wait_for_a_block() -> None:
    """A block that a copy has freed is for those who wait, though the pool has room for the first that is parked."""
    world = crowd(Preemption.SWAP, 8)
    core = world.core
    for left in (3, 2, 1, 0):
        assert core.count(RequestStatus.WAITING, RequestStatus.RUNNING) == 4
        world.end_io(min(world.ios))
        assert len(world.ios) == left
    world.step()
    assert (core.count(RequestStatus.RUNNING), core.count(RequestStatus.SWAPPING_IN)) == (4, 0)
    assert [request.id for request in core.preempted.queue] == [8, 7, 6, 5]
    world.work()
    world.assert_at_rest()
