"""The sampled curve beside exact LRU."""

import collections
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kv.keys import BlockKey, block_keys
from services.kvstore.reuse import ReuseCurve, hit_share_at

SEED = 20_26


def key(number: int) -> BlockKey:
    return block_keys(bytes(32), [number] * 16, 16)[0]


def chains(count: int) -> Iterator[list[BlockKey]]:
    """Conversations that come back, the recent ones more often."""
    generator = random.Random(SEED)
    keys = [key(number) for number in range(4000)]
    known: list[list[BlockKey]] = []
    for _ in range(count):
        if known and generator.random() < 0.6:
            chain = known[max(0, len(known) - 1 - int(generator.expovariate(1 / 60)))]
        else:
            begin = generator.randrange(len(keys) - 8)
            chain = keys[begin : begin + generator.randrange(1, 8)]
            known.append(chain)
        yield chain


def exact(capacity: int, requests: list[list[BlockKey]]) -> float:
    """Hit share of a plain LRU, block by block, tails first."""
    held: collections.OrderedDict[BlockKey, None] = collections.OrderedDict()
    hits = references = 0
    for chain in requests:
        for item in reversed(chain):
            references += 1
            if item in held:
                hits += 1
                held.move_to_end(item)
            else:
                held[item] = None
                if len(held) > capacity:
                    held.popitem(last=False)
    return hits / references


@pytest.mark.parametrize(("size", "tolerance"), [(10_000, 0.035), (600, 0.05)])
def test_it_is_close_to_exact(size: int, tolerance: float) -> None:
    """All blocks followed (what is left is the buckets' width), and about one in six."""
    requests = list(chains(6000))
    curve = ReuseCurve(size)
    for chain in requests:
        curve.observe(chain)
    curve.check_invariants()
    assert curve.followed <= size
    points = curve.curve()
    for capacity in (50, 100, 200, 400, 800, 1600, 3200):
        assert hit_share_at(points, capacity) == pytest.approx(exact(capacity, requests), abs=tolerance), capacity


def test_exact_distances() -> None:
    curve = ReuseCurve(100)
    a, b, c = (key(number) for number in range(3))
    for chain in ([a], [b], [a], [c], [a], [b]):
        curve.observe(chain)
    # a comes back after one other block twice: two blocks hold it. b after two others: three blocks do.
    assert [(point.blocks, point.hit_share) for point in curve.curve()] == [(2, 2 / 6), (4, 3 / 6)]
    assert (curve.rate, curve.references, curve.followed) == (1.0, 6, 3)


def test_nothing_asked_for_is_no_curve() -> None:
    assert ReuseCurve().curve() == []
    assert hit_share_at([], 10) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True), max_size=60), st.integers(1, 20))
def test_the_books_agree(requests: list[list[int]], size: int) -> None:
    curve = ReuseCurve(size)
    for chain in requests:
        curve.observe([key(number) for number in chain])
        curve.check_invariants()
    shares = [point.hit_share for point in curve.curve()]
    assert shares == sorted(shares)
    assert all(0.0 <= share <= 1.0 for share in shares)
