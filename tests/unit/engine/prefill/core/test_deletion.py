"""KV that is deleted while prompts are computed: they go on, and leave nothing behind."""

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted
from moonpool.engine.prefill.core import actions, events
from tests.unit.engine.prefill.core.world import BT, World

COPY = (events.WriteBackTarget("copy", 0),)


def forget(world: World, *tenants: str) -> list[actions.Action]:
    return world.post(DeleteKV(5, KVSelection(tenants=frozenset(tenants))))


def puts(world: World) -> list[actions.Action]:
    return [action for action in world.done if isinstance(action, actions.WriteBackBlocks)]


def told(world: World) -> list[int]:
    """Requests whose first token was told."""
    return [action.id for action in world.done if isinstance(action, actions.ReportFirstToken)]


def test_what_is_cached_goes_and_what_others_have_stays() -> None:
    world = World()
    world.arrive(3 * BT, family=1, tenant="ours")
    world.arrive(2 * BT, family=2, tenant="theirs")
    world.settle()
    assert forget(world, "ours") == [KVDeleted(5, 3)]
    assert forget(world, "ours") == [KVDeleted(5, 0)]
    assert len(world.core.state.manager.keys()) == 2
    world.arrive(3 * BT, family=1, tenant="ours")
    world.settle()
    assert len(world.core.state.manager.keys()) == 5  # what comes later is kept
    world.check_rest()


def test_a_prompt_that_is_computed_or_waits_is_finished_and_not_kept() -> None:
    world = World()
    first = world.arrive(4 * BT, family=1, copies=COPY, tenant="ours")
    second = world.arrive(4 * BT, family=2, copies=COPY, tenant="ours")
    third = world.arrive(4 * BT, family=3, copies=COPY, tenant="theirs")
    forget(world, "ours")
    world.settle()
    assert sorted(told(world)) == [first.arrive.id, second.arrive.id, third.arrive.id]
    manager = world.core.state.manager
    assert (len(manager.keys()), manager.num_cached) == (4, 4)
    assert {action.id for action in puts(world) if isinstance(action, actions.WriteBackBlocks)} == {third.arrive.id}
    world.check_rest()


def test_a_prompt_that_comes_as_transient_is_not_kept() -> None:
    world = World()
    client = world.arrive(3 * BT, family=1, copies=COPY, tenant="ours", transient=True)
    world.settle()
    assert told(world) == [client.arrive.id]
    assert (world.core.state.manager.keys(), puts(world)) == ([], [])
    world.check_rest()
