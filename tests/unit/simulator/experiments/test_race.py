"""Races of placement policies: arrivals by seed, links by speed, and rows over all seeds."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.eviction import SHIPPED
from moonpool.base.errors import ConfigError
from moonpool.cli.simulate import app
from moonpool.conductor.placement.policies import DEFAULT_POLICY
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.frame import RequestSource
from moonpool.simulator.experiments.race import Courses, Racers, jittered, linked, misses, race
from moonpool.simulator.traces.mooncake import TraceRequest

CLUSTER = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=2, decode=1, kvstore=2, rate=2.0)
SMALL = RequestSource(SHIPPED, requests=24)


def silent(line: str) -> None:
    """Takes progress."""


def test_arrivals_move_within_the_grain_of_the_clock_by_seed() -> None:
    coarse = [TraceRequest(at, 10, 1, (number,)) for number, at in enumerate((0, 0, 3000, 3000, 9000))]
    moved = jittered(coarse, 7)
    assert moved == jittered(coarse, 7) != jittered(coarse, 8)
    assert [each.timestamp for each in moved] == sorted(each.timestamp for each in moved)
    late = {each.hash_ids[0]: each.timestamp - coarse[each.hash_ids[0]].timestamp for each in moved}
    assert all(0 <= by <= 3000 for by in late.values())
    assert len(set(late.values())) == 5
    assert jittered(coarse[:2], 7) == coarse[:2], "one instant has no grain"


def test_links_are_as_quick_as_asked_and_none_leave_own_caches_only() -> None:
    assert linked(CLUSTER, 6.2).load_bytes_per_s == 6.2e9
    alone = linked(CLUSTER, 0.0)
    assert (alone.kvstore, alone.peers, alone.copy_share) == (0, False, 0.0)


def test_a_row_has_the_requests_of_all_seeds() -> None:
    def mean(seed: int, seeds: int) -> float:
        (row,) = race(replace(CLUSTER, seed=seed), SMALL, Racers([DEFAULT_POLICY]), Courses(seeds=seeds), silent).rows
        return float(str(row["ttft_mean_s"]))

    assert mean(1, 2) == pytest.approx((mean(1, 1) + mean(2, 1)) / 2, rel=1e-3)


@pytest.mark.parametrize(("named", "match"), [(["nice"], "no policy 'nice'"), (["lmetric", "lmetric"], "twice")])
def test_wrong_names_are_refused(named: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Racers(named)
    with pytest.raises(ConfigError, match=match.replace("lmetric", "social")):
        Racers([DEFAULT_POLICY], [name.replace("lmetric", "social") for name in named])


def test_the_command_prints_rows_and_says_which_is_the_default() -> None:
    asked = f"race --policy load_balance,{DEFAULT_POLICY} --requests 20 --speed 2 --link-gb 0 --jitter-seeds 2 --json"
    found = CliRunner().invoke(app, [*asked.split(), "--prefill", "2", "--decode", "1"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert [(row["policy"], row["default"]) for row in result["rows"]] == [
        ("load_balance", False),
        (DEFAULT_POLICY, True),
    ]
    figures = {"ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "within", "reused"}
    names = {"policy", "decode_policy", "default", "slowdown_p99"}
    assert all(row.keys() == names | figures | {"speed", "link_gb"} for row in result["rows"])
    assert {(row["speed"], row["link_gb"]) for row in result["rows"]} == {(2.0, 0.0)}


def test_a_row_says_what_was_asked_over_all_seeds_and_without_a_link_nothing_is_loaded() -> None:
    """Names and kinds of the values, as programs read them."""
    asked = "race --policy social --requests 30 --speed 2 --jitter-seeds 2 --json --prefill 2 --decode 1"
    (row,) = json.loads(CliRunner().invoke(app, [*asked.split(), "--link-gb", "0"]).stdout)["rows"]
    kinds = {"policy": str, "default": bool, "within": float, "reused": float, "tpot_mean_s": float}
    kinds |= {f"ttft_{name}_s": float for name in ("mean", "p50", "p99")}
    assert {name: type(row[name]) for name in kinds} == kinds
    assert 0.0 < row["ttft_p50_s"] < row["ttft_p99_s"]
    assert 0.0 < row["tpot_mean_s"] < 0.1
    assert 0.0 <= row["reused"] < 1.0 >= row["within"] > 0.0
    (pooled,) = json.loads(CliRunner().invoke(app, [*asked.split(), "--link-gb", "100"]).stdout)["rows"]
    assert pooled["reused"] > row["reused"], "a pool holds what the instances have dropped"


def test_each_speed_is_raced_over_each_link_and_drawn() -> None:
    """A line per policy and link over the speeds; at one speed, over the links."""
    small = RequestSource(SHIPPED, requests=8)
    found = race(CLUSTER, small, Racers(["lmetric", "social"]), Courses((1.0, 3.0), (0.0, 6.0), 1), silent)
    courses = [(link, speed) for link in (0.0, 6.0) for speed in (1.0, 3.0)]
    assert [(row["link_gb"], row["speed"]) for row in found.rows[::2]] == courses
    assert list(found.chart.series) == [f"{name}, {link} GB/s" for link in (0, 6) for name in ("lmetric", "social")]
    assert [x for x, _ in found.chart.series["social, 0 GB/s"]] == [1.0, 3.0]
    over_links = race(CLUSTER, small, Racers(["social"]), Courses((3.0,), (6.0, 0.0), 1), silent)
    assert [x for x, _ in over_links.chart.series["social"]] == [0.0, 6.0]
    assert "missed" not in found.assumptions, "nothing to hold the default against"


@pytest.mark.parametrize(
    ("asked", "message"),
    [("--speed 1,a", "speed: is a number"), ("--speed 0", "speed: must be"), ("--link-gb 6,6", "link_gb: names a")],
)
def test_wrong_courses_are_refused(asked: str, message: str) -> None:
    found = CliRunner().invoke(app, ["race", "--policy", "lmetric", *asked.split()])
    assert found.exit_code != 0
    assert message in found.output + str(found.exception)


class TestMisses:
    """The default against the best of all rules, and against least own time."""

    def row(self, policy: str, mean_s: float, within: float = 1.0, slowdown: float = 2.0) -> dict[str, object]:
        place = {"decode_policy": "least_time", "speed": 1.9, "link_gb": 6.0}
        return {"policy": policy, "ttft_mean_s": mean_s, "within": within, "slowdown_p99": {"2k": slowdown}, **place}

    def test_figures_at_their_bounds_are_kept(self) -> None:
        others = [self.row("kvcache_centric", 5.0), self.row("preble", 4.0)]
        assert not misses([self.row("social", 4.08, 0.995, 2.04), *others])
        assert not misses([self.row("social", 9.0), self.row("preble", 4.0)]), "nothing to hold it against"

    def test_each_missed_figure_is_named(self) -> None:
        rows = [self.row("social", 4.09, 0.994, 2.05), self.row("kvcache_centric", 5.0), self.row("preble", 4.0)]
        assert misses(rows) == [
            "6 GB/s, 1.9 x: mean 4.09 s, preble 4.0 s",
            "6 GB/s, 1.9 x: within 0.994, kvcache_centric 1.0",
            "6 GB/s, 1.9 x: slowdown of 2k 2.05, kvcache_centric 2.0",
        ]


def test_sessions_of_agents_race_in_a_closed_loop() -> None:
    """As generated, by seed: the source says so."""
    source = RequestSource(seed=3, requests=30, sessions=2)
    assert [request.session.partition("/")[0] for request in source.read()].count("s0") > 0
    found = race(CLUSTER, source, Racers([DEFAULT_POLICY]), Courses(seeds=1), silent)
    assert found.assumptions["trace"] == "generated agents, seed 3, 2 sessions, first 30"
    assert float(str(found.rows[0]["reused"])) > 0.5, "turns find what their session had before"


def test_each_policy_races_with_each_policy_for_decode() -> None:
    racers = Racers(["lmetric", "social"], ["most_memory", "least_time"])
    rows = race(CLUSTER, SMALL, racers, Courses(seeds=1), silent).rows
    assert [(row["policy"], row["decode_policy"], row["default"]) for row in rows] == [
        ("lmetric", "most_memory", False),
        ("social", "most_memory", False),
        ("lmetric", "least_time", False),
        ("social", "least_time", True),
    ]
