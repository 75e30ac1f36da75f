"""The table of known policies, and what ours is worth, on the public trace; needs it: MOONPOOL_TRACES, or a skip."""

import json
from typing import Any

import pytest

from benchmarks import eviction
from benchmarks.eviction import COMPARED, OURS, read_chains, trace_file
from benchmarks.frame import Skipped, run
from benchmarks.replay import optimum, replay
from moonpool.kv.keys import BlockKey

CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 1_000)
KNOWN = {
    "lru-head-first": (0.3664, 0.3637, 0.3546, 0.3257, 0.2112, 0.0445),
    "lru": (0.3664, 0.3637, 0.3546, 0.3257, 0.2116, 0.0445),
    "lfu": (0.3664, 0.3631, 0.3438, 0.2759, 0.1318, 0.0481),
    "length-aware": (0.3664, 0.3345, 0.2602, 0.2028, 0.1123, 0.0504),
    "s3-fifo": (0.3664, None, 0.3430, 0.2864, 0.2094, 0.0642),
}
OPTIMUM = (0.3664, 0.3664, 0.3664, 0.3664, 0.3664, 0.1907)
GAIN = {30_000: 0.005, 10_000: 0.005}
"""What our policy is to win over LRU at least."""


@pytest.fixture(scope="module")
def chains() -> list[list[BlockKey]]:
    try:
        return read_chains(trace_file(None))
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KNOWN)
def test_the_known_policies_give_the_table(name: str, chains: list[list[BlockKey]]) -> None:
    for capacity, share in zip(CAPACITIES, KNOWN[name], strict=True):
        if share is not None:
            assert round(replay(chains, COMPARED[name](), capacity), 4) == share, capacity


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_optimum_gives_the_table(chains: list[list[BlockKey]]) -> None:
    assert tuple(round(optimum(chains, capacity), 4) for capacity in CAPACITIES) == OPTIMUM


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_ours_wins_where_it_is_to_and_loses_nowhere(capacity: int, chains: list[list[BlockKey]]) -> None:
    gain = replay(chains, COMPARED[OURS](), capacity) - replay(chains, COMPARED["lru"](), capacity)
    assert gain >= GAIN.get(capacity, -eviction.ALLOWED_LOSS)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run("eviction", eviction.measure, [*argv, "--json"], flags=eviction.flags)
    return json.loads(capsys.readouterr().out)


def test_the_benchmark_prints_shares_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--generated", "--policies", "lru,s3-fifo", "--capacities", "1000,inf")["rows"]
    found = {row["name"]: round(row["value"], 4) for row in rows}
    assert found == {
        "optimum, 1000 blocks": 0.3407,
        "lru, 1000 blocks": 0.2391,
        "lru, 1000 blocks, place": 0.0,
        "s3-fifo, 1000 blocks": 0.2518,
        "s3-fifo, 1000 blocks, place": 0.1251,
        "optimum, no bound": 0.3407,
        "lru, no bound": 0.3407,
        "lru, no bound, place": 1.0,
        "s3-fifo, no bound": 0.3407,
        "s3-fifo, no bound, place": 1.0,
    }


def test_the_benchmark_says_that_it_needs_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONPOOL_TRACES", raising=False)
    assert "MOONPOOL_TRACES" in report(capsys)["skipped"]
    assert "no/such/file" in report(capsys, "--trace", "no/such/file")["skipped"]


@pytest.mark.parametrize("flag", ["--policies=lru,nice", "--capacities=0", "--capacities=ten"])
def test_the_benchmark_refuses_wrong_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report(capsys, "--generated", flag)
    assert flag.split("=")[0] in capsys.readouterr().err
