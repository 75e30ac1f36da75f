"""The benchmark that holds the simulator's goodput against a stack's: its modes, requests and rows."""

from dataclasses import replace

import pytest

from benchmarks.emulated import late, lateness
from benchmarks.frame import Skipped
from benchmarks.goodput import MODES, MOST_TOKENS, Figures, arrivals, rows
from moonpool.cli.check import GaugeReading
from moonpool.cli.replay import TraceReplay
from moonpool.client import Slo as Limits
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.admission import keeps_tbt, limits_of, slo_of
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.traces.mooncake import TraceRequest

CONFIG = ClusterConfig(profile=load_profile("llama-70b-a800"))


def test_the_simulated_cluster_lets_in_whom_the_stack_lets_in() -> None:
    for mode in MODES.values():
        config = mode.simulated(CONFIG)
        assert (config.policy, limits_of(config).admission) == (mode.policy, mode.admission)
        told = slo_of(config)
        assert (told.ttft_s, told.tbt_s) == ((30.0, pytest.approx(0.09)) if mode.limited else (None, None))
        assert keeps_tbt(config), "decode looks when it is asked for room, not later"
        flags = dict(zip(mode.flags[::2], mode.flags[1::2], strict=True))
        assert flags == {
            "--policy": mode.policy,
            "--admission": mode.admission.value,
            "--set": f"policy_seed={config.seed}",
        }
    assert {mode.admission for mode in MODES.values() if mode.limited} == set(AdmissionMode)


def test_limits_are_told_in_seconds_of_the_stack() -> None:
    replay = TraceReplay([], 512, 0.5, 4096, CONFIG.slo, Limits(ttft_s=6.0, tbt_s=0.05))
    assert replay.told() == Limits(ttft_s=12.0, tbt_s=0.1)
    assert replace(replay, limits=Limits(ttft_s=6.0)).told() == Limits(ttft_s=12.0)
    assert replace(replay, limits=None).told() is None


def test_requests_come_at_the_wanted_rate() -> None:
    trace = [TraceRequest(1000.0 * at * at, 100_000, 5, tuple(range(200))) for at in range(5)]
    found = arrivals(trace, 3, rate=4.0)
    assert [request.timestamp for request in found] == [0.0, pytest.approx(125.0), pytest.approx(500.0)]
    assert {(request.input_length, len(request.hash_ids)) for request in found} == {(MOST_TOKENS, 63)}
    with pytest.raises(Skipped, match="has 5 requests, 6 are wanted"):
        arrivals(trace, 6, rate=4.0)


def test_rows_say_how_far_the_simulator_is_off() -> None:
    goodput, off = rows("policy random", [Figures(50.0, 60.0), Figures(80.0, 80.0), Figures(100.0, 90.0)])
    assert (goodput.value, goodput.limit_value, goodput.target) == (80.0, 80.0, None)
    assert (off.value, off.limit_value, off.met) == (10.0, 15.0, True)
    assert Figures(0.0, 3.0).off == 100.0
    assert Figures(0.0, 0.0).off == 0.0


def test_lateness_is_of_the_steps_since() -> None:
    def read(step_s: float, late_s: float) -> list[GaugeReading]:
        kinds = ("emulated_step_seconds_total", step_s), ("emulated_late_seconds_total", late_s), ("other", 9.0)
        return [GaugeReading(f"decode-{at}", name, value, None) for at in range(2) for name, value in kinds]

    assert late(read(10.0, 5.0), read(30.0, 6.0)) == 5.0
    assert late(read(10.0, 5.0), read(10.0, 5.0)) == 0.0
    assert [lateness([value]).met for value in (4.0, 6.0)] == [True, False]
