"""Races of placement policies: arrivals by seed, links by speed, and rows over all seeds."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.eviction import SHIPPED
from moonpool.cli.simulate import app
from moonpool.engine.emulated.profile import load_profile
from moonpool.errors import ConfigError
from services.conductor.placement.policies import DEFAULT_POLICY
from simulator.cluster.config import ClusterConfig
from simulator.experiments.frame import RequestSource
from simulator.experiments.race import Racers, jittered, linked, race
from simulator.traces.mooncake import TraceRequest

CLUSTER = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=2, decode=1, kvstore=2, rate=2.0)
SMALL = RequestSource(SHIPPED, requests=40)


def silent(line: str) -> None:
    """Takes progress."""


def test_arrivals_move_within_the_grain_of_the_clock_by_seed() -> None:
    coarse = [TraceRequest(at, 10, 1, (number,)) for number, at in enumerate((0, 0, 3000, 3000, 9000))]
    moved = jittered(coarse, 7)
    assert moved == jittered(coarse, 7) != jittered(coarse, 8)
    assert [one.timestamp for one in moved] == sorted(one.timestamp for one in moved)
    late = {one.hash_ids[0]: one.timestamp - coarse[one.hash_ids[0]].timestamp for one in moved}
    assert all(0 <= by <= 3000 for by in late.values())
    assert len(set(late.values())) == 5
    assert jittered(coarse[:2], 7) == coarse[:2], "one instant has no grain"


def test_links_are_as_quick_as_asked_and_none_leave_own_caches_only() -> None:
    assert linked(CLUSTER, 6.2).load_bytes_per_s == 6.2e9
    alone = linked(CLUSTER, 0.0)
    assert (alone.kvstore, alone.peers, alone.copy_share) == (0, False, 0.0)


def test_a_row_has_the_requests_of_all_seeds() -> None:
    def mean(seed: int, seeds: int) -> float:
        (row,) = race(replace(CLUSTER, seed=seed), SMALL, Racers([DEFAULT_POLICY]), seeds, silent).rows
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
    assert all(row.keys() == names | figures for row in result["rows"])
    assert result["assumptions"]["links"] == "none: own caches only"


def test_each_policy_races_with_each_policy_for_decode() -> None:
    rows = race(CLUSTER, SMALL, Racers(["lmetric", "social"], ["most_memory", "least_time"]), 1, silent).rows
    assert [(row["policy"], row["decode_policy"], row["default"]) for row in rows] == [
        ("lmetric", "most_memory", False),
        ("social", "most_memory", False),
        ("lmetric", "least_time", False),
        ("social", "least_time", True),
    ]
