"""Samples of keys, hit curves and return rates."""

import pytest

from benchmarks.eviction import SHIPPED, read_chains
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.reuse_stats import EVIDENCE, KeySample, ReturnRates, ReuseSample, age_bin
from moonpool.cli.kvstore import hit_share
from moonpool.kvstore.eviction.policies import LRU
from moonpool.simulator.eviction import Pool
from tests.unit.kvstore.helpers import keys_of
from tests.unit.kvstore.invariants import check, check_sample

KEYS = keys_of(2000)


def test_all_keys_belong_to_a_sample_that_is_not_full() -> None:
    sample: KeySample[int] = KeySample(2000)
    assert not any(sample.put(key, 0) for key in KEYS)
    assert (sample.rate, len(sample)) == (1.0, 2000)


def test_a_full_sample_halves_its_rate_and_keeps_the_keys_below() -> None:
    sample: KeySample[int] = KeySample(100)
    for number, key in enumerate(KEYS):
        if sample.accepts(key):
            sample.put(key, number)
        check_sample(sample)
    assert sample.rate in (1 / 16, 1 / 32, 1 / 64)
    assert list(sample) == [key for key in KEYS if sample.accepts(key)], "none that belongs to it was lost"
    assert len(sample) > 20


def test_values_are_in_the_order_they_were_put() -> None:
    sample: KeySample[int] = KeySample(10)
    for number in (0, 1, 2, 0):
        sample.put(KEYS[number], number)
    assert list(sample.values()) == [1, 2, 0]


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


def test_ages_are_in_intervals_of_half_an_octave() -> None:
    assert [age_bin(age) for age in (0, 255, 256, 362, 363, 511, 512, 724, 725)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert age_bin(1 << 60) == age_bin(1 << 50)


def rates_of(plan: dict[int, tuple[int, int]], age: int = 100, kinds: int = 3) -> ReturnRates:
    """{kind: (keys, how many of them come back at `age`)}; then all is left alone for as long again."""
    rates = ReturnRates(kinds)
    keys = {kind: keys_of(count, f"kind {kind}") for kind, (count, _) in plan.items()}
    for kind in plan:
        for key in keys[kind]:
            rates.used(key, kind, 0)
    for kind, (_, back) in plan.items():
        for key in keys[kind][:back]:
            rates.used(key, kind, age)
    check(rates)
    rates.fit(2 * age)
    return rates


def test_nothing_seen_is_worth_nothing_at_any_age() -> None:
    rates = ReturnRates(3)
    rates.fit(1000)
    assert [rates.worth(kind, age) for kind in range(6) for age in (0, 300, 1 << 40)] == [0.0] * 18


def test_one_class_is_worth_what_came_back_over_the_time_spent() -> None:
    rates = rates_of({1: (200, 100)})
    time = 100 * 100 + 100 * 200 + 100 * 100  # came back; stayed away; again since
    rate = 100 / time * 100 / (100 + EVIDENCE)
    expected = rate * time
    assert rates.worth(1, 0) == pytest.approx(rate * (100 + EVIDENCE) / (expected + EVIDENCE))
    assert rates.worth(2, 0) == pytest.approx(rate)
    assert rates.worth(1, 1000) == 0.0


def test_a_class_that_comes_back_is_worth_more_than_one_that_does_not() -> None:
    rates = rates_of({1: (300, 200), 2: (300, 10)})
    assert rates.worth(1, 50) > 5 * rates.worth(2, 50)
    assert rates.worth(0, 50) == rates.worth(1, 50), "what is not known yet counts as the best"


def test_what_a_mark_means_is_learnt_from_all_classes_first() -> None:
    """Marked blocks of class 1 do not come back; those of class 2 were never seen."""
    rates = rates_of({1: (300, 200), 2: (300, 200), 4: (300, 0)})
    assert rates.worth(5, 0) < rates.worth(2, 0) / 2
    assert rates.worth(4, 0) < rates.worth(5, 0)


def test_the_worth_never_rises_with_the_age() -> None:
    rates = ReturnRates(1)
    for key in keys_of(200):
        rates.used(key, 0, 0)
    for key in keys_of(200)[:150]:
        rates.used(key, 0, 5000)
    rates.fit(6000)
    worth = [rates.worth(0, age) for age in range(0, 20000, 50)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] == worth[4000 // 50] > 0, "one that is not due yet is worth what it will be"


def test_the_class_of_a_block_can_be_told_later() -> None:
    late, soon = ReturnRates(2), ReturnRates(2)
    for key in keys_of(100):
        late.used(key, 0, 0)
        late.classify(key, 1)
        soon.used(key, 1, 0)
    late.classify(BlockKey(bytes(32)), 1)  # none of the sample
    for rates in (late, soon):
        for key in keys_of(50):
            rates.used(key, 1, 300)
        rates.fit(400)
    assert late.worth(1, 0) == soon.worth(1, 0) > 0


def test_the_sample_is_bounded_and_thinning_keeps_rates() -> None:
    whole, thin = ReturnRates(1, sample_keys=4096), ReturnRates(1, sample_keys=256)
    for rates in (whole, thin):
        for now in (0, 400, 800):
            for key in keys_of(2000):
                rates.used(key, 0, now)
            check(rates)
        rates.fit(1000)
    assert thin.sample.rate < 1 / 4
    # Evidence counts for more where there are fewer keys.
    assert thin.worth(0, 0) == pytest.approx(whole.worth(0, 0), rel=0.2)


def test_what_was_long_ago_is_forgotten() -> None:
    rates = ReturnRates(1)
    for key in keys_of(100):
        rates.used(key, 0, 0)
    for key in keys_of(100):
        rates.used(key, 0, 100)
    rates.fit(100)
    before = rates.worth(0, 0)
    assert before > 0
    for _ in range(20):
        rates.forget(200, horizon=1000)
    rates.fit(200)
    assert 0 < rates.worth(0, 0) < before / 100
    assert len(rates.sample) == 100
    rates.forget(5000, horizon=1000)
    assert not rates.sample
    check(rates)
