"""Experiments: exact results of small ones, the published table where the trace is, the same bytes in every process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from benchmarks.eviction import SHIPPED, trace_file
from benchmarks.frame import Skipped
from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.cli.main import app
from moonpool.cli.simulate import app as experiments
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.faults import faults
from moonpool.simulator.experiments.frame import RequestSource, Result, Row
from moonpool.simulator.experiments.memory import MemoryLoad, memory
from moonpool.simulator.experiments.prefix_caching import REST, HotLoad, cache, hot, paper_line, transfer, ttft_s
from moonpool.simulator.experiments.serving import ratio, scale, scheduling
from tests.unit.simulator.cluster.rig import PROFILE

SMALL = RequestSource(SHIPPED, requests=60)
CLUSTER = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=2, decode=1, kvstore=2, rate=2.0)


def silent(line: str) -> None:
    """Takes progress."""


def by(result: Result, name: str) -> dict[Any, Any]:
    return {row[name]: row for row in result.rows}


def test_hit_shares_of_the_shipped_trace() -> None:
    """The same hits as the benchmark of the policies has (tests/unit/kvstore/eviction/test_table.py)."""
    result = cache(RequestSource(SHIPPED), silent, ["lru", "s3-fifo", "optimum"], [0, 1000, 300], "full")
    expected = {"inf": (8522, 8522, 8522), 1000: (6018, 6384, 8522), 300: (4928, 5888, 7368)}
    assert result.rows == [
        {"capacity": size, **{n: round(h / 23813, 4) for n, h in zip(("lru", "s3-fifo", "optimum"), hits, strict=True)}}
        for size, hits in expected.items()
    ]
    assert [x for x, _ in result.chart.series["lru"]] == [300.0, 1000.0]


@pytest.mark.parametrize(("policies", "blocks"), [(["nice"], "all"), (["lru"], "some")])
def test_unknown_names_are_refused(policies: list[str], blocks: str) -> None:
    with pytest.raises(ConfigError):
        cache(SMALL, silent, policies, [0], blocks)


def test_four_digits_of_the_published_table() -> None:
    """At 10,000 blocks of the public trace; the whole table: tests/unit/kvstore/eviction/test_table.py."""
    try:
        path = trace_file(None)
    except Skipped as reason:
        pytest.skip(str(reason))
    policies = ["lru", "lru-head-first", "lfu", "length-aware", "s3-fifo", "optimum"]
    (row,) = cache(RequestSource(path), silent, policies, [10_000]).rows
    shares = (0.2116, 0.2112, 0.1318, 0.1123, 0.2094, 0.3664)
    assert row == {"capacity": 10_000, **dict(zip(policies, shares, strict=True))}


def test_scheduling_by_all_there_is_known_beats_by_less() -> None:
    policies = ("kvcache_centric", "cache_aware", "random")
    found = by(scheduling(CLUSTER, SMALL, silent, policies), "policy")
    means = [found[policy]["ttft_mean_s"] for policy in policies]
    assert means == sorted(means)
    assert found["kvcache_centric"]["reused_share"] > found["random"]["reused_share"]


def test_every_division_of_the_instances() -> None:
    result = ratio(CLUSTER, SMALL, silent)
    assert [(row["prefill"], row["decode"]) for row in result.rows] == [(1, 2), (2, 1)]
    first, second = (row["ttft_mean_s"] for row in result.rows)
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert second < first
    with pytest.raises(ConfigError, match="first: must leave at least two divisions of 3 instances, is 2"):
        ratio(CLUSTER, SMALL, silent, 2)


def test_scale_tells_all_of_one_run() -> None:
    (row,) = scale(CLUSTER, SMALL, silent).rows
    assert row["requests"] == 60
    assert row["outcomes"] == {"done": 60}
    assert row == scale(CLUSTER, SMALL, silent).rows[0]


def test_when_loading_pays() -> None:
    """Computing takes a millisecond a token; loading takes as long when a token's 100 bytes take a millisecond.

    What is computed after the prefix overlaps with loading, but for one layer of four: so slower links pay, too.
    """
    assert ttft_s(PROFILE, 2048, 0.0) == pytest.approx(2.560)
    assert ttft_s(PROFILE, 2048, 1e6) == pytest.approx(0.512 + 0.2048 / 4)  # the first layer, then the computation
    found = transfer(PROFILE, silent, [2048, 8192])
    for row in found.rows:
        prefix = row["prefix_tokens"]
        assert isinstance(prefix, int)
        seconds = (prefix + REST - REST / 4) * 0.001
        assert row["simulated_gb_per_s"] == pytest.approx(prefix * 100 / seconds / 1e9, rel=1e-3)
    assert found.rows[1]["paper_gb_per_s"] == pytest.approx(1e-4, rel=1e-3)  # at 8192 tokens the line is calibrated


def test_the_papers_line() -> None:
    """Reference: about 6 GB/s at 8,192 tokens on 8 x A800 (8 x 312e12 operations a second)."""
    assert paper_line(load_profile("llama-70b-a800"), 8192, 8 * 312e12) == pytest.approx(6e9, rel=0.05)


def test_hot_prefixes_spread_by_being_loaded() -> None:
    """Where all are computed again at each instance, first tokens come later."""
    config = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=4, decode=2, kvstore=0)
    load = HotLoad(requests=150, rate_per_s=6.0)
    found = by(hot(config, load, silent), "spread by")
    none, loading, copies = (found[name] for name in ("none", "loading", "loading and copies"))
    assert none["loaded_blocks"] == none["copied_blocks"] == loading["copied_blocks"] == 0
    assert loading["loaded_blocks"] > 0
    # Without loading, prompts wait for the one that holds.
    assert loading["reused_share"] >= none["reused_share"] - 0.01
    assert max(loading["ttft_mean_s"], copies["ttft_mean_s"]) < none["ttft_mean_s"]


def test_what_hot_load_sends() -> None:
    """Nineteen of twenty begin with one of the prefixes; all other blocks come once."""
    load = HotLoad(requests=400, prefixes=3, prefix_tokens=1024, question_tokens=600)
    asked = list(load.arrivals())
    hot_ones = [each for each in asked if each.hash_ids[0] < 6]
    assert 0.9 < len(hot_ones) / len(asked) < 0.99
    assert {hot_one.hash_ids[:2] for hot_one in hot_ones} == {(0, 1), (2, 3), (4, 5)}
    own = [key for each in asked for key in each.hash_ids if key >= 6]
    assert len(own) == len(set(own))
    assert {(each.input_length, len(each.hash_ids)) for each in asked} == {(1624, 4)}
    with pytest.raises(ConfigError, match="prefix_tokens"):
        HotLoad(prefix_tokens=100)


def test_ways_of_filling_the_pool() -> None:
    load = MemoryLoad(requests=200, pool_blocks=400, prompt_tokens=200, answer_tokens=200, max_tokens=4096)
    found = by(memory(load_profile("llama-70b-a800"), load, silent), "mode")
    before, growing = found["preallocation"], found["on demand"]
    assert before["most_sequences"] == 400 // -(-(200 + 4096) // DEFAULT_BLOCK_SIZE)
    assert growing["mean_sequences"] > 3 * before["mean_sequences"]
    assert before["slots_without_token"] > 0.85
    assert growing["slots_without_token"] < 0.15
    assert found["tight, swap"]["swapped"] > 0 == found["tight, swap"]["recomputed_tokens"]
    assert found["tight, recompute"]["recomputed_tokens"] > 0 == found["tight, recompute"]["swapped"]
    assert found["n = 8, prompt shared"]["mean_sequences"] > found["n = 8, each its own prompt"]["mean_sequences"]
    assert found["uncrowded"]["preempted"] == 0


def all_ended(row: Row, requests: int) -> None:
    """With all tokens, also of several answers."""
    assert row["requests"] == requests == row["ended: done"]


def test_faults_of_twenty_seeds() -> None:
    (row,) = faults(ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=2, decode=2, kvstore=1), 20, 1,
                    silent, RequestSource(requests=5)).rows  # fmt: skip
    all_ended(row, 20 * 5)
    assert all(int(str(row[name])) > 5 for name in ("dropped", "late", "crashes"))
    assert int(str(row["attempts"])) > 20 * 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1, 10_001, 1000))
def test_faults_of_ten_thousand_seeds(first: int) -> None:
    """A thousand at a time: some minutes each on a free core."""
    config = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=3, decode=3, kvstore=2)
    (row,) = faults(config, 1000, first, silent, RequestSource()).rows
    all_ended(row, 40_000)


# The command

ROOT = Path(__file__).resolve().parents[4]


def without_trace() -> dict[str, str]:
    """The environment of a process that finds the code here, and no trace."""
    return {name: value for name, value in os.environ.items() if name != "MOONPOOL_TRACE"} | {"PYTHONPATH": str(ROOT)}


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool.cli.main", "simulate", *args],
        env=without_trace(), capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip


SMALL_CLUSTER = ("--prefill", "2", "--decode", "2", "--kvstore", "1")
TINY = (
    ("cache", "--requests", "200", "--capacities", "inf,100"),
    ("scale", "--requests", "16", "--prefill", "3", "--decode", "2", "--kvstore", "2", "--rate", "2"),
    ("scheduling", "--requests", "8", *SMALL_CLUSTER),
    ("race", "--requests", "5", "--policy", "kvcache_centric,social", *SMALL_CLUSTER),
    ("ratio", "--requests", "8", "--instances", "4", "--kvstore", "1"),
    ("overload", "--requests", "12", *SMALL_CLUSTER),
    ("pipeline", "--requests", "2"),
    ("scaling", "--requests", "20", "--most", "3", "--counts", "4/32", *SMALL_CLUSTER),
    ("roles", "--machines", "4", "--part-s", "60", "--parts", "2", "--reading-per-s", "0.2", "--talking-per-s", "0.5"),
    ("engines", "--requests", "8", "--machines", "2", "--chunks", "512", "--continuous", "2"),
    ("conductors", "--requests", "8", *SMALL_CLUSTER, "--crash-s", "2"),
    ("transfer",),
    ("memory", "--requests", "16", "--pool-blocks", "150", "--max-tokens", "1024"),
    ("hot", "--requests", "16", *SMALL_CLUSTER),
    ("faults", "--requests", "6", "--seeds", "2"),
)
ALL_OF_THEM = """
import json, sys
from moonpool.cli.simulate import app
for args in json.loads(sys.argv[1]):
    app([*args, "--json"], standalone_mode=False)
    print("---")
"""


AGAIN = ("cache", "scale", "overload", "conductors", "faults")
"""Experiments that `make test` runs twice."""


@pytest.mark.parametrize("again", [AGAIN, pytest.param([args[0] for args in TINY], marks=pytest.mark.slow)])
def test_two_runs_of_an_experiment_give_the_same_bytes_under_any_hash_seed(again: Sequence[str]) -> None:
    assert {args[0] for args in TINY} | {"replay"} == set(get_group(experiments).commands)  # which reads a journal
    asked = {"1": TINY, "77": [args for args in TINY if args[0] in again]}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ALL_OF_THEM, json.dumps(asked[seed])],
            env=without_trace() | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for seed in asked
    ]  # fmt: skip
    (first, said), (second, other) = (run.communicate() for run in runs)
    assert [run.returncode for run in runs] == [0, 0], said + other
    value, two = (dict(zip([args[0] for args in each], told.split("---\n"), strict=False))
                for each, told in ((asked["1"], first), (asked["77"], second)))  # fmt: skip
    assert all(json.loads(text)["rows"] for text in value.values())
    assert two == {name: value[name] for name in two}
    assert len(two) == len(again)
    assert said.count("of wall-clock") == len(TINY)
    assert "wall" not in first


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "cache.svg"
    done = simulate("cache", "--requests", "200", "--capacities", "inf,100", "--policies", "lru,lfu", "--picture",
                    str(picture))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "capacity  lru" in done.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("scale", "--trace", "nowhere.jsonl"), "nowhere.jsonl"),
        (("scale", "--profile", "abacus"), "no profile 'abacus'"),
        (("scale", "--policy", "nice"), "no policy 'nice'"),
        (("cache", "--capacities", "0"), "positive whole number or inf"),
        (("plans",), "No such command"),
        (("pipeline", "--machines", "12"), "machines: must be a multiple of 8"),
    ],
)
def test_wrong_flags_are_refused(args: tuple[str, ...], message: str) -> None:
    done = CliRunner(env={"MOONPOOL_TRACE": None}).invoke(app, ["simulate", *args])
    assert done.exit_code
    assert message in (str(done.exception) if isinstance(done.exception, MoonpoolError) else done.stderr)
    assert done.stdout == ""


def test_a_bad_trace_is_refused_with_file_and_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 3, "input_length": 600, "output_length": 2, "hash_ids": [1]}\n')
    done = CliRunner(env={"MOONPOOL_TRACE": None}).invoke(app, ["simulate", "scale", "--trace", str(bad)])
    assert isinstance(done.exception, MoonpoolError)
    assert str(done.exception) == f"{bad}, line 1: 600 tokens are 2 blocks of 512, hash_ids has 1"
