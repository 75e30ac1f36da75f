"""Fitting the simulator to what a stack was measured to do."""

import math
from dataclasses import replace

import pytest

from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import Request, TokenTimes
from moonpool.simulator.experiments.calibration import Extras, Times, charts, compare, distance, fit, quantile, serve
from moonpool.simulator.traces.workload import CHAT, Workload

CONFIG = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=1, decode=1, kvstore=0)
NOTHING = Extras(1.0, 0.0, 1.0, 0.0, 0.0, prompt_s=0.0, call_s=CONFIG.delays.more_s)
REQUESTS = Workload(3, replace(CHAT, rate_per_s=1.2, answer_tokens=20.0)).requests(60)


def done(arrived: int, first: int, *intervals: int) -> Request:
    made = Request(1, arrived * PS, 10, 3, (), outcome="done")
    made.take(TokenTimes(first * PS, [interval * PS for interval in intervals], (first + sum(intervals)) * PS))
    return made


def test_times_are_those_of_answered_requests() -> None:
    refused = Request(2, 0, 10, 3, (), outcome="refused")
    found = Times.of([done(1, 4, 2, 4), refused, done(0, 1)])
    assert found == Times([3.0, 1.0], [3.0, 0.0], [2.0, 0.0])
    assert found.figures == {"TTFT": [1.0, 3.0], "TPOT": [3.0]}


def test_quantiles_lie_between_neighbours() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert quantile([], 0.5) == 0.0


def test_distance_is_the_mean_logarithm_of_ratios() -> None:
    times = Times([1.0, 2.0, 3.0], [0.1, 0.1, 0.0])
    assert distance(times, times) == 0.0
    twice = Times([2.0, 4.0, 6.0], [0.2, 0.2, 0.0])
    assert distance(times, twice) == pytest.approx(2 * math.log(2.0)), "of requests, and of quantiles"
    assert distance(times, Times([1.0], [0.0])) == math.inf
    assert distance(Times([], []), Times([], [])) == 0.0
    late = Times([1.0], [0.1], [0.4]), Times([1.0], [0.1], [0.2])
    assert distance(*late) == pytest.approx(math.log(2.0) / 3), "of quantiles: when the second token comes is chance"


def test_each_extra_is_applied() -> None:
    with_all = Extras(2.0, 0.5, 3.0, 0.25, 0.03, 1.75, 4.0, 0.125, 0.0625).applied(CONFIG)
    before, after = CONFIG.profile.speeds, with_all.profile.speeds
    assert after.prefill_per_token_s == 2 * before.prefill_per_token_s
    assert after.prefill_base_s == 2 * before.prefill_base_s + 0.5
    assert after.decode_base_s == 3 * before.decode_base_s
    assert after.decode_per_sequence_s == 3 * before.decode_per_sequence_s + 0.25
    assert with_all.load_bytes_per_s == CONFIG.load_bytes_per_s / 4
    assert with_all.transfer_bytes_per_s == CONFIG.transfer_bytes_per_s / 4
    assert (with_all.delays.prompt_s, with_all.delays.more_s, with_all.delays.run_s) == (0.125, 0.0625, 0.03)
    assert with_all.host_slowdown == 1.75
    assert NOTHING.applied(CONFIG) == CONFIG


def test_what_a_prompt_takes_on_top_comes_before_its_first_token() -> None:
    plain, later = serve(CONFIG, REQUESTS[:1]), serve(replace(NOTHING, prompt_s=0.5).applied(CONFIG), REQUESTS[:1])
    assert [each.number for each in plain] == [1]
    assert later[0].first_at - plain[0].first_at == PS // 2


@pytest.mark.parametrize(
    ("count", "simulations", "medians", "tenths", "unfitted"),
    [(40, 40, 0.3, 0.3, 0.45), pytest.param(60, 60, 0.15, 0.25, 0.1, marks=pytest.mark.slow)],
)
def test_a_fit_foresees_requests_that_it_has_not_seen(
    count: int, simulations: int, medians: float, tenths: float, unfitted: float
) -> None:
    """The stack is a simulation with extras; half of its requests are fitted, the others are foreseen."""
    asked, half = REQUESTS[:count], count // 2
    stack = serve(Extras(1.4, 0.05, 1.3, 0.004, 0.02, prompt_s=0.05).applied(CONFIG), asked)
    extras, near = fit(CONFIG, asked[:half], Times.of(stack[:half]), simulations=simulations)
    assert near < 0.2
    assert extras.host_slowdown == 1.0, "each engine has cores of its own"
    assert fit(CONFIG, asked[:half], Times.of(stack[:half]), simulations=3) == fit(
        CONFIG, asked[:half], Times.of(stack[:half]), simulations=3
    )
    foreseen = serve(extras.applied(CONFIG), asked)
    lines = compare(Times.of(stack[half:]), Times.of(foreseen[half:]))
    assert [line.figure for line in lines] == ["TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"]
    assert max(line.error for line in lines[::2]) < medians
    assert max(line.error for line in lines[1::2]) < tenths, "the slowest tenth"
    alone = compare(Times.of(stack[half:]), Times.of(serve(CONFIG, asked)[half:]))
    assert min(line.error for line in alone) > unfitted, "without a fit all of them are off"


def test_lines_and_charts_leave_out_what_was_not_measured() -> None:
    measured, simulated = Times([1.0, 2.0], []), Times([2.0, 3.0], [0.1])
    lines = compare(measured, simulated)
    assert [(line.figure, line.to_json()["met"]) for line in lines] == [("TTFT p50", False), ("TTFT p90", False)]
    assert [line.ratio for line in lines] == pytest.approx([2.5 / 1.5, 2.9 / 1.9])
    assert [chart.title for chart in charts(measured, simulated)] == ["TTFT, measured and simulated"]
