"""The sampled hit curve beside LRU itself."""

import pytest

from benchmarks.eviction import SHIPPED, read_chains
from moonpool.cli.kvstore import hit_share
from moonpool.kv.keys import BlockKey
from moonpool.kv.reuse_stats import ReuseSample
from services.kvstore.eviction.policies import LRU
from simulator.eviction import Pool
from tests.unit.kvstore.helpers import keys_of
from tests.unit.kvstore.invariants import check

A, B, C = keys_of(3)


@pytest.fixture(scope="module")
def generated() -> list[list[BlockKey]]:
    return read_chains(SHIPPED, "all")


def test_nothing_observed_gives_no_curve() -> None:
    sample = ReuseSample()
    assert sample.curve() == []
    assert hit_share(sample.curve(), 1e12) == 0.0
    check(sample)


def test_distances_are_those_of_a_stack() -> None:
    sample = ReuseSample()
    for key in (A, A, B, C, A, B):
        sample.observe([key])
    check(sample)
    # A at once: 1; A after B and C: 3; B after C and A: 3. Three of six uses are first ones.
    assert sample.curve() == [(1, 1 / 6), (3, 3 / 6)]


def test_a_chain_counts_as_used_tail_first() -> None:
    sample = ReuseSample()
    sample.observe([A, B, C])
    sample.observe([A, B, C])
    assert sample.curve() == [(3, 3 / 6)]
    sample.observe([A])
    assert hit_share(sample.curve(), 1) == 1 / 7


def test_the_full_sample_is_exact_lru(generated: list[list[BlockKey]]) -> None:
    sample = ReuseSample(sample_keys=1 << 20)
    for chain in generated:
        sample.observe(chain)
    curve = sample.curve()
    assert sample.last_uses.rate == 1.0
    for size in (300, 1000, 3000, 10000, 30000):
        assert hit_share(curve, size) == pytest.approx(lru(generated, size), abs=0.004)


def test_a_sample_of_a_tenth_is_near(generated: list[list[BlockKey]]) -> None:
    sample = ReuseSample(sample_keys=1500)
    for chain in generated:
        sample.observe(chain)
    check(sample)
    assert sample.last_uses.rate < 0.12
    errors = [abs(hit_share(sample.curve(), size) - lru(generated, size)) for size in range(500, 12000, 500)]
    assert sum(errors) / len(errors) < 0.012
    assert max(errors) < 0.025
    assert sample.uses == sum(map(len, generated))


def lru(chains: list[list[BlockKey]], capacity: int) -> float:
    pool = Pool(LRU(), capacity)
    for chain in chains:
        pool.request(chain)
    return pool.hit_share


def test_the_sample_is_bounded_whatever_comes() -> None:
    sample = ReuseSample(sample_keys=16)
    for turn in range(3):
        for key in keys_of(500):
            sample.observe([key])
        check(sample)
        assert len(sample.last_uses) <= 16, turn
    assert sample.curve()[-1][1] == pytest.approx(2 / 3, abs=0.05)
