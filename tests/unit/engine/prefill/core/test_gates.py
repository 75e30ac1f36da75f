"""When a step begins that follows a load, and when it stops waiting for one. Exact, in seconds."""

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.prefill.core import actions
from moonpool.engine.prefill.core.forecast import LAYER_STALL_S
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks
from tests.unit.engine.prefill.core.world import BT, SETTINGS, World, staged

LAYER_LOAD_S = 0.9
"""Of three blocks, whose layer is 3 KiB."""
QUICK_LOAD_S = 0.2
COMPUTE_S = 4.8
"""Of the blocks that are loaded."""


def loading(layer_s: float = LAYER_LOAD_S, token_s: float = 0.1) -> tuple[World, int]:
    """A prompt of 60 tokens whose first 48 are being loaded; the others take 1.2 s, 0.4 s per layer."""
    speeds = Speeds(prefill_per_token_s=token_s, load_bytes_per_s=3 * SETTINGS.slice_bytes / layer_s)
    world = World(staged(1, max_num_batched_tokens=4 * BT, num_blocks=32), speeds)
    world.arrive(60, sources=(KVSource("store", 3),))
    (io,) = [io for io, action in world.ios.items() if isinstance(action, LoadBlocks)]
    return world, io


def test_a_step_begins_just_in_time() -> None:
    """Layers come every 0.9 s, and take 0.4 s to compute: the last one is waited for at no gate."""
    world, io = loading()
    world.pass_time(LAYER_LOAD_S)
    world.load_layer(io)
    assert not world.steps
    # Layer 1 is expected at 1.8 s, layer 2 at 2.7 s; a step that begins at 1.9 s needs layer 2 at 2.7 s.
    assert world.core.due() == pytest.approx(1.9)
    world.pass_time(0.9)
    world.load_layer(io)
    assert not world.steps
    world.pass_time(0.2)
    assert [step.order.gated for step in world.steps.values()] == [True]
    assert world.now == pytest.approx(2.0)


def test_a_step_needs_the_first_layer() -> None:
    world, _ = loading()
    world.pass_time(COMPUTE_S - 0.1)
    assert not world.steps
    assert world.core.due() == pytest.approx(COMPUTE_S), "then the prefix could have been computed"


def test_a_step_does_not_begin_while_a_layer_is_overdue() -> None:
    world, io = loading()
    world.pass_time(LAYER_LOAD_S)
    world.load_layer(io)
    overdue_s = 3 * LAYER_LOAD_S + LAYER_STALL_S
    world.pass_time(overdue_s - 0.01)
    assert not world.steps
    assert world.core.due() == pytest.approx(LAYER_LOAD_S + overdue_s), "nothing to wait for but the layer"


def test_a_load_that_comes_faster_than_predicted_is_followed_at_once() -> None:
    world, io = loading()
    world.load_layer(io)
    world.load_layer(io)
    assert len(world.steps) == 1


def waiting_at_layer_1() -> tuple[World, int]:
    """The step has computed layer 0, and layer 1 does not come."""
    world, io = loading(QUICK_LOAD_S)
    world.pass_time(0.2)
    world.load_layer(io)
    (step,) = world.steps
    world.compute_layer(step)
    assert not world.can_compute(step)
    return world, step


def test_a_step_waits_for_a_late_layer_while_nobody_else_does() -> None:
    world, step = waiting_at_layer_1()
    world.pass_time(COMPUTE_S / 2 - 0.1)
    assert not world.steps[step].aborted
    world.pass_time(0.2)
    assert world.steps[step].aborted, "as long for the other layer, and computing would be faster"


def test_a_step_gives_a_late_request_up_when_others_wait() -> None:
    world, step = waiting_at_layer_1()
    world.arrive(5, 1)
    grace = LAYER_STALL_S + 2 * QUICK_LOAD_S
    assert world.core.due() == pytest.approx(world.now + grace)
    world.pass_time(grace - 0.01)
    assert not world.steps[step].aborted
    world.pass_time(0.02)
    assert world.steps[step].aborted
    world.run_step(step)
    (other,) = world.steps
    assert [chunk.id for chunk in world.steps[other].order.chunks] == [2]
    world.run_step(other)
    assert not world.steps, "the late request waits for all of its load"
    (io,) = world.ios
    world.load_layer(io)
    assert not world.steps
    world.load_all(io)
    assert [chunk.start for step in world.steps.values() for chunk in step.order.chunks] == [48]
    world.settle()
    world.check_rest()


def test_a_late_request_is_dropped_from_a_shared_step_which_goes_on() -> None:
    world, io = loading(QUICK_LOAD_S, token_s=0.2)
    world.arrive(4 * BT, 2)
    world.arrive(5, 1)
    world.load_layer(io)
    (first,) = world.steps
    world.run_step(first)
    (shared,) = world.steps
    assert [chunk.id for chunk in world.steps[shared].order.chunks] == [1, 3]
    world.compute_layer(shared)
    world.pass_time(LAYER_STALL_S + 2 * QUICK_LOAD_S)
    assert actions.DropSequenceSlice(shared, 0) in world.done
    assert world.done[-1] == actions.OpenKVGate(shared, SETTINGS.layers - 1)
    world.run_step(shared)
    assert world.clients[3].end is not None
    world.settle()
    world.check_rest()
