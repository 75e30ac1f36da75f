"""Preempted sequences come back from a kvstore."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.decode.core.actions import LoadStoredBlocks, StartRun, StoreBlock
from moonpool.engine.decode.core.events import AbortRequest
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config

SMALL = config(6, assumed_answer_tokens=1, chunked_prefill_size=20, preemption=Preemption.STORE)
ANSWER = 4 * BT


def crowded(core: DecodeSettings, stores: int = 1) -> tuple[World, int, int]:
    """Two sequences that fill the pool, until the younger one gives its three blocks up; two of them are stored."""
    world = World(core)
    older, younger = (world.go(prompt(BT, seed), ANSWER, stores=stores) for seed in (1, 2))
    while not world.core.preempted.preemptions:
        for io in sorted(world.ios):
            world.end_io(io)
        world.step()
    return world, older, younger


def until_load(world: World) -> LoadStoredBlocks:
    """Steps until something is loaded."""
    while True:
        for io, action in sorted(world.ios.items()):
            if isinstance(action, LoadStoredBlocks):
                return action
            world.end_io(io)
        world.step()


def chunks(world: World) -> list[tuple[int, int, int]]:
    return [(it.id, it.start, it.count) for run in world.actions if isinstance(run, StartRun) for it in run.chunks]


def finish(world: World, *numbers: int) -> None:
    """All answers come, and are right."""
    world.work()
    assert [len(world.answers[number]) for number in numbers] == [ANSWER] * len(numbers)
    world.assert_at_rest()
    world.assert_reruns()


def test_full_blocks_are_read_back_and_only_the_tail_is_computed() -> None:
    world, older, younger = crowded(SMALL)
    request = world.core.requests[younger]
    [it] = request.sequences
    assert (request.status, it.tokens, it.stored, it.table) == (RequestStatus.PREEMPTED, 3 * BT, [2], [])
    load = until_load(world)
    assert (load.id, load.first, load.store, len(load.blocks)) == (younger, 0, 0, 2)
    assert load.timeout_s == pytest.approx(5.0 + 4 * 2 * (1 << 10) / 1e9)
    assert request.status is RequestStatus.LOADING
    assert list(load.blocks) == it.table[:2]
    world.end_io(load.io)
    assert (request.status, it.computed) == (RequestStatus.RECOMPUTING, 2 * BT)
    finish(world, older, younger)
    assert world.core.stored_blocks.loaded_blocks == 2
    assert chunks(world) == [(younger, 2 * BT, BT)]


def test_what_the_store_has_lost_is_computed_and_written_again() -> None:
    world, older, younger = crowded(SMALL)
    keys = world.core.requests[younger].sequences[0].keys
    load = until_load(world)
    del world.stored[0, keys[1]]
    world.end_io(load.io)
    assert world.core.requests[younger].sequences[0].stored == [1]
    assert world.core.requests[younger].status is RequestStatus.RECOMPUTING
    finish(world, older, younger)
    assert chunks(world)[0] == (younger, BT, SMALL.chunked_prefill_size)
    assert world.core.stored_blocks.failures == 0


def alone(stores: int) -> tuple[World, int]:
    """A sequence that gives its blocks up in every step."""
    world = World(replace(SMALL, preempt_every=1))
    return world, world.go(prompt(BT), ANSWER, stores=stores)


def test_a_store_that_fails_is_not_asked_again_but_another_one_is() -> None:
    world, number = alone(stores=2)
    load = until_load(world)
    assert load.store == 0
    world.end_io(load.io, ok=False)
    request = world.core.requests[number]
    assert (request.sequences[0].stored, request.status, request.sequences[0].computed) == (
        [0, 1],
        RequestStatus.RECOMPUTING,
        0,
    )
    assert world.core.stored_blocks.failures == 1
    assert until_load(world).store == 1
    finish(world, number)
    assert {
        action.store for action in world.actions if isinstance(action, LoadStoredBlocks) and action.io > load.io
    } == {1}


def test_what_was_not_written_is_written_when_blocks_are_given_up() -> None:
    world, number = alone(stores=1)
    request = world.core.requests[number]
    assert request.sequences[0].stored == [1], "of the prompt, prefill has taken care"
    while not any(isinstance(action, StoreBlock) for action in world.ios.values()):
        if world.run is None:
            world.end_io(min(world.ios))
        else:
            world.step()
    [io] = [io for io, action in world.ios.items() if isinstance(action, StoreBlock)]
    assert request.sequences[0].stored == [2], "presumed while it is being written"
    world.end_io(io, ok=False)
    assert request.sequences[0].stored == [1]
    finish(world, number)
    stores = [action.index for action in world.actions if isinstance(action, StoreBlock)]
    assert stores == [1, 1, 2, 3]


def test_ended_while_it_is_loaded_it_keeps_its_blocks_until_the_load_is_over() -> None:
    world, older, younger = crowded(SMALL)
    load = until_load(world)
    world.post(AbortRequest(younger, "cancelled"))
    assert world.core.requests[younger].status is RequestStatus.FINISHING
    assert all(world.core.blocks.ref_count(block) == 1 for block in load.blocks)
    world.end_io(load.io)
    assert younger not in world.core.requests
    finish(world, older)


def test_without_a_store_it_is_as_cache() -> None:
    runs = []
    for way in (Preemption.STORE, Preemption.CACHE):
        world, older, younger = crowded(replace(SMALL, preemption=way), stores=0)
        finish(world, older, younger)
        runs.append([action for action in world.actions if isinstance(action, StartRun)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("way", [Preemption.CACHE, Preemption.RECOMPUTE, Preemption.SWAP])
def test_nothing_is_loaded_in_another_way(way: Preemption) -> None:
    world, older, younger = crowded(replace(SMALL, preemption=way))
    finish(world, older, younger)
    assert world.core.stored_blocks.loaded_blocks == 0


@pytest.mark.parametrize(
    ("load_bytes_per_s", "token_s", "swap_blocks", "loads", "swaps"),
    [
        (1e6, 1e-4, 0, True, False),
        (1e3, 1e-4, 0, False, False),
        (1e6, 1e-4, 10, False, True),
        (1e12, 1e-9, 10, True, False),
    ],
)
def test_the_quickest_way_is_taken(
    load_bytes_per_s: float, token_s: float, swap_blocks: int, loads: bool, swaps: bool
) -> None:
    """A block of 1 KiB is computed in 1.6 ms, loaded in 1 ms, 1 s or 1 ns, and swapped in half a microsecond.

    The last line computes it in 16 ns, so that the tail behind the loaded blocks costs next to nothing.
    """
    speeds = Speeds(prefill_per_token_s=token_s, load_bytes_per_s=load_bytes_per_s)
    core = replace(SMALL, preemption=Preemption.AUTO, speeds=speeds, swap_blocks=swap_blocks)
    world, older, younger = crowded(core)
    assert world.core.preempted.swaps == swaps
    finish(world, older, younger)
    assert (world.core.stored_blocks.loaded_blocks > 0) == loads


def test_a_load_that_saves_steps_pays_though_steps_are_not_known_to_grow() -> None:
    """Loading a block takes 1.02 ms. Computing a block takes two steps of 0.6 ms."""
    speeds = Speeds(prefill_base_s=0.6e-3, load_bytes_per_s=1e6)
    world, older, younger = crowded(
        replace(SMALL, preemption=Preemption.AUTO, speeds=speeds, chunked_prefill_size=BT // 2)
    )
    finish(world, older, younger)
    assert world.core.stored_blocks.loaded_blocks > 0


def test_loads_are_learnt_from() -> None:
    world, *_ = crowded(SMALL)
    world.end_io(until_load(world).io)
    assert world.core.tracker.speeds.load_bytes_per_s > 1e9
