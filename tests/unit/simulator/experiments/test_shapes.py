"""Experiments on other shapes of a cluster: pipelines, roles that change, conductors side by side; and memory."""

import tracemalloc

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.conductor.core.roles import RoleLimits
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.cluster.requests import DONE, Request, TokenTimes
from moonpool.simulator.experiments import pipeline as pipelines
from moonpool.simulator.experiments.faults import COUNTS, conductors
from moonpool.simulator.experiments.frame import RequestSource
from moonpool.simulator.experiments.pipeline import SHORT, PromptStream, pipeline
from moonpool.simulator.experiments.serving import Phases, Shifts, roles
from tests.unit.simulator.cluster.rig import config, request

PROFILE = load_profile("llama-70b-a800")


def silent(line: str) -> None:
    """Takes progress."""


def test_wide_pipelines_are_for_long_prompts() -> None:
    rows = pipeline(ClusterConfig(profile=PROFILE, kvstore=0, seed=1), 8, 1, silent).rows
    alike = {(row["pipelines"], row["tokens"], row["load"]): row for row in rows if row["prompts"] == "alike"}
    times = [alike[f"{8 // width} x {width}", 131072, 0.1]["ttft_p50_s"] for width in pipelines.WIDTHS]
    assert times == sorted(times, key=lambda seconds: -float(str(seconds)))
    assert float(str(times[0])) > 5 * float(str(times[-1]))
    mixed = [row for row in rows if row["pipelines"] == "4 x 1 + 1 x 4" and row["tokens"] == SHORT]
    assert len(mixed) == len(pipelines.LOADS)
    assert {row["at_widest_busy"] for row in mixed} == {0.0}


def test_prompts_come_at_the_load_that_is_wanted() -> None:
    wanted = ClusterConfig(profile=PROFILE, prefill=4, kvstore=0, widths=(2, 2, 2, 2))
    found = list(PromptStream([(2048, 0.5), (4096, 0.5)], 0.5, 400, 3).read(wanted))
    seconds = sum(prefill_seconds(PROFILE.speeds, each.input_length, 0) for each in found)
    assert seconds / (found[-1].timestamp / 1000) == pytest.approx(0.5 * 8, rel=0.15)
    assert {each.input_length for each in found} == {2048, 4096}
    ids = [hash_id for each in found for hash_id in each.hash_ids]
    assert len(ids) == len(set(ids))


def test_too_few_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="machines: must be a multiple of 8"):
        pipeline(ClusterConfig(profile=PROFILE), 4, 1, silent)
    with pytest.raises(ConfigError, match="four machines"):
        roles(ClusterConfig(profile=PROFILE, prefill=1, decode=2), Shifts((1.0, 1.0)), silent)


def test_parts_of_a_shifting_mix() -> None:
    found = list(Shifts((0.5, 2.0), part_s=60.0, parts=3, seed=4).read())
    assert [each.timestamp for each in found] == sorted(each.timestamp for each in found)
    parts = [{hash_id for each in found if each.timestamp // 60_000 == part for hash_id in each.hash_ids}
             for part in range(3)]  # fmt: skip
    assert not (parts[0] & parts[1]) | (parts[1] & parts[2]) | (parts[0] & parts[2])
    answers = [[each.output_length for each in found if each.timestamp // 60_000 == part] for part in range(2)]
    assert sum(answers[1]) / len(answers[1]) > 5 * sum(answers[0]) / len(answers[0])


def test_goodput_of_each_part() -> None:
    phases = Phases(SloTargets(1.0, 0.1), 10.0, 2)
    for arrived, first in ((0, 10**11), (0, 2 * 10**12), (11 * 10**12, 11 * 10**12)):
        value = Request(1, arrived, 10, 2, (), outcome=DONE)
        value.take(TokenTimes(first, [10**10], first + 10**10))
        phases.add(value)
    assert phases.shares() == [0.5, 1.0]


def test_rows_of_roles() -> None:
    plain = ClusterConfig(
        profile=PROFILE, prefill=2, decode=2, kvstore=1, slo=SloTargets(10.0, 0.06), roles=RoleLimits()
    )
    result = roles(plain, Shifts((0.2, 0.5), part_s=60.0, parts=2), silent)
    assert [row["division"] for row in result.rows] == ["1 + 3", "2 + 2", "3 + 1", "swapping"]
    assert {row["requests"] for row in result.rows} == {row["done"] for row in result.rows}
    assert result.chart.series.keys() == {row["division"] for row in result.rows}


def test_rows_of_conductors() -> None:
    plain = ClusterConfig(profile=PROFILE, prefill=2, decode=2, kvstore=1, rate=2.0)
    result = conductors(plain, RequestSource(requests=12), 4.0, silent)
    assert [(row["conductors"], row["lost"]) for row in result.rows] == [(n, lost) for n in COUNTS for lost in (0, 1)]
    assert {row["done"] for row in result.rows} == {12}
    assert all((int(str(row["resumed"])) > 0) == bool(row["lost"]) for row in result.rows[:4])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    """What is left at the end of runs at the same load: pools, stores and windows of lengths fill, and that is all."""
    left = [_left(count) for count in (600, 1500, 3000)]
    assert left[2] < 1.1 * left[1], left


def _left(count: int) -> int:
    """Bytes that a run of so many requests leaves behind while its cluster is still there."""
    trace = (request(0.1 * number, 80, 5, 2 * number) for number in range(count))
    tracemalloc.start()
    try:
        cluster = Cluster(config(prefill=2, decode=2, kvstore=1, store_bytes=100 * 6400), lambda _: None)
        cluster.feed(trace)
        cluster.run()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
