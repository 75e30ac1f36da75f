import pytest

from moonpool.base.errors import ConfigError
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.policies import LRU, POLICIES
from tests.unit.kvstore.helpers import BLOCK, block_of, info_of, keys_of
from tests.unit.kvstore.invariants import check

A, B, C, D = keys_of(4)


def tier(blocks: int = 3) -> DramTier:
    return DramTier(blocks * BLOCK, LRU())


def insert(dram: DramTier, *keys: bytes) -> None:
    for key in keys:
        assert dram.reserve(BLOCK) == []
        dram.insert([block_of(key)])  # type: ignore[arg-type]
        check(dram)


def test_the_oldest_leaves_first_and_use_makes_young() -> None:
    dram = tier()
    insert(dram, A, B, C)
    dram.touch([A])
    assert dram.reserve(BLOCK) == [B]
    check(dram)
    assert dram.reserve(BLOCK) == [C]
    assert set(dram) == {A}
    assert dram.evictions == 2
    assert (dram.block_bytes, dram.reserved.total_bytes) == (BLOCK, 2 * BLOCK)


def test_a_chain_leaves_tail_first() -> None:
    dram = tier()
    insert(dram, A, B, C)
    dram.touch([A, B, C, D])
    assert dram.reserve(2 * BLOCK) == [C, B]


def test_held_blocks_stay_and_a_refused_reservation_changes_nothing() -> None:
    dram = tier()
    insert(dram, A, B, C)
    block = dram.get(A)
    assert block is not None
    dram.hold(block)
    dram.hold(block)
    assert dram.reserve(3 * BLOCK) is None
    assert set(dram) == {A, B, C}
    assert dram.reserve(2 * BLOCK) == [B, C]
    check(dram)
    dram.release(block)
    assert dram.reserve(BLOCK) is None
    dram.release(block)
    assert dram.reserve(BLOCK) == [A]
    dram.unreserve(3 * BLOCK)
    check(dram)
    assert (len(dram), dram.block_bytes, dram.reserved.total_bytes, dram.held_bytes) == (0, 0, 0, 0)


def test_reservations_count_against_the_budget() -> None:
    dram = tier()
    assert dram.reserve(2 * BLOCK) == []
    assert dram.reserve(2 * BLOCK) is None
    assert dram.reserve(0) == []
    assert dram.reserve(BLOCK) == []


def test_no_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="dram_bytes"):
        KVStoreConfig.load(["--dram-bytes", "0"])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_keeps_the_keys_it_was_given(name: str) -> None:
    policy = POLICIES[name]()
    for key in (A, B, C):
        policy.added(info_of(key))
    policy.touched([A, C])
    policy.removed(B)
    assert sorted(policy.candidates()) == sorted([A, C])
