"""Copies of hot blocks: what is read, what is passed over, and that they are kept as cache."""

from typing import Any

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.block_lending import LendBlocks
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded
from moonpool.engine.prefill.core.actions import (
    EndReplication,
    ReadReplica,
)
from moonpool.engine.prefill.core.events import (
    Drain,
    ReplicateBlocks,
    StopAllRequests,
    StopReplicating,
)
from moonpool.engine.prefill.core.replication import MAX_ORDERS
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadEnded
from moonpool.v1 import conductor_pb2
from tests.unit.engine.prefill.calls import begin
from tests.unit.engine.prefill.core.world import BT, World, keys
from tests.unit.instances import BLOCK, prefilling, prompt, spec

PEER = KVSource("prefill-9", 4, peer=True)


def order(number: int = 1, blocks: int = 4, family: int = 0) -> ReplicateBlocks:
    return ReplicateBlocks(number, keys(family, blocks * BT), PEER, "tenant")


def test_a_copy_is_read_and_kept() -> None:
    world = World()
    [copy] = world.post(order())
    assert isinstance(copy, ReadReplica)
    assert (copy.number, copy.first, len(copy.blocks)) == (1, 0, 4)
    assert world.end_copy(copy.io, 4) == [EndReplication(1, 4)]
    manager = world.core.state.manager
    assert manager.match(keys(0, 4 * BT)) == list(copy.blocks)
    assert (manager.num_used, manager.num_cached) == (0, 4)
    assert world.core.state.tracker.speeds.peer_bytes_per_s > 0
    assert world.post(order(2)) == [EndReplication(2, 0)], "all of it is here"


def test_only_what_is_missing_is_read() -> None:
    world = World()
    [copy] = world.post(order(1, 2))
    assert isinstance(copy, ReadReplica)
    world.end_copy(copy.io, 2)
    [copy] = world.post(order(2, 4))
    assert isinstance(copy, ReadReplica)
    assert (copy.first, len(copy.blocks)) == (2, 2)
    assert world.end_copy(copy.io, 1) == [EndReplication(2, 1)]
    assert len(world.core.state.manager.match(keys(0, 4 * BT))) == 3


def test_what_cannot_be_spared_is_passed_over() -> None:
    """More than half of what is free; from a source that has just failed, also if ordered before."""
    world = World()
    assert world.post(order(1, 7)) == [EndReplication(1, 0)]
    [copy] = world.post(order(2))
    assert isinstance(copy, ReadReplica)
    assert world.post(order(3, 1, family=1)) == []
    assert world.post(IoEnded(copy.io, LoadEnded(0, failed=True))) == [EndReplication(2, 0), EndReplication(3, 0)]
    assert world.post(order(4, 1, family=1)) == [EndReplication(4, 0)]
    world.pass_time(3.0)
    [copy] = world.post(order(5, 1, family=1))
    assert isinstance(copy, ReadReplica)


def test_copies_come_one_after_the_other() -> None:
    world = World()
    [copy] = world.post(order(1, 2))
    assert isinstance(copy, ReadReplica)
    orders = [order(number, 1, family=number) for number in range(2, 2 + MAX_ORDERS)]
    assert [world.post(other) for other in orders] == [[]] * MAX_ORDERS
    assert world.post(order(99, 1, family=99)) == [EndReplication(99, 0)], "too many wait"
    over, following = world.end_copy(copy.io, 2)
    assert over == EndReplication(1, 2)
    assert isinstance(following, ReadReplica)
    assert following.number == 2


def test_a_copy_that_is_called_off_ends_or_never_begins() -> None:
    world = World()
    [copy] = world.post(order(1, 4))
    assert isinstance(copy, ReadReplica)
    world.post(order(2, 1, family=1))
    assert world.post(StopReplicating(keys(1, BT)[-1])) == [EndReplication(2, 0)]
    assert world.post(StopReplicating(keys(2, BT)[-1])) == [], "nobody has ordered it"
    assert world.post(StopReplicating(keys(0, 4 * BT)[-1])) == [CancelIo(copy.io)]
    assert world.post(IoEnded(copy.io, LoadEnded(0))) == [EndReplication(1, 0)]
    assert world.core.state.manager.num_free == world.settings.num_blocks


def test_no_copy_once_it_drains_and_none_goes_on_when_it_stops() -> None:
    world = World()
    [copy] = world.post(order())
    assert isinstance(copy, ReadReplica)
    world.post(Drain())
    assert world.post(order(2, 1, family=1)) == [EndReplication(2, 0)]
    world.post(StopAllRequests())
    assert world.post(IoEnded(copy.io, LoadEnded(0))) == [EndReplication(1, 0)]
    assert world.core.state.manager.num_free == world.settings.num_blocks


def test_kv_that_is_deleted_while_it_comes_is_not_kept() -> None:
    world = World()
    [copy] = world.post(order())
    assert isinstance(copy, ReadReplica)
    world.post(DeleteKV(1, KVSelection(tenants=frozenset({"tenant"}))))
    world.post(IoEnded(copy.io, LoadEnded(4)))
    assert world.core.state.manager.match(keys(0, 4 * BT)) == []
    assert world.core.state.manager.num_free == world.settings.num_blocks


async def test_what_a_peer_wants_at_which_the_core_fails_is_not_done_and_that_is_all() -> None:
    """Else one order, or one reader, would end one instance after the other."""
    async with prefilling() as prefill:
        handle, wanted = prefill.service.core.handle, keys(0, 4 * BT)

        def fails(now: float, event: Any, out: list[Any]) -> None:
            raise ValueError("the core has a defect")

        prefill.service.core.handle = fails  # type: ignore[method-assign]
        prefill.service.replicate(conductor_pb2.ReplicateOrder(keys=b"".join(wanted), source=prefill.instance))
        with pytest.raises(ValueError, match="defect"):
            prefill.service.executor.pool.lend(LendBlocks(1, wanted))
        with pytest.raises(ValueError, match="defect"):
            prefill.service.executor.pool.forget(DeleteKV(1, KVSelection()))
        prefill.service.core.handle = handle  # type: ignore[method-assign]
        await (await begin(prefill, spec("a", prompt(BLOCK), max_tokens=1))).to_the_end()
        assert prefill.death is None


async def test_a_copy_by_order_of_the_conductor() -> None:
    """From another instance's pool; what is wrong with an order is not done."""
    tokens = prompt(4 * BLOCK + 3)
    async with prefilling() as peer, prefilling() as prefill:
        await (await begin(peer, spec("warm", tokens, max_tokens=1))).to_the_end()
        wanted = peer.service.manager.keys()
        message = conductor_pb2.ReplicateOrder(keys=b"".join(wanted), source=peer.instance)
        prefill.service.replicate(conductor_pb2.ReplicateOrder(keys=b"".join(wanted)))
        prefill.service.replicate(conductor_pb2.ReplicateOrder(keys=b"short", source=peer.instance))
        prefill.service.replicate(message)
        await prefill.until(lambda: prefill.service.core.copies.copied_blocks == 4)
        first = await (await begin(prefill, spec("a", tokens, max_tokens=1))).to_the_end()
        assert (first.local_tokens, first.loaded_tokens) == (4 * BLOCK, 0)
