"""The sample of keys that all statistics are taken from."""

from moonpool.kv.reuse_stats import KeySample
from tests.unit.kvstore.helpers import keys_of
from tests.unit.kvstore.invariants import check_sample

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
