"""Hit shares of all policies: exactly on the shipped trace, and beside the published table on the public one.

The public trace is taken from the folder that MOONPOOL_TRACES names; tests that need it are skipped without it.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import eviction
from benchmarks.eviction import SHIPPED, read_chains, trace_file
from benchmarks.frame import Skipped, run
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.eviction.policies import POLICIES
from moonpool.simulator.eviction import Pool, optimum, replay
from moonpool.simulator.experiments.prefix_caching import BLOCKS, COMPARED, Chains, chains_in
from moonpool.simulator.traces.mooncake import TraceRequest, read_trace, write_trace
from moonpool.simulator.traces.workload import Workload
from tests.unit.kvstore.invariants import check

# The shipped trace: hits at each capacity

CAPACITIES = (0, 3000, 1000, 300)
REFERENCES = {"full": 23813, "all": 25013}
HITS = {
    "full": {
        "lru": [8522, 7211, 6018, 4928],
        "lfu": [8522, 7303, 6137, 5785],
        "length-aware": [8522, 6944, 6114, 5794],
        "s3-fifo": [8522, 7478, 6384, 5888],
        "kv-aware": [8522, 7486, 6087, 5587],
        "lru-head-first": [8522, 7211, 6018, 4858],
        "optimum": [8522, 8522, 8522, 7368],
    },
    "all": {
        "lru": [8522, 7134, 5981, 4855],
        "lfu": [8522, 7201, 6124, 5773],
        "length-aware": [8522, 6874, 6089, 5790],
        "s3-fifo": [8522, 7408, 6299, 5888],
        "kv-aware": [8522, 7364, 6048, 5564],
        "lru-head-first": [8522, 7133, 5961, 4802],
        "optimum": [8522, 8522, 8522, 7368],
    },
}


def hits(name: str, chains: Chains, capacity: int) -> int:
    if name == "optimum":
        return round(optimum(chains, capacity) * sum(map(len, chains)))
    pool = Pool(COMPARED[name](), capacity)
    for chain in chains:
        pool.request(chain)
    check(pool.policy)
    assert len(list(pool.policy.candidates())) <= (capacity or pool.references)
    return pool.hits


SLOW = [("kv-aware", "all"), ("kv-aware", "full"), *((name, "all") for name in ("lfu", "length-aware", "s3-fifo"))]
"""As `full` shows what they do; the benchmark's test has `kv-aware` at 1000 blocks."""


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ())
        for case in itertools.product([*COMPARED, "optimum"], BLOCKS)
    ],
)
def test_hits_on_the_shipped_trace(name: str, blocks: str) -> None:
    chains = read_chains(SHIPPED, blocks)
    assert sum(map(len, chains)) == REFERENCES[blocks]
    assert [hits(name, chains, capacity) for capacity in CAPACITIES] == HITS[blocks][name]


def test_only_full_blocks_are_referred_to() -> None:
    requests = [
        TraceRequest(0.0, 1024, 1, (1, 2)),
        TraceRequest(1.0, 1025, 1, (1, 2, 3)),
        TraceRequest(2.0, 3, 1, (4,)),
    ]
    assert [len(chain) for chain in chains_in(requests)] == [2, 2, 0]
    assert [len(chain) for chain in chains_in(requests, "all")] == [2, 3, 1]


def test_tenants_share_no_block() -> None:
    nobody, ann, again = chains_in([TraceRequest(0.0, 1024, 1, (1, 2), tenant) for tenant in ("", "ann", "ann")])
    assert ann == again
    assert set(nobody).isdisjoint(ann)


def test_the_shipped_trace_is_what_its_generator_makes(tmp_path: Path) -> None:
    requests = Workload(1).requests(1200)
    write_trace(tmp_path / "again.jsonl", requests)
    assert (tmp_path / "again.jsonl").read_bytes() == SHIPPED.read_bytes()
    assert read_trace(SHIPPED) == requests


# The public trace: hit shares at each capacity

PUBLIC_CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 1_000)
PUBLISHED = {
    "lru-head-first": (0.3664, 0.3637, 0.3546, 0.3257, 0.2112, 0.0445),
    "lru": (0.3664, 0.3637, 0.3546, 0.3257, 0.2116, 0.0445),
    "lfu": (0.3664, 0.3631, 0.3438, 0.2759, 0.1318, 0.0481),
    "length-aware": (0.3664, 0.3345, 0.2602, 0.2028, 0.1123, 0.0504),
    "s3-fifo": (0.3664, None, 0.3430, 0.2864, 0.2094, 0.0642),
    "optimum": (0.3664, 0.3664, 0.3664, 0.3664, 0.3664, 0.1907),
}
"""Of all block references, the part-filled last ones included."""
FULL = {
    "lru": (0.3819, 0.3795, 0.3715, 0.3448, 0.2243, 0.0470),
    "lfu": (0.3819, 0.3792, 0.3605, 0.2878, 0.1376, 0.0502),
    "length-aware": (0.3819, 0.3539, 0.2791, 0.2180, 0.1219, 0.0527),
    "s3-fifo": (0.3819, 0.3792, 0.3603, 0.3031, 0.2200, 0.0747),
    "kv-aware": (0.3819, 0.3798, 0.3714, 0.3481, 0.2305, 0.0551),
    "optimum": (0.3819, 0.3819, 0.3819, 0.3819, 0.3819, 0.1988),
}
"""Of full blocks: what a store can hold, and what docs/measured/eviction.md shows."""


def test_the_default_is_lru_as_no_policy_is_best_at_every_size() -> None:
    best = [max(column) for column in zip(*(FULL[name] for name in POLICIES), strict=True)]
    assert not [name for name in POLICIES if list(FULL[name]) == best]
    assert KVStoreConfig.model_fields["eviction"].default == "lru"


@pytest.fixture(scope="module", params=["full", "all"])
def public(request: pytest.FixtureRequest) -> Iterator[tuple[str, Chains]]:
    try:
        yield request.param, read_chains(trace_file(None), request.param)
    except Skipped as reason:
        pytest.skip(str(reason))


def agrees(name: str, blocks: str, chains: Chains, capacity: int) -> bool:
    expected = (FULL if blocks == "full" else PUBLISHED)[name][PUBLIC_CAPACITIES.index(capacity)]
    share = optimum(chains, capacity) if name == "optimum" else replay(chains, COMPARED[name](), capacity)
    return expected is None or round(share, 4) == expected


def test_the_table_at_10000_blocks_on_the_public_trace(public: tuple[str, Chains]) -> None:
    blocks, chains = public
    names = [name for name in (FULL if blocks == "full" else PUBLISHED) if name != "kv-aware"]  # it takes ten seconds
    assert all(agrees(name, blocks, chains, 10_000) for name in names)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capacity", PUBLIC_CAPACITIES)
def test_the_whole_table_on_the_public_trace(capacity: int, public: tuple[str, Chains]) -> None:
    blocks, chains = public
    for name in FULL if blocks == "full" else PUBLISHED:
        assert agrees(name, blocks, chains, capacity), name


# The benchmark


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run("eviction", eviction.measure, [*argv, "--json"], flags=eviction.flags)
    return json.loads(capsys.readouterr().out)


def test_the_benchmark_compares_every_policy_on_full_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--traces", "shipped", "--capacities", "1000,1000000", "--sessions", "0")["rows"]
    found = {row["name"]: round(row["value"] * REFERENCES["full"]) for row in rows}
    assert found == {f"shipped, 1000 blocks, {name}": hits[2] for name, hits in HITS["full"].items()}


def test_the_benchmark_names_the_trace_it_does_not_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(eviction.TRACES_VARIABLE, raising=False)
    small = ("--policies", "lru", "--capacities", "300", "--sessions", "0")
    found = report(capsys, *small, "--traces", "conversation,shipped")
    assert [row["name"] for row in found["rows"]] == ["shipped, 300 blocks, lru", "shipped, 300 blocks, optimum"]
    assert "MOONPOOL_TRACES" in found["not_measured"][0]["reason"]
    missing = report(capsys, *small, "--traces", "conversation", "--trace", "no/such/file")
    assert "no/such/file" in missing["not_measured"][0]["reason"]


@pytest.mark.parametrize("flag", ["--policies=lru,nice", "--traces=mine", "--capacities=0", "--capacities=ten"])
def test_the_benchmark_refuses_wrong_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report(capsys, flag)
    assert flag.split("=")[0] in capsys.readouterr().err
