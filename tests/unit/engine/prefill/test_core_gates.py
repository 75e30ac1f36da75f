"""When a step begins that follows a load, and when it stops waiting for one. Exact, in seconds."""

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.forecast import LAYER_STALL_S
from tests.unit.engine.prefill.world import BT, SETTINGS, World, staged

LAYER_LOAD_S = 0.9
"""Of three blocks, whose layer is 3 KiB."""
QUICK_LOAD_S = 0.2
COMPUTE_S = 4.8
"""Of the blocks that are loaded."""


def loading(layer_s: float = LAYER_LOAD_S, token_s: float = 0.1) -> tuple[World, int]:
    """A prompt of 60 tokens whose first 48 are being loaded; the others take 1.2 s, 0.4 s per layer."""
    speeds = Speeds(prefill_per_token_s=token_s, load_bytes_per_s=3 * SETTINGS.slice_bytes / layer_s)
    it = World(staged(1, max_num_batched_tokens=4 * BT, blocks=32), speeds)
    it.arrive(60, sources=(events.KVSource("store", 3),))
    (io,) = [io for io, action in it.ios.items() if isinstance(action, actions.LoadBlocks)]
    return it, io


def test_a_step_begins_just_in_time() -> None:
    """Layers come every 0.9 s, and take 0.4 s to compute: the last one is waited for at no gate."""
    it, io = loading()
    it.pass_time(LAYER_LOAD_S)
    it.load_layer(io)
    assert not it.steps
    # Layer 1 is expected at 1.8 s, layer 2 at 2.7 s; a step that begins at 1.9 s needs layer 2 at 2.7 s.
    assert it.core.due() == pytest.approx(1.9)
    it.pass_time(0.9)
    it.load_layer(io)
    assert not it.steps
    it.pass_time(0.2)
    assert [step.order.gated for step in it.steps.values()] == [True]
    assert it.now == pytest.approx(2.0)


def test_a_step_needs_the_first_layer() -> None:
    it, _ = loading()
    it.pass_time(COMPUTE_S - 0.1)
    assert not it.steps
    assert it.core.due() == pytest.approx(COMPUTE_S), "then the prefix could have been computed"


def test_a_step_does_not_begin_while_a_layer_is_overdue() -> None:
    it, io = loading()
    it.pass_time(LAYER_LOAD_S)
    it.load_layer(io)
    overdue_s = 3 * LAYER_LOAD_S + LAYER_STALL_S
    it.pass_time(overdue_s - 0.01)
    assert not it.steps
    assert it.core.due() == pytest.approx(LAYER_LOAD_S + overdue_s), "nothing to wait for but the layer"


def test_a_load_that_comes_faster_than_predicted_is_followed_at_once() -> None:
    it, io = loading()
    it.load_layer(io)
    it.load_layer(io)
    assert len(it.steps) == 1


def waiting_at_layer_1() -> tuple[World, int]:
    """The step has computed layer 0, and layer 1 does not come."""
    it, io = loading(QUICK_LOAD_S)
    it.pass_time(0.2)
    it.load_layer(io)
    (step,) = it.steps
    it.compute_layer(step)
    assert not it.can_compute(step)
    return it, step


def test_a_step_waits_for_a_late_layer_while_nobody_else_does() -> None:
    it, step = waiting_at_layer_1()
    it.pass_time(COMPUTE_S / 2 - 0.1)
    assert not it.steps[step].aborted
    it.pass_time(0.2)
    assert it.steps[step].aborted, "as long for the other layer, and computing would be faster"


def test_a_step_gives_a_late_request_up_when_others_wait() -> None:
    it, step = waiting_at_layer_1()
    it.arrive(5, 1)
    grace = LAYER_STALL_S + 2 * QUICK_LOAD_S
    assert it.core.due() == pytest.approx(it.now + grace)
    it.pass_time(grace - 0.01)
    assert not it.steps[step].aborted
    it.pass_time(0.02)
    assert it.steps[step].aborted
    it.run_step(step)
    (other,) = it.steps
    assert [chunk.id for chunk in it.steps[other].order.chunks] == [2]
    it.run_step(other)
    assert not it.steps, "the late request waits for all of its load"
    (io,) = it.ios
    it.load_layer(io)
    assert not it.steps
    it.load_all(io)
    assert [chunk.start for step in it.steps.values() for chunk in step.order.chunks] == [48]
    it.settle()
    it.check_rest()


def test_a_late_request_is_dropped_from_a_shared_step_which_goes_on() -> None:
    it, io = loading(QUICK_LOAD_S, token_s=0.2)
    it.arrive(4 * BT, 2)
    it.arrive(5, 1)
    it.load_layer(io)
    (first,) = it.steps
    it.run_step(first)
    (shared,) = it.steps
    assert [chunk.id for chunk in it.steps[shared].order.chunks] == [1, 3]
    it.compute_layer(shared)
    it.pass_time(LAYER_STALL_S + 2 * QUICK_LOAD_S)
    assert actions.DropSequenceSlice(shared, 0) in it.done
    assert it.done[-1] == actions.OpenKVGate(shared, SETTINGS.layers - 1)
    it.run_step(shared)
    assert it.clients[3].end is not None
    it.settle()
    it.check_rest()
