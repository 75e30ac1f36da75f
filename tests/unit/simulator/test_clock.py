"""Virtual time: events happen in the order of their times, equal times in the order of making."""

from math import inf, nextafter

import pytest

from moonpool.simulator.clock import PS, SimulatedWorld, not_before, ps
from moonpool.simulator.cluster.store import SimulatedDisk
from moonpool.simulator.network import CallDelays, Calls


def test_events_happen_in_order() -> None:
    world, seen = SimulatedWorld(), list[tuple[int, str]]()

    def note(name: str) -> None:
        seen.append((world.now, name))
        if name == "b":
            world.after(0, note, "after b")

    for when, name in ((5, "c"), (3, "a"), (3, "b"), (9, "d")):
        world.at(when, note, name)
    world.run(until=5)
    assert seen == [(3, "a"), (3, "b"), (3, "after b"), (5, "c")]
    assert (world.now, len(world), world.events) == (5, 1, 4)
    world.run(until=7)
    assert world.now == 7
    world.run()
    assert seen[-1] == (9, "d")
    assert world.seconds == 9e-12


def test_nothing_happens_in_the_past() -> None:
    world = SimulatedWorld()
    world.run(until=4)
    with pytest.raises(AssertionError):
        world.at(3, print)


def test_a_disk_serves_one_after_the_other() -> None:
    world, ends = SimulatedWorld(), list[float]()
    disk = SimulatedDisk(world, bytes_per_s=100.0, access_s=1.0)
    for nbytes in (100, 200):
        disk.request(nbytes, lambda: ends.append(world.seconds))
    world.at(ps(10), lambda _: disk.request(50, lambda: ends.append(world.seconds)))
    world.run()
    assert ends == [2.0, 5.0, 11.5]
    assert disk.carried == 350


def times(delays: CallDelays, seed: int, count: int) -> tuple[list[float], Calls]:
    world, got = SimulatedWorld(), list[float]()
    calls = Calls(world, delays, seed)
    for _ in range(count):
        calls.send(lambda: got.append(world.seconds))
    world.run()
    return got, calls


def test_delays_of_calls_follow_from_the_seed() -> None:
    delays = CallDelays(least_s=1.0, more_s=0.5)
    got, _ = times(delays, 1, 2000)
    assert got == times(delays, 1, 2000)[0] != times(delays, 2, 2000)[0]
    assert min(got) >= 1.0
    assert 1.45 < sum(got) / len(got) < 1.55


def test_calls_are_dropped_and_late() -> None:
    delays = CallDelays(least_s=1.0, more_s=0.0, drop_share=0.3, late_share=0.2, late_s=7.0)
    got, calls = times(delays, 3, 1000)
    assert len(got) == 1000 - calls.dropped
    assert set(got) == {1.0, 8.0}
    assert got.count(8.0) == calls.late
    assert 250 < calls.dropped < 350
    assert 150 < calls.late < 250
    world = SimulatedWorld()
    sure = Calls(world, CallDelays(drop_share=1.0), 1)
    sure.send(lambda: None, reliable=True)
    assert len(world) == 1


def test_picoseconds() -> None:
    assert ps(1.5) == 3 * PS // 2


def test_seconds_that_no_picosecond_is_equal_to_are_over_with_the_next_one() -> None:
    for number in range(1, 2000):
        at = number * 7919 * 10**6 + number
        assert not_before(at / PS) == at
        assert not_before(nextafter(at / PS, 0.0)) == at
        assert not_before(nextafter(at / PS, inf)) == at + 1
