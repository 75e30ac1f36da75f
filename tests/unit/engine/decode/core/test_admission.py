"""Leases, conductors, and times between tokens."""

import pytest

from moonpool.engine.decode.core.events import (
    AbortRequest,
    EngineDied,
    StartDecoding,
    StreamClosed,
    StreamOpened,
    TransferOpened,
    TransferProgress,
)
from moonpool.engine.decode.core.request import RequestStatus
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import SPEEDS, World, config


def test_a_promise_ends_with_its_lease_and_not_before() -> None:
    world = World(config(12, lease_s=10.0))
    number = world.reserve(prompt(20))
    assert world.core.due() == 10.0
    world.tick(9.9)
    assert not world.failed
    world.tick(0.2)
    assert number in world.failed
    world.assert_at_rest()


def test_a_promise_does_not_die_in_the_prefills_queue() -> None:
    """Its conductor is there, so it is renewed, minute after minute, until the conductor is lost."""
    world = World(config(12, lease_s=10.0))
    number = world.reserve(prompt(20), conductor="conductor")
    stranger = world.reserve(prompt(20, 1), conductor="another")
    for _ in range(10):
        world.tick(11.0)
    assert (number in world.failed, stranger in world.failed) == (False, True)
    world.post(StreamClosed(1))
    assert number in world.failed
    world.assert_at_rest()


def test_a_promise_to_a_conductor_that_was_lost_before_ends_with_the_grace_period() -> None:
    """Its Reserve was read after its stream had ended; one whose stream comes later keeps the promise."""
    world = World(config(12, lease_s=10.0, grace_s=5.0))
    lost, later = world.reserve(prompt(20), conductor="lost"), world.reserve(prompt(20, 1), conductor="later")
    assert world.core.due() == 5.0
    world.post(StreamOpened(2, "later"))
    world.tick(5.1)
    assert (lost in world.failed, later in world.failed) == (True, False)
    world.tick(11.0)
    assert later not in world.failed


def test_a_promise_that_nobody_takes_up_ends_though_its_conductor_is_there() -> None:
    """The conductor may have lost the answer to its Reserve."""
    world = World(config(12, lease_s=10.0, promise_s=35.0))
    number = world.reserve(prompt(20), conductor="conductor")
    while not world.failed:
        due = world.core.due()
        assert due is not None
        world.now = due
        world.tick(0.0)
    assert (world.now, list(world.failed)) == (35.0, [number])
    world.assert_at_rest()


def test_frames_renew_a_transfer_and_a_stalled_one_ends_though_its_conductor_is_there() -> None:
    world = World(config(12, lease_s=10.0))
    number = world.reserve(prompt(20), conductor="conductor")
    assert number is not None
    world.post(TransferOpened(number))
    for _ in range(3):
        world.tick(9.0)
        world.post(TransferProgress(number))
    assert not world.failed
    world.tick(11.0)
    assert number in world.failed


def test_what_a_lost_conductor_has_not_started_ends_and_what_another_has_goes_on() -> None:
    world = World(config(24, lease_s=10.0))
    world.post(StreamOpened(2, "another"))
    waiting = world.reserve(prompt(20, 1), conductor="conductor")
    whole = world.reserve(prompt(20, 2), conductor="conductor")
    assert whole is not None
    world.arrive(whole)
    running = world.go(prompt(20, 3), 40, conductor="conductor")
    other = world.reserve(prompt(20, 4), conductor="another")
    assert other is not None
    world.arrive(other)
    world.start(other, 2)
    world.post(StreamClosed(1))
    assert set(world.failed) == {waiting, whole, running}
    assert world.core.requests[running].status is RequestStatus.FINISHING, "the step still writes to its blocks"
    world.step()
    assert list(world.core.requests) == [other]


def test_a_start_on_a_stream_that_has_closed_ends_the_request() -> None:
    world = World(config(12))
    number = world.reserve(prompt(20))
    assert number is not None
    world.arrive(number)
    world.post(StreamClosed(1))
    world.post(StartDecoding(number, 1, 0))
    world.assert_at_rest()


def test_no_time_is_promised_beyond_the_places_of_a_step() -> None:
    world = World(config(40, max_num_seqs=2))
    assert world.reserve(prompt(4, 1), slo=1.0) is not None
    assert world.reserve(prompt(4, 2), slo=1.0) is not None
    assert world.reserve(prompt(4, 3), slo=1.0) is None
    assert world.refused[-1].reason == "tbt_slo"
    assert world.reserve(prompt(4, 4)) is not None, "nothing was promised to it: it may wait for a place"


def test_places_are_kept_for_those_who_were_promised_a_time() -> None:
    world = World(config(40, max_num_seqs=2))
    promised = world.reserve(prompt(4, 1), slo=1.0)
    others = [world.go(prompt(4, seed), 30) for seed in (2, 3)]
    world.step()
    assert list(world.core.planner.batch.ids) == others[:1]
    assert promised is not None
    world.arrive(promised)
    world.start(promised)
    world.step()
    assert list(world.core.planner.batch.ids) == [others[0], promised]


def test_a_batch_stays_as_small_as_the_promised_time_asks() -> None:
    """2.5 sequences' time was promised to one: the third waits until a place is free."""
    world = World(config(40))
    limit = SPEEDS.decode_base_s + 2.5 * SPEEDS.decode_per_sequence_s
    first = world.go(prompt(4, 1), 30, slo=limit)
    second = world.go(prompt(4, 2), 10)
    third = world.go(prompt(4, 3), 10)
    while third not in world.core.planner.batch.ids:
        assert len(world.core.planner.batch) <= 2
        world.step()
    assert second not in world.core.requests
    assert world.reserve(prompt(4, 5), slo=limit) is None, "three would break what was promised"
    world.post(AbortRequest(first, "cancelled"))
    world.work()
    world.assert_at_rest()


@pytest.mark.parametrize(("starts_in_s", "promised"), [(0.0, False), (0.02, False), (0.1, True)])
def test_a_time_is_promised_for_when_the_sequence_starts(starts_in_s: float, promised: bool) -> None:
    """Two answers of 20 tokens, 5 ms a step with four: in 100 ms both are expected to be over, in 20 ms neither."""
    world = World(config(40, assumed_answer_tokens=20))
    for seed in (1, 2):
        world.go(prompt(4, seed), 20)
    waits = world.reserve(prompt(4, 3))  # not started: it stays, however late
    assert waits is not None
    limit = SPEEDS.decode_base_s + 2.5 * SPEEDS.decode_per_sequence_s
    assert (world.reserve(prompt(4, 4), slo=limit, starts_in_s=starts_in_s) is not None) == promised


@pytest.mark.parametrize(("starts_in_s", "asked_in_s", "promised"), [(5.0, 0.02, True), (0.04, 0.02, False)])
def test_who_starts_later_counts_from_its_own_start(starts_in_s: float, asked_in_s: float, promised: bool) -> None:
    """Answers of 20 tokens, some 5 ms each: one that starts in 20 ms is over in 5 s, and not in 40 ms."""
    world = World(config(40, assumed_answer_tokens=20))
    for seed in (1, 2):
        assert world.reserve(prompt(4, seed), 20, starts_in_s=starts_in_s) is not None
    limit = SPEEDS.decode_base_s + 2.5 * SPEEDS.decode_per_sequence_s
    assert (world.reserve(prompt(4, 3), 20, slo=limit, starts_in_s=asked_in_s) is not None) == promised


@pytest.mark.parametrize("answer", [1, 2])
def test_a_sequence_that_ends_with_its_first_token_never_runs(answer: int) -> None:
    world = World(config(12))
    world.go(prompt(BT), answer)
    assert (world.run is None) == (answer == 1)
    world.work()
    world.assert_at_rest()


@pytest.mark.parametrize("why", ["stopped", "lease", "engine"])
def test_blocks_into_which_kv_comes_are_nobody_else_s_until_that_has_stopped(why: str) -> None:
    world = World(config(8))
    number = world.reserve(prompt(BT + 1))
    assert number is not None
    world.post(TransferOpened(number))
    if why == "lease":
        world.tick(11.0)
    else:
        world.post(AbortRequest(number, "cancelled") if why == "stopped" else EngineDied("killed"))
    world.post(AbortRequest(number, "again"))
    assert (world.core.budget.available, list(world.failed), len(world.ios)) == (6, [number], 1)
    world.work()
    assert world.core.budget.available == 8
    world.assert_at_rest()
    world.assert_reruns()
