"""Experiment `overload`: what refusing early saves, and how swinging is measured."""

from dataclasses import replace
from statistics import fmean

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.admission import PoolLoad
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.cluster.requests import DONE
from moonpool.simulator.experiments.frame import RequestSource, simulate
from moonpool.simulator.experiments.serving import COMPARED, PICTURED, SMOOTH, correlation, overload, swing, swings

CROWDED = ClusterConfig(
    profile=load_profile("llama-70b-a800"), prefill=2, decode=1, kvstore=1, rate=20.0, slo=SloTargets(10.0, 0.03)
)
SOURCE = RequestSource(requests=150)


def silent(line: str) -> None:
    """Takes progress."""


def test_prompts_computed_for_nothing_by_how_requests_are_let_in() -> None:
    """In the paper's ways decode refuses after prefill, too; what the services do comes before it."""
    result = overload(CROWDED, SOURCE, silent)
    assert [row["admission"] for row in result.rows] == list(COMPARED)
    assert COMPARED == ("baseline", "early", "predictive", "promised")
    for column in ("after_prefill", "wasted_prefill_s"):
        baseline, _, predictive, promised = (float(str(row[column])) for row in result.rows)
        assert baseline > 5, column
        assert baseline > predictive, column
        assert promised == 0, column
    assert all(0 < int(str(row["refused"])) < 150 for row in result.rows)
    assert result.chart.series.keys() == {f"{name}: {pool}" for name in PICTURED for pool in ("prefill", "decode")}
    assert "polyline" in result.chart.svg()


def test_whoever_is_let_in_by_all_is_refused_by_nobody() -> None:
    summary, cluster = simulate(CROWDED, SOURCE.read())
    assert summary.outcomes == {"done": 150}
    assert cluster.conductors[0].late.refused == 0


@pytest.mark.slow
def test_whoever_is_let_in_at_a_load_of_eight_tenths_is_served_within_the_limits() -> None:
    """Nineteen of twenty, over ten seeds of 150 requests."""
    profile, kept, let_in, busy = load_profile("llama-70b-a800"), 0.0, 0, []
    for seed in range(1, 11):
        asked = list(RequestSource(requests=150, seed=seed).read())
        work_s = sum(prefill_seconds(profile.speeds, each.input_length, 0) for each in asked)
        span_s = (asked[-1].timestamp - asked[0].timestamp) / 1000
        rate = 2 * 1.4 * span_s / work_s  # two instances; four tenths of the prompts' tokens are cached
        config = replace(CROWDED, rate=rate, slo=SloTargets(10.0, 0.05), admission="promised", seed=seed)
        summary, cluster = simulate(config, asked)
        kept += summary.goodput_share * summary.requests
        let_in += summary.outcomes[DONE]
        busy.append(cluster.use()["prefill_busy"])
    assert fmean(busy) == pytest.approx(0.8, abs=0.08)
    assert let_in > 0.95 * 10 * 150, "hardly anybody is refused"
    assert kept / let_in >= 0.95


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"admission: is one of .*, promised, not 'some'"):
        simulate(replace(CROWDED, admission="some"), [])


def test_a_slow_course_is_no_swinging() -> None:
    ramp = [float(place) for place in range(10 * SMOOTH)]
    inner = swings(ramp)[SMOOTH:-SMOOTH]
    assert inner == [pytest.approx(0.0, abs=1e-9)] * len(inner)
    assert swing([1.0, 3.0] * 100) == pytest.approx(1.0, rel=0.05)
    assert swing([]) == 0.0


def test_pools_that_swing_against_each_other() -> None:
    wave = [0.0, 1.0, 0.0, -1.0] * 5
    assert correlation(wave, wave) == pytest.approx(1.0)
    assert correlation(wave, [-value for value in wave]) == pytest.approx(-1.0)
    assert correlation(wave, [2.0] * 20) == 0.0


def test_the_load_of_a_pool_counts_what_decodes_and_later_what_is_expected_to() -> None:
    load, speeds = PoolLoad(CROWDED), CROWDED.profile.speeds

    def level(*contexts: int) -> object:
        return pytest.approx(decode_step_seconds(speeds, len(contexts), sum(contexts)) / CROWDED.slo.tbt_s)

    load.placed(1, 1000, begins_at=2.0)
    load.placed(2, 3000, begins_at=5.0)
    assert (load.now(), load.at(1.9), load.at(2.0), load.at(5.0)) == (level(), level(), level(1000), level(1000, 3000))
    load.began(1, 4.0)
    assert (load.now(), load.at(4.0), load.at(13.9), load.at(14.0)) == (
        level(1000), level(1000), level(1000, 3000), level(3000),
    )  # fmt: skip
    load.ended(1, 10.0)
    load.ended(7, 10.0)  # was never placed
    assert (load.now(), load.answer_s, load.at(10.9), load.at(11.0)) == (level(), 6.0, level(3000), level())


def test_by_the_load_of_the_pool_nobody_is_refused_after_prefill_but_in_the_baseline() -> None:
    result = overload(replace(CROWDED, by_pool=True), RequestSource(requests=100), silent)
    assert [row["admission"] for row in result.rows] == list(COMPARED)
    late = [int(str(row["after_prefill"])) for row in result.rows]
    assert late[0] > 0
    assert late[1:] == [0, 0, 0]
    assert all(0 < int(str(row["refused"])) < 100 for row in result.rows)
    assert result.assumptions["decided"] == "by the load of the whole decode pool, but promised"
