"""KV that is deleted while sequences run: they say what they would have said, and leave nothing behind."""

from dataclasses import replace

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted
from moonpool.engine.decode.core.actions import Action, Chunk, StoreBlock
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import WAYS, World, config

SMALL = config(6, assumed_answer_tokens=1, chunked_prefill_size=20, swap_blocks=10)


def forget(world: World, *tenants: str) -> list[Action]:
    return world.post(DeleteKV(3, KVSelection(tenants=frozenset(tenants))))


def test_cached_blocks_of_a_tenant_go_and_those_of_others_stay() -> None:
    world = World(config(20))
    world.go(prompt(2 * BT, 1), 2, tenant="ours")
    world.go(prompt(3 * BT, 2), 2, tenant="theirs")
    world.work()
    before = len(world.core.blocks.keys())
    assert forget(world, "ours") == [KVDeleted(3, 2)]
    assert len(world.core.blocks.keys()) == before - 2
    world.assert_at_rest()


def test_a_running_sequence_is_finished_and_neither_kept_nor_stored() -> None:
    world = World(config(20))
    world.go(prompt(2 * BT, 1), 3 * BT, tenant="ours", stores=1)
    world.step()
    assert forget(world, "ours")[0] == KVDeleted(3, 2)
    stored = sum(isinstance(action, StoreBlock) for action in world.actions)
    world.work()
    assert sum(isinstance(action, StoreBlock) for action in world.actions) == stored
    assert (world.core.blocks.keys(), world.core.blocks.num_cached) == ([], 0)
    world.assert_at_rest()
    world.assert_reruns()


def test_one_that_was_promised_before_is_not_kept_either() -> None:
    world = World(config(20))
    number = world.reserve(prompt(2 * BT, 1), 4, tenant="ours")
    assert number is not None
    forget(world, "ours")
    world.arrive(number)
    world.start(number)
    world.work()
    assert world.core.blocks.keys() == []
    world.assert_at_rest()


def test_a_full_hit_writes_nothing_though_its_blocks_are_deleted_before_its_step() -> None:
    """Others still read them."""
    world = World(config(20))
    world.go(prompt(2 * BT), 3 * BT)
    number = world.reserve(prompt(2 * BT), 4)
    assert number is not None
    world.compute(number)
    world.post(DeleteKV(3, KVSelection(), everything=True))
    world.step()
    assert world.run is not None
    assert world.run.chunks == (Chunk(number, 2 * BT - 1, 1, sample=True, full_hit=True),)
    world.work()
    assert (world.core.blocks.keys(), len(world.answers[number])) == ([], 4)
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize("way", WAYS)
def test_preempted_sequences_come_back_by_every_way_and_say_the_same(way: Preemption) -> None:
    """The world checks each token against what every block holds."""
    world = World(replace(SMALL, preemption=way))
    for family in (1, 2):
        world.go(prompt(BT, family), 4 * BT, tenant="ours", stores=1)
    while not world.core.preempted.preemptions:
        world.step()
    forget(world, "ours")
    world.work()
    assert world.core.blocks.keys() == []
    world.assert_at_rest()
    world.assert_reruns()
