"""When a prefill instance will be free is a sum of seconds: what claims and releases leave of it."""

import random

import pytest

from services.conductor.core.instances import LoadFacts

from .worlds import facts, prefill_at

NOW = 2.0**20 - 8.0
"""Seconds of a clock that began twelve days ago. The next power of two is among the sums: numbers beyond it are twice
as coarse, so what is added there and taken away here is not the same. Where all are as coarse, sums are exact."""
SEED = 7


def test_a_million_claims_and_releases_leave_less_than_a_microsecond() -> None:
    draw = random.Random(SEED)
    instance = prefill_at(0, facts("prefill-0"), NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    before = instance.free_at
    waiting: list[int] = []
    for number in range(1_000_000):
        instance.claim(number, draw.expovariate(2.0), NOW)
        waiting.append(number)
        while len(waiting) > draw.randrange(64):
            at = draw.randrange(len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
            instance.release(waiting.pop(), NOW)
    for number in waiting:
        instance.release(number, NOW)
    print(f"seed {SEED}: off by {instance.free_at - before:.1e} s")
    assert instance.prompts == {}
    assert instance.free_at == pytest.approx(before, abs=1e-6)


def test_a_report_begins_anew_whatever_was_left() -> None:
    instance = prefill_at(0, facts("prefill-0"), NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    for number in range(1000):
        instance.claim(number, 0.1 + 1e-9 * number, NOW)
    for number in range(1000):
        instance.release(number, NOW)
    instance.report(LoadFacts(drain_s=3.0), NOW, 6.0)
    assert instance.free_at == NOW + 3.0
