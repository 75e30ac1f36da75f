"""What a decode core learns from its steps."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.scheduling.steps import REPORT_WITHIN_S, longest_wait_s
from moonpool.engine.decode.core.actions import StartRun
from moonpool.engine.decode.core.events import RunDone
from moonpool.engine.decode.core.runs import RunInFlight, observe_run
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import SPEEDS, World, config


def test_a_step_lasts_until_its_end_is_heard_of() -> None:
    """The engine computes for a millisecond; tokens wait eight, and that is what is promised."""
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    before = world.core.tracker.speeds
    for _ in range(30):
        world.now += 0.008
        world.step()
    learnt = world.core.tracker.speeds
    assert before.decode_base_s < 0.003
    one_s = learnt.decode_base_s + learnt.decode_per_sequence_s + learnt.decode_per_context_token_s * (BT + 30)
    assert one_s == pytest.approx(0.008, rel=0.05)


def test_chunks_teach_what_computing_prompts_takes() -> None:
    """Each takes three times what was thought, beside a batch that takes what is known."""
    world = World(config(64, chunked_prefill_size=8))
    world.go(prompt(BT), answer=200)
    before = world.core.tracker.speeds
    for number in range(4):
        asked = world.reserve(prompt(6 * BT, number + 1), 2)
        assert asked is not None
        world.compute(asked)
        while asked in world.core.requests:
            chunks = world.run.chunks if world.run is not None else ()
            world.now += 0.002 + sum(3e-4 * chunk.count for chunk in chunks)
            world.step()
    learnt = world.core.tracker.speeds
    chunk_s = learnt.prefill_base_s + 8 * learnt.prefill_per_token_s
    assert before.prefill_base_s + 8 * before.prefill_per_token_s == pytest.approx(8e-4)
    assert chunk_s == pytest.approx(24e-4, rel=0.15)
    assert learnt.decode_base_s + learnt.decode_per_sequence_s == pytest.approx(0.002, rel=0.15)


def test_without_time_the_engines_own_seconds_count() -> None:
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    before = world.core.tracker.speeds
    for _ in range(20):
        world.step()
    assert world.core.tracker.speeds.decode_base_s == pytest.approx(before.decode_base_s, rel=0.2)


def test_a_step_that_is_overdue_tells_before_it_is_over() -> None:
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    for _ in range(20):
        world.now += 0.008
        world.step()
    planner, learnt = world.core.planner, world.core.tracker.speeds
    assert planner.speeds(world.now + 0.008) == learnt
    told = planner.speeds(world.now + 0.8)
    assert told.decode_base_s == pytest.approx(100 * learnt.decode_base_s, rel=0.1)
    assert told.prefill_base_s == learnt.prefill_base_s
    assert world.core.tracker.speeds == learnt, "nothing was learnt from it yet"


def test_a_patient_step_may_wait_before_it_is_overdue() -> None:
    run, speeds = StartRun(1, (1, 2), patient=True), Speeds(decode_base_s=0.01)
    patient, other = RunInFlight(run, 9, 5.0), RunInFlight(replace(run, patient=False), 9, 5.0)
    assert patient.overdue(5.07, speeds) == speeds
    assert other.overdue(5.07, speeds).decode_base_s == pytest.approx(0.07)
    longest_s = 0.01 + longest_wait_s(0.01)
    assert patient.overdue(5.0 + 1.9 * longest_s, speeds) == speeds
    assert patient.overdue(5.0 + 5 * longest_s, speeds).decode_base_s == pytest.approx(0.05)
    several = RunInFlight(replace(run, steps=9), 9, 5.0)  # of which some may come together
    assert several.overdue(5.0 + 1.9 * (longest_s + REPORT_WITHIN_S), speeds) == speeds
    assert several.overdue(5.0 + 3 * (longest_s + REPORT_WITHIN_S), speeds).decode_base_s == pytest.approx(0.03)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_a_patient_step_waits_says_nothing_about_the_engine(steps: int) -> None:
    """Neither in a run nor alone: then a step lasts until its end is heard of, but for that."""
    tracker, flight = SpeedTracker(SPEEDS), RunInFlight(StartRun(1, (1, 2), steps=steps, patient=True), 9, 5.0)
    for _ in range(30):
        observe_run(tracker, 5.0 + 0.009, flight, RunDone(1, False, 0.003, waited_s=0.006))
    assert decode_step_seconds(tracker.speeds, 2, 9) == pytest.approx(0.003, rel=0.01)
