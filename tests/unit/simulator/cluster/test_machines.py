"""Pipelines of several machines, machines that change their roles, conductors side by side: exact small cases."""

from dataclasses import replace

import pytest

from moonpool.base.errors import ConfigError
from moonpool.conductor.core.actions import ChangeRole
from moonpool.conductor.core.instances import InstanceKind
from moonpool.conductor.core.roles import RoleLimits
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.requests import DONE, Request
from tests.unit.simulator.cluster.rig import config, request, run


@pytest.mark.parametrize(("width", "seconds"), [(1, 1.024), (2, 0.640), (4, 0.448)])
def test_the_stages_of_a_pipeline_work_on_consecutive_chunks(width: int, seconds: float) -> None:
    """Four chunks of 256 ms: the last one begins after three stages' times, and goes through all of them."""
    (value,), cluster = run(config(kvstore=0, widths=(width,)), [request(0.0, 1024, 1, 0)])
    assert value.first_at == pytest.approx(ps(seconds), abs=10_000)
    assert value.predicted_ttft_s == pytest.approx(seconds)
    assert cluster.prefills[0].use.busy == ps(1.024) // width


def test_one_chunk_gains_nothing_from_stages() -> None:
    (value,), _ = run(config(kvstore=0, widths=(4,)), [request(0.0, 100, 1, 0)])
    assert value.first_at == pytest.approx(ps(0.1), abs=10_000)


def test_short_prompts_leave_a_wide_pipeline_to_long_ones_unless_it_is_idle() -> None:
    trace = [request(0.0, 100, 1, 0), request(1.0, 2048, 1, 100), request(1.1, 100, 1, 200), request(4.0, 600, 1, 300),
             request(4.0, 100, 1, 400)]  # fmt: skip
    ended, _ = run(config(kvstore=0, prefill=2, widths=(1, 4)), trace)
    assert [each.prefill for each in ended] == ["p0", "p1", "p0", "p1", "p0"]
    busy = [request(0.0, 900, 1, 0), request(0.0, 200, 1, 100), request(0.1, 200, 1, 200)]
    ended, _ = run(config(kvstore=0, prefill=2, widths=(1, 4)), busy)
    assert [each.prefill for each in ended] == ["p1", "p0", "p0"], "the narrow one is free sooner than the wide one"
    idle = [request(0.0, 200, 1, 0), request(0.1, 200, 1, 100)]
    ended, _ = run(config(kvstore=0, prefill=2, widths=(1, 4)), idle)
    assert [each.prefill for each in ended] == ["p0", "p1"]


def test_a_pipeline_loads_and_reuses_as_one_instance_does() -> None:
    trace = [request(0.0, 1000, 2, 0), request(3.0, 1200, 2, 0), request(3.01, 1100, 2, 0)]
    ended, _ = run(config(prefill=2, kvstore=1, widths=(2, 4)), trace)
    assert [each.outcome for each in ended] == [DONE] * 3
    assert [each.reused for each in ended] == [0, 960, 1088], "the last one waits for what the one before it computes"


@pytest.mark.parametrize("widths", [(1,), (1, 2, 3), (1, 0)])
def test_widths_are_one_for_each_instance(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="widths: must be 2 positive numbers"):
        config(prefill=2, widths=widths)


# Roles

NEVER = RoleLimits(swap=True, hold_s=1e6)


def test_a_machine_drains_and_comes_back_in_the_other_role() -> None:
    trace = [request(0.1 * number, 200, 100, 10 * number) for number in range(40)]
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, decode=2, roles=NEVER, role_change_s=5.0), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(2.0), lambda _: cluster.machines.change(ChangeRole("d3", 1, InstanceKind.PREFILL)))
    cluster.run()
    cluster.check_at_rest()
    assert [(each.outcome, each.made) for each in ended] == [(DONE, 100)] * 40
    [(when, name)] = cluster.machines.changed
    assert name == "p3"
    assert when >= ps(7.0)
    assert [prefill.name for prefill in cluster.prefills if prefill.up] == ["p0", "p1", "p3"]
    assert [decode.name for decode in cluster.decodes if decode.up] == ["d2"]


def test_orders_for_another_life_of_an_instance_do_nothing() -> None:
    cluster = Cluster(config(prefill=2, decode=2, roles=NEVER), lambda _: None)
    for order in (ChangeRole("d3", 7, InstanceKind.PREFILL), ChangeRole("d0", 1, InstanceKind.PREFILL)):
        cluster.machines.change(order)
    cluster.run()
    assert not cluster.machines.changed


def test_prefill_that_does_not_keep_up_gets_another_machine() -> None:
    """Three seconds of computing come in a second to two instances; decode has next to nothing to do."""
    trace = [request(1.0 * number, 3000, 2, 100 * number) for number in range(150)]
    limits = RoleLimits(swap=True, hold_s=20.0, dwell_s=60.0)
    plain = config(prefill=2, decode=3, kvstore=0, role_change_s=5.0, max_num_batched_tokens=4096)
    fixed, _ = run(plain, trace)
    swapped, cluster = run(replace(plain, roles=limits), trace)
    assert [(name[0], when < 150 * PS) for when, name in cluster.machines.changed][:1] == [("p", True)]
    assert {each.outcome for each in (*fixed, *swapped)} == {DONE}
    assert mean_s(swapped) < mean_s(fixed) / 2


def mean_s(ended: list[Request]) -> float:
    return sum(each.first_at - each.arrived for each in ended) / len(ended) / PS


# Conductors


@pytest.mark.parametrize("lost", ["c0", "c1", "c2"])
def test_streams_of_a_lost_conductor_go_on_at_another(lost: str) -> None:
    trace = [request(0.05 * number, 300, 50, 100 * (number % 5)) for number in range(60)]
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, decode=2, kvstore=1, conductors=3, deadline_s=60.0), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(2.0), lambda _: cluster.crash(lost, 5.0))
    cluster.run()
    cluster.check_at_rest()
    assert [(each.outcome, each.made, len(each.intervals)) for each in ended] == [(DONE, 50, 49)] * 60
    resumed = [each for each in ended if each.resumed]
    assert 0 < len(resumed) < 60
    assert {each.number % 3 for each in resumed} == {int(lost[1])}
    assert max(interval for each in resumed for interval in each.intervals) < ps(4.0), "nobody waits for the lost one"


def test_prompts_that_come_to_four_conductors_at_once_spread_over_four_idle_instances() -> None:
    """All choose the same instance by their pictures; it takes one, and tells the others that it has it."""
    trace = [request(0.0, 300, 5, 100 * number) for number in range(8)]
    ended, cluster = run(config(prefill=4, decode=2, kvstore=0, conductors=4), trace)
    assert sorted(each.prefill for each in ended) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    assert {each.outcome for each in ended} == {DONE}
    assert {each.attempts for each in ended} == {1}
    assert [conductor.core.scheduler.stale > 0 for conductor in cluster.conductors].count(True) >= 3
