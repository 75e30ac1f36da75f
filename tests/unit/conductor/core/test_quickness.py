"""From the steps of a decode instance to the conductor's verdict: what an instance learns, and what is made of it."""

import random

import pytest

from moonpool.scheduling.latency import Speeds, SpeedTracker, decode_step_seconds
from services.conductor.core.decode_pool import TYPICAL_BATCH, TYPICAL_CONTEXT
from services.conductor.core.instances import HealthMonitor

TOLD = Speeds(decode_base_s=0.026, decode_per_sequence_s=1e-4, decode_per_context_token_s=3e-8)
FACTOR = 6.0


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
