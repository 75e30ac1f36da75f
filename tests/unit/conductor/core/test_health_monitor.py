"""When an instance counts as slow, and when it has recovered: exact times, and from the steps of an instance."""

import random

import pytest

from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.conductor.core.decode_instance import TYPICAL_BATCH, TYPICAL_CONTEXT
from moonpool.conductor.core.health_monitor import (
    FIRST_TRIAL_S,
    MIN_REPORTS,
    MIN_SLOWDOWN_S,
    SLOW_HOLD_S,
    TRIAL_S,
    HealthMonitor,
)

FACTOR = 6.0
FINE = Speeds(decode_base_s=0.1)
SLOW = Speeds(decode_base_s=1.0)
LATER = Speeds(decode_base_s=0.9)


def hear(health: HealthMonitor, speeds: Speeds, now: float, *, idle: bool = False) -> tuple[bool, bool]:
    """Takes a report; whether the instance is slow, and whether it was believed."""
    believed = health.report(speeds, speeds.decode_base_s, now, FACTOR, idle=idle)
    return health.slow, believed == speeds


def taught(seconds: float = FINE.decode_base_s) -> HealthMonitor:
    """One of which enough was heard to judge it, at time 0."""
    health = HealthMonitor()
    for lesson in range(MIN_REPORTS):
        hear(health, Speeds(decode_base_s=seconds * (1 + lesson % 2 / 1000)), 0.0)
    hear(health, Speeds(decode_base_s=seconds), 0.0)
    assert (health.reports, health.reported_s) == (MIN_REPORTS + 1, seconds)
    return health


def slow_at(now: float) -> HealthMonitor:
    """One that was found slow."""
    health = taught()
    hear(health, SLOW, now - SLOW_HOLD_S)
    assert hear(health, SLOW, now) == (True, True)
    return health


def test_one_that_stays_slow_is_found_after_a_while() -> None:
    health = taught()
    assert hear(health, SLOW, 1.0) == (False, True)
    assert hear(health, SLOW, 1.0 + SLOW_HOLD_S - 0.01) == (False, True)
    assert hear(health, SLOW, 1.0 + SLOW_HOLD_S) == (True, True)


def test_a_moment_is_none() -> None:
    health = taught()
    for now in (1.0, 2.0, 3.0):
        assert hear(health, SLOW, now) == (False, True)
        assert hear(health, FINE, now + SLOW_HOLD_S / 2) == (False, True)


@pytest.mark.parametrize(("seconds", "slow"), [(0.59, False), (0.61, True)])
def test_the_factor_is_kept(seconds: float, slow: bool) -> None:
    health, told = taught(), Speeds(decode_base_s=seconds)
    hear(health, told, 2e-6)
    assert hear(health, told, 2e-6 + SLOW_HOLD_S)[0] is slow


def test_what_takes_next_to_nothing_is_never_slow() -> None:
    health = taught(MIN_SLOWDOWN_S / 10)
    for now in (1.0, 2.0):
        assert hear(health, Speeds(decode_base_s=MIN_SLOWDOWN_S), now) == (False, True)


def test_without_a_factor_nothing_is_slow() -> None:
    health = HealthMonitor()
    for now, speeds in enumerate((FINE, SLOW, SLOW, SLOW)):
        assert health.report(speeds, speeds.decode_base_s, float(now), 0.0, idle=False) == speeds
    assert not health.slow


def test_a_trial_begins_when_it_is_idle_after_the_pause() -> None:
    health = slow_at(10.0)
    assert hear(health, SLOW, 10.0 + FIRST_TRIAL_S) == (True, True), "something is there still"
    assert not health.trial
    assert hear(health, SLOW, 9.9 + FIRST_TRIAL_S, idle=True) == (True, True)
    assert not health.trial
    assert hear(health, SLOW, 10.1 + FIRST_TRIAL_S, idle=True) == (True, False)
    assert health.trial
    assert hear(health, SLOW, 99.0, idle=True) == (True, False), "nothing was measured since"


def test_a_trial_that_goes_well_ends_it() -> None:
    health = slow_at(10.0)
    hear(health, SLOW, 20.0, idle=True)
    assert hear(health, LATER, 21.0) == (True, True), "the first measurements count for little"
    assert hear(health, FINE, 21.5) == (False, True)
    assert not health.trial


def test_after_a_trial_that_goes_badly_the_pause_is_twice_as_long() -> None:
    health = slow_at(10.0)
    hear(health, SLOW, 20.0, idle=True)
    hear(health, LATER, 21.0)
    assert hear(health, LATER, 21.0 + TRIAL_S) == (True, True)
    assert not health.trial
    hear(health, LATER, 21.0 + TRIAL_S + 2 * FIRST_TRIAL_S - 0.1, idle=True)
    assert not health.trial
    hear(health, LATER, 21.0 + TRIAL_S + 2 * FIRST_TRIAL_S, idle=True)
    assert health.trial


def test_who_is_slow_for_good_is_as_slow_as_it_is() -> None:
    health = slow_at(10.0)
    now = 10.0
    while health.slow:
        now += 1.0
        hear(health, SLOW, now)
        assert now < 3600.0
    assert now > 300.0


def test_what_it_tells_at_first_is_no_measure() -> None:
    """It joined with a profile that is ten times too quick."""
    health = HealthMonitor()
    hear(health, FINE, 0.0)
    for lesson in range(MIN_REPORTS + 1):
        assert hear(health, Speeds(decode_base_s=1.0 + lesson % 2 / 10), float(lesson)) == (False, True)
    for now in (30.0, 31.0, 32.0):
        assert hear(health, SLOW, now) == (False, True)


TOLD = Speeds(decode_base_s=0.026, decode_per_sequence_s=1e-4, decode_per_context_token_s=3e-8)


class Instance:
    """Steps of changing batches, each followed by a report."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"quickness/{seed}")
        self.tracker, self.health, self.now = SpeedTracker(TOLD), HealthMonitor(), 0.0

    def steps(self, count: int, slower: float, *, jitter: float = 0.2) -> list[bool]:
        """Whether it counted as slow after each step."""
        found = []
        for _ in range(count):
            batch = self.random.randint(1, 16)
            context = batch * self.random.randint(100, 4000)
            seconds = slower * decode_step_seconds(TOLD, batch, context) * self.random.uniform(1 - jitter, 1 + jitter)
            self.now += seconds
            self.tracker.observe_decode(batch, context, seconds)
            speeds = self.tracker.speeds
            typical_s = decode_step_seconds(speeds, TYPICAL_BATCH, TYPICAL_CONTEXT)
            self.health.report(speeds, typical_s, self.now, FACTOR, idle=False)
            found.append(self.health.slow)
        return found


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_the_speed_is_seen_within_seconds_and_its_end_too(seed: int) -> None:
    instance = Instance(seed)
    assert not any(instance.steps(200, 1.0))
    began = instance.now
    assert not any(instance.steps(3, 10.0)), "a few steps are no failure"
    while not instance.health.slow:
        instance.steps(1, 10.0)
    assert instance.now - began < 5.0
    assert not instance.steps(30, 1.0)[-1]


@pytest.mark.parametrize("seed", range(5))
def test_other_work_on_the_machine_is_no_failure(seed: int) -> None:
    instance = Instance(seed)
    for slower in (1.0, 2.5, 1.0, 3.0, 1.0):
        assert not any(instance.steps(60, slower, jitter=0.5))


@pytest.mark.parametrize("error", [0.1, 10.0])
def test_a_profile_that_is_far_off_is_no_failure(error: float) -> None:
    instance = Instance(9)
    assert not any(instance.steps(200, error))
