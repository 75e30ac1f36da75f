"""What roles leave to each other: steps with further numbers, the pool once nobody uses it, and what was measured."""

import asyncio
from array import array

import pytest

from moonpool.base.errors import Internal
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step
from moonpool.engine.role_engine import RoleEngine
from tests.unit.fakes.engine import FakeEngine
from tests.unit.instances import WAIT_S, decoding, prefilling


def step(number: int, *, gated: bool = False) -> Step:
    part = SequenceStep(tokens_to_bytes(array("i", [9, 10])), 0, (0,))
    return Step(number, (part,), gated, layer_events=True)


async def test_a_later_role_counts_its_steps_from_one() -> None:
    """Gates and given-up steps are those of the role; the engine's numbers grow."""
    engine, done = FakeEngine(), list[LayerDone]()
    first = RoleEngine(engine)
    await first.run(step(1))
    await first.run(step(2))
    second = RoleEngine(engine, first.steps)
    for layer in range(engine.layout.layers):
        second.open_gate(1, layer)
    await asyncio.wait_for(second.run(step(1, gated=True), on_layer=done.append), WAIT_S)
    assert [each.step_id for each in engine.steps] == [1, 2, 3]
    assert [(each.step_id, each.layer) for each in done] == [(1, layer) for layer in range(engine.layout.layers)]
    second.abort(2)
    second.drop(2, 0)
    second.stop_run(2)
    assert (engine.aborts, engine.drops, engine.cuts) == ([4], [(4, 0)], [4])
    assert (await second.run(step(2))).aborted
    assert second.steps == 4
    engine.pool.close()


async def test_the_end_of_a_role_gives_up_the_step_in_flight() -> None:
    engine = FakeEngine()
    reached, _ = engine.hold(layer=1)
    role = RoleEngine(engine, 7)
    running = asyncio.ensure_future(role.run(step(1)))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    await role.end()
    assert engine.aborts == [8]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    idle = RoleEngine(engine, 8)
    await idle.end()
    assert engine.aborts == [8], "a role without steps gives none up"
    engine.pool.close()


async def test_a_pool_is_handed_over_only_if_nobody_uses_it() -> None:
    async with decoding() as decode:
        handover = decode.service.hand_over()
        assert handover.blocks is decode.service.manager
        assert handover.deletions is decode.service.deletions
        assert handover.speeds == decode.service.core.tracker.speeds
        blocks = decode.service.manager.allocate(2)
        with pytest.raises(Internal, match="2 blocks are still referenced at the end of a role"):
            decode.service.hand_over()
        decode.service.manager.release(blocks)


async def test_a_drain_waits_for_readers_of_the_pool() -> None:
    """Other instances that read blocks here get them all, as long as they do not take too long."""
    async with prefilling() as prefill:
        lease = prefill.service.reads.lend([], 0)
        draining = asyncio.ensure_future(prefill.service.drained())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        prefill.service.reads.take_back(lease)
        await asyncio.wait_for(draining, WAIT_S)
