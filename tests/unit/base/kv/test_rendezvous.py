"""Rendezvous hashing: shares, what moves, and that every process draws the same."""

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from blake3 import blake3

from moonpool.base.kv.rendezvous import draw, ranked, score

SEED = 20_26
CHAINS = 10_000
GOLDEN = ["0x1.b37a7d5873546p-2", "0x1.726388d810394p-3"]


def chain_keys(count: int = CHAINS) -> list[bytes]:
    return [blake3(f"{SEED}/{number}".encode()).digest() for number in range(count)]


def places(count: int) -> dict[str, float]:
    return {f"kvstore-{number}": 1.0 for number in range(count)}


def within(count: int, expected: float, total: int) -> bool:
    """Within five standard deviations of a binomial."""
    share = expected / total
    return abs(count - expected) < 5 * math.sqrt(total * share * (1 - share))


def test_golden_draws() -> None:
    """Other processes, machines and versions must draw the same."""
    keys = chain_keys(2)
    assert [draw(key, "kvstore-0").hex() for key in keys] == GOLDEN
    code = (
        "from moonpool.base.kv.rendezvous import draw\n"
        f"print([draw(bytes.fromhex(key), 'kvstore-0').hex() for key in {[key.hex() for key in keys]}])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "7"}
    )
    assert elsewhere.stdout.decode().strip() == str(GOLDEN)


def test_a_new_place_takes_its_share_and_nothing_else_moves() -> None:
    keys = chain_keys()
    before = [ranked(key, places(3))[0] for key in keys]
    after = [ranked(key, places(4))[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    print(f"seed {SEED}: {len(moved)} of {CHAINS} chains moved")
    assert set(moved) == {"kvstore-3"}
    assert within(len(moved), CHAINS / 4, CHAINS)


def test_a_lost_place_s_keys_go_to_their_second_and_no_others_move() -> None:
    keys = chain_keys()
    four = [ranked(key, places(4)) for key in keys]
    left = {name: 1.0 for name in places(4) if name != "kvstore-1"}
    for key, order in zip(keys, four, strict=True):
        rest = [name for name in order if name != "kvstore-1"]
        assert ranked(key, left) == rest
    heirs = Counter(order[1] for order in four if order[0] == "kvstore-1")
    print(f"seed {SEED}: heirs {dict(heirs)}")
    lost = sum(heirs.values())
    assert within(lost, CHAINS / 4, CHAINS)
    assert all(within(count, lost / 3, lost) for count in heirs.values())


def test_copies_are_distinct_and_spread() -> None:
    orders = [ranked(key, places(5))[:2] for key in chain_keys(2000)]
    assert all(len(set(order)) == 2 for order in orders)
    pairs = Counter(tuple(order) for order in orders)
    assert len(pairs) == 20
    assert all(within(count, 100, 2000) for count in pairs.values())


def test_weights_are_shares() -> None:
    weights = {"small": 1.0, "middle": 2.0, "large": 5.0}
    won = Counter(ranked(key, weights)[0] for key in chain_keys())
    print(f"seed {SEED}: {dict(won)}")
    assert all(within(won[name], CHAINS * weight / 8, CHAINS) for name, weight in weights.items())


def test_a_greater_weight_only_gains() -> None:
    keys = chain_keys(4000)
    before = [ranked(key, places(3))[0] for key in keys]
    after = [ranked(key, places(3) | {"kvstore-1": 2.0})[0] for key in keys]
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"kvstore-1"}


def test_a_scale_common_to_all_weights_moves_nothing() -> None:
    for key in chain_keys(500):
        assert ranked(key, {"a": 1.0, "b": 3.0}) == ranked(key, {"a": 2.0**40, "b": 3 * 2.0**40})


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_mean_nothing_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="kvstore-0"):
        score(b"\0" * 32, "kvstore-0", weight)


def test_nothing_to_choose_from() -> None:
    assert ranked(b"\0" * 32, {}) == []
