"""Quotas and guarantees: the rows, the accounts, and what the tiers make of them."""

from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError, InvalidRequest, Overloaded
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.policies import LRU
from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.eviction.tenants import MAX_TENANT_ROWS, TenantAccount, TenantRow
from tests.unit.kvstore.helpers import BLOCK, FORMAT, RECORD, Driven, block_of, data_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check

KEYS = keys_of(12)
A, B, C, D, E, F = KEYS[:6]
LARGE = BlockFormat(b"l" * 32, KVLayout.uniform(layers=6, kv_heads=2, head_dim=4, block_size=16, dtype="float32"))


def grants(**rows: TenantRow) -> TenantAccount:
    return TenantAccount.of({name.replace("others", "*"): row for name, row in rows.items()}, "dram")


def test_an_account_knows_what_is_granted() -> None:
    account = grants(a=TenantRow(dram_guarantee_bytes=10, dram_quota_bytes=30), others=TenantRow(dram_quota_bytes=20))
    account.used.add("a", 12)
    account.used.add("x", 12)
    assert [account.guards("a", nbytes) for nbytes in (1, 2, 3)] == [False, False, True]
    assert not account.guards("x", 12)
    assert [account.over_quota("a", coming) for coming in (18, 19)] == [0, 1]
    assert [account.over_quota("x", coming) for coming in (8, 11)] == [0, 3]
    assert account.over_quota("new", 25) == 5
    assert (account.used.of_row("a", account.quotas), account.used.of_row("*", account.quotas)) == (12, 12)
    account.used.add("x", -12)
    assert account.used == {"a": 12}
    assert account.used.of_row("*", account.quotas) == 0


def test_rows_come_from_a_flag_and_must_fit() -> None:
    def load(text: str, *more: str) -> KVStoreConfig:
        return KVStoreConfig.load(["--set", f"tenants={text}", "--dram-bytes", "1000", *more])

    def field(text: str, *more: str) -> str:
        with pytest.raises(ConfigError) as error:
            load(text, *more)
        return error.value.field

    rows = load('{"a": {"dram_guarantee_bytes": 600}, "*": {"dram_quota_bytes": 5}}').tenants
    assert rows == {"a": TenantRow(dram_guarantee_bytes=600), "*": TenantRow(dram_quota_bytes=5)}
    assert load("a: {pin_bytes: 3}").tenants["a"].pin_bytes == 3
    assert load("").tenants == {}
    assert field("{a: {dram_guarantee_bytes: 600}, b: {dram_guarantee_bytes: 401}}") == "tenants.*.dram_guarantee_bytes"
    assert field("{a: {ssd_guarantee_bytes: 1}}") == "tenants.*.ssd_guarantee_bytes"
    assert field("{a: {dram_guarantee_bytes: 2, dram_quota_bytes: 1}}") == "tenants.a.dram_guarantee_bytes"
    assert field("{'*': {dram_guarantee_bytes: 2}}") == "tenants.*.dram_guarantee_bytes"
    assert field("{a: {dram_bytes: 2}}") == "tenants.a.dram_bytes"
    assert field("{a: {pin_bytes: -2}}") == "tenants.a.pin_bytes"
    assert field("{a: 2}") == "tenants.a"
    assert field("[1]") == field("{") == "tenants"
    assert field(str({str(number): {} for number in range(MAX_TENANT_ROWS + 1)})) == "tenants"
    assert field("{%s: {}}" % ("x" * 1025)) == "tenants"


def test_the_budget_of_pins() -> None:
    assert KVStoreConfig(dram_bytes=1000).pin_budget_bytes == 500
    assert KVStoreConfig(dram_bytes=1000, pin_bytes=0).pin_budget_bytes == 0


def tier(blocks: int, pins: Pins | None = None, **rows: TenantRow) -> DramTier:
    return DramTier(blocks * BLOCK, LRU(), account=grants(**rows), pins=pins)


def insert(dram: DramTier, tenant: str, *keys: BlockKey, block_format: BlockFormat = FORMAT) -> list[BlockKey]:
    evicted: list[BlockKey] = []
    for key in keys:
        victims = dram.reserve(block_format.layout.block_bytes, tenant)
        assert victims is not None
        evicted += victims
        dram.insert([block_of(key, tenant, block_format)])
        check(dram)
    return evicted


def test_a_tenant_at_its_quota_evicts_its_own_blocks_first() -> None:
    dram = tier(6, others=TenantRow(dram_quota_bytes=2 * BLOCK))
    assert insert(dram, "x", A) == []
    assert insert(dram, "y", B, C, D) == [B]
    assert insert(dram, "x", E, F) == [A]
    assert set(dram) == {C, D, E, F}


def test_a_tenant_whose_blocks_are_all_needed_waits_at_its_quota() -> None:
    dram = tier(6, others=TenantRow(dram_quota_bytes=2 * BLOCK))
    insert(dram, "x", A, B)
    for key in (A, B):
        dram.hold(dram.get(key))  # type: ignore[arg-type]
    assert dram.reserve(BLOCK, "x") is None
    assert dram.reserve(BLOCK, "y") == []
    dram.release(dram.get(A))  # type: ignore[arg-type]
    assert dram.reserve(BLOCK, "x") == [A]
    assert dram.reserve(BLOCK, "x") is None  # reserved bytes count too
    check(dram)


def test_others_do_not_evict_a_tenant_below_its_guarantee() -> None:
    dram = tier(4, a=TenantRow(dram_guarantee_bytes=2 * BLOCK))
    insert(dram, "a", A, B, C)
    assert insert(dram, "x", D, E) == [A]  # the oldest, and then its guarantee protects it
    assert insert(dram, "x", F) == [D]
    assert set(dram) == {B, C, E, F}
    assert insert(dram, "a", KEYS[6]) == [B]  # it may replace its own, as the order says
    assert dram.reserve(3 * BLOCK, "x") is None
    with pytest.raises(Overloaded) as refusal:
        dram.check_possible(3 * BLOCK, "x", 0.0)
    assert refusal.value.reason == "kvstore_guaranteed"
    dram.check_possible(3 * BLOCK, "a", 0.0)


def test_a_guarantee_holds_for_blocks_that_go_together() -> None:
    dram = tier(4, a=TenantRow(dram_guarantee_bytes=BLOCK), b=TenantRow(dram_guarantee_bytes=BLOCK))
    insert(dram, "a", A, B)
    insert(dram, "b", C, D)
    assert dram.reserve(2 * BLOCK, "x") == [A, C]
    assert dram.reserve(BLOCK, "x") is None


def test_blocks_of_many_sizes_and_a_guarantee_between_them() -> None:
    """A large block would leave less than is guaranteed, so that it stays; nothing changes when that is too much."""
    dram = tier(4, a=TenantRow(dram_guarantee_bytes=BLOCK))
    insert(dram, "a", A, block_format=LARGE)
    insert(dram, "x", B)
    assert dram.reserve(2 * BLOCK, "x") == [B]
    dram.unreserve(2 * BLOCK, "x")
    insert(dram, "x", B)
    assert dram.reserve(3 * BLOCK, "x") is None
    assert set(dram) == {A, B}
    check(dram)
    assert insert(dram, "a", C, D) == [A]


def test_what_can_never_be_is_refused_for_good() -> None:
    dram = tier(4, x=TenantRow(dram_quota_bytes=2 * BLOCK))
    for nbytes, tenant in ((5 * BLOCK, "y"), (3 * BLOCK, "x")):
        with pytest.raises(InvalidRequest, match="the transfer needs"):
            dram.check_possible(nbytes, tenant, 0.0)
    dram.check_possible(4 * BLOCK, "y", 0.0)


def test_own_pins_count_against_the_quota() -> None:
    pins = Pins(10 * BLOCK)
    dram = tier(4, pins, x=TenantRow(dram_quota_bytes=2 * BLOCK))
    insert(dram, "x", A, B)
    _, change = pins.pin("x", "p", [A], lambda _: BLOCK, now=0, ttl_s=5)
    dram.pins_changed(change)
    check(dram)
    assert insert(dram, "x", C) == [B]
    with pytest.raises(Overloaded) as refusal:
        dram.check_possible(2 * BLOCK, "x", 1.0)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("kvstore_pinned", 4.0)
    dram.check_possible(2 * BLOCK, "y", 1.0)
    assert dram.reserve(3 * BLOCK, "y") == [C]


def ssd_account(**rows: TenantRow) -> TenantAccount:
    return TenantAccount.of({name.replace("others", "*"): row for name, row in rows.items()}, "ssd")


def test_a_tenant_over_its_ssd_quota_gives_up_its_oldest(tmp_path: Path) -> None:
    account = ssd_account(x=TenantRow(ssd_quota_bytes=3 * RECORD))
    ssd = open_ssd(tmp_path, segment=2 * RECORD, account=account)
    driven = Driven(ssd, dram_bytes=3 * BLOCK)
    driven.flush([A, B], "x")
    driven.flush([C], "y")
    driven.flush([D], "x")
    assert set(ssd.catalogue) == {A, B, C, D}
    driven.flush([E, F], "x")
    assert set(ssd.catalogue) == {C, D, E, F}
    assert set(driven.removed) == {A, B}
    assert ssd.account.used == {"x": 3 * RECORD, "y": RECORD}
    driven.flush(KEYS[6:8], "x")
    assert set(ssd.catalogue) == {C, F, KEYS[6], KEYS[7]}
    assert driven.read([C]) == [data_of(C)]
    ssd.close()
    again = open_ssd(tmp_path)
    assert set(again.catalogue) == {C, F, KEYS[6], KEYS[7]}
    again.close()


def test_pinned_blocks_are_not_given_up_and_what_finds_no_room_stays_in_dram(tmp_path: Path) -> None:
    pins, account = Pins(9 * BLOCK), ssd_account(others=TenantRow(ssd_quota_bytes=2 * RECORD))
    ssd = open_ssd(tmp_path, pins=pins, account=account)
    driven = Driven(ssd, pins=pins)
    driven.flush([A, B], "x")
    driven.operations.pin("x", "p", [A, B], 9)
    driven.flush([C, D], "x")
    driven.flush([E], "y")
    assert set(ssd.catalogue) == {A, B, E}
    assert driven.store.writes.queue.blocks_not_durable == 2
    assert driven.read([C, D]) == [data_of(C), data_of(D)]
    driven.now = 9
    driven.operations.expire()
    driven.flush([F], "x")
    assert set(ssd.catalogue) == {B, E, F}
    ssd.close()


def test_others_do_not_take_a_tenants_share_of_the_ssd(tmp_path: Path) -> None:
    account = ssd_account(a=TenantRow(ssd_guarantee_bytes=2 * RECORD))
    ssd = open_ssd(tmp_path, capacity=8 * RECORD, segment=RECORD, account=account)
    driven = Driven(ssd, dram_bytes=2 * BLOCK)
    driven.flush([A, B], "a")
    for key in KEYS[2:]:
        driven.flush([key], "x")
    for key in keys_of(8, "more"):
        driven.flush([key], "x")
    assert {A, B} <= set(ssd.catalogue)
    assert driven.read([A, B]) == [data_of(A), data_of(B)]
    ssd.close()
