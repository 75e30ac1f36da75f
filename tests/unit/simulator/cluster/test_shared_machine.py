"""Engines that share the cores of one machine."""

from dataclasses import replace

import pytest

from moonpool.base.errors import ConfigError
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.engine import SharedMachine
from tests.unit.simulator.cluster.rig import config, request, run


def test_work_takes_longer_while_another_engine_computes() -> None:
    machine, looked = SharedMachine(2.0), [0, 0]

    def look(number: int) -> None:
        looked[number] += 1

    joins, other = machine.joins(lambda: look(0)), machine.joins(lambda: look(1))
    joins.computes(True)
    assert (joins.slowdown, other.slowdown, looked) == (1.0, 2.0, [0, 1])
    other.computes(True)
    other.computes(True)
    assert (joins.slowdown, other.slowdown, looked) == (2.0, 2.0, [1, 1])
    joins.computes(False)
    assert (joins.slowdown, other.slowdown, looked) == (2.0, 1.0, [1, 2])


def test_a_prompt_and_an_answer_on_one_machine_slow_each_other_down() -> None:
    """Steps of decode take 11.1 ms, a prompt 100 ms. From 0.2 s on both are computed, at half their speed."""
    trace = [request(0.0, 100, 20, 0), request(0.2, 100, 1, 100)]
    alike = config(kvstore=0)
    (answer, prompt), _ = run(alike, trace)
    assert prompt.first_at == pytest.approx(0.3 * PS)
    assert answer.ended_at == pytest.approx((0.1025 + 19 * 0.0111) * PS, abs=0.001 * PS)
    (answer, prompt), cluster = run(replace(alike, host_slowdown=2.0), trace)
    assert prompt.first_at == pytest.approx(0.4 * PS)
    # nine steps before the prompt is done with, the last of which has begun alone; nine at half the speed, one after it
    assert answer.ended_at == pytest.approx((0.1025 + 9 * 0.0111 + 9 * 0.0222 + 0.0111) * PS, abs=0.001 * PS)
    assert cluster.decodes[0].core.planner.steps == 1, "another slowdown is no other run"


def test_company_makes_nothing_quicker() -> None:
    with pytest.raises(ConfigError, match="host_slowdown"):
        config(host_slowdown=0.9)
