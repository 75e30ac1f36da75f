"""How many instances the offered work asks for."""

import math
from dataclasses import replace

import pytest

from moonpool.conductor.core.instances import InstanceKind
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.roles import FIXED_ROLES
from moonpool.conductor.core.scaling import QUEUE_PRESSURE, TARGET_PRESSURE, PoolDemand, demands
from moonpool.conductor.core.scheduler import MAX_LIMIT_S, USUAL_SHARE

from .test_roles import BLOCKS, FULL, ROLES, World
from .world import World as Requests


def test_a_pool_at_the_target_wants_what_there_is_and_a_full_pool_wants_more() -> None:
    world = World(2, 4, replace(ROLES, swap=False))
    world.run(FULL)
    world.wait(1)
    prefill, decode = demands(world.core, world.now)
    assert prefill == PoolDemand(InstanceKind.PREFILL, 2, 0.0)
    assert decode.instances == 4
    assert decode.pressure == pytest.approx(1.0)
    assert decode.wanted == pytest.approx(4 / TARGET_PRESSURE)
    world.run(25)
    world.wait(1)
    assert demands(world.core, world.now)[1].wanted == pytest.approx(4 * (2 / 3) / TARGET_PRESSURE)


def test_queues_at_prefill_want_instances_and_tell_their_seconds() -> None:
    world = World(2, 1, replace(ROLES, swap=False))
    world.queue(20.0)
    world.wait(1)
    prefill, _ = demands(world.core, world.now)
    assert prefill.backlog_s == pytest.approx(20.0)
    assert prefill.pressure == pytest.approx(1.0 + 20.0 / ROLES.ttft_s)
    assert prefill.wanted == pytest.approx(2 * prefill.pressure / TARGET_PRESSURE)


@pytest.mark.parametrize(("limit_s", "target"), [(2.0, TARGET_PRESSURE), (40.0, QUEUE_PRESSURE)])
def test_queues_are_measured_by_the_limits_of_requests(limit_s: float, target: float) -> None:
    world = World(2, 1, replace(ROLES, swap=False))
    world.core.scheduler.usual_ttft_s = limit_s
    world.queue(20.0)
    world.wait(1)
    prefill, _ = demands(world.core, world.now)
    assert prefill.pressure == pytest.approx(1.0 + 20.0 / limit_s)
    assert prefill.wanted == pytest.approx(2 * prefill.pressure / target)


def test_the_usual_limit_is_a_running_mean_of_those_that_have_one() -> None:
    world = Requests()
    assert world.core.scheduler.usual_ttft_s is None
    for limit_s in (30.0, None, 10.0):
        world.arrive(slo=SloLimits(ttft_s=limit_s))
    assert world.core.scheduler.usual_ttft_s == pytest.approx(30.0 - 20.0 * USUAL_SHARE)


def test_one_request_with_a_limit_without_end_does_not_decide_the_mean() -> None:
    world = Requests()
    for limit_s in (1.0, math.inf):
        world.arrive(slo=SloLimits(ttft_s=limit_s))
    assert world.core.scheduler.usual_ttft_s == pytest.approx(1.0 + (MAX_LIMIT_S - 1.0) * USUAL_SHARE)


def test_memory_in_use_wants_instances_where_few_sequences_run() -> None:
    world = World(1, 2, FIXED_ROLES)
    for name in ("d0", "d1"):
        world.loads[name] = replace(world.loads[name], free_blocks=BLOCKS // 10)
    world.wait(1)
    decode = demands(world.core, world.now)[1]
    assert decode.free_share == pytest.approx(0.1)
    assert decode.pressure == pytest.approx(0.9)


def test_an_instance_that_drains_is_left_out() -> None:
    world = World(2, 2, FIXED_ROLES)
    for name in ("p0", "d0"):
        world.loads[name] = replace(world.loads[name], draining=True)
    world.wait(1)
    assert [pool.instances for pool in demands(world.core, world.now)] == [1, 1]


def test_an_empty_cluster_wants_one_of_each() -> None:
    assert [pool.wanted for pool in demands(World(0, 0).core, 0.0)] == [1.0, 1.0]
