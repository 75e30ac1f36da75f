"""Pins: what they keep, for how long, at whose cost, and that a store full of them says so."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.retention import MAX_TTL_S, PinLimit, PinOutcome, Pins
from moonpool.kvstore.eviction.tenants import TenantAccount
from tests.examples import examples
from tests.unit.kvstore.helpers import BLOCK, Driven, data_of, keys_of, open_ssd, spec_of
from tests.unit.kvstore.invariants import check

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]


def pin_told(
    pins: Pins,
    name: str,
    keys: Sequence[BlockKey],
    *,
    tenant: str = "t",
    here: Sequence[BlockKey] = KEYS,
    now: float = 0.0,
    ttl_s: float = 10.0,
) -> tuple[PinOutcome, set[BlockKey]]:
    pins.expire(now)
    outcome, changed = pins.pin(tenant, name, keys, lambda key: 10 if key in here else None, now=now, ttl_s=ttl_s)
    check(pins)
    return outcome, set(changed)


def pin(pins: Pins, name: str, keys: Sequence[BlockKey], **settings: Any) -> PinOutcome:
    return pin_told(pins, name, keys, **settings)[0]


def test_a_pin_keeps_what_is_here_and_says_how_much() -> None:
    pins = Pins(100)
    assert pin(pins, "ctx", [A, B, C], here=[A, B]) == PinOutcome(2, 20, PinLimit.ABSENT)
    assert (A in pins, C in pins, len(pins), pins.keys, pins.nbytes, pins.next_expiry) == (True, False, 1, 2, 20, 10.0)
    assert pin(pins, "none", [C], here=[A, B]).blocks == 0
    assert len(pins) == 1


def test_overlapping_pins_count_references_and_cost_once() -> None:
    pins = Pins(100)
    assert pin_told(pins, "one", [A, B])[1] == {A, B}
    assert pin_told(pins, "two", [A, C])[1] == {A, C}
    assert pin_told(pins, "other", [A], tenant="u")[1] == {A}
    used = pins.account.used
    assert (used["t"], used["u"], pins.nbytes) == (30, 10, 30)
    assert set(pins.unpin("t", "one")) == {A, B}
    assert set(pins.unpin("t", "one")) == set()
    check(pins)
    assert (A in pins, B in pins, C in pins) == (True, False, True)
    assert set(pins.unpin("t", "two")) == {A, C}
    assert (A in pins, C in pins) == (True, False)
    assert set(pins.unpin("u", "other")) == {A}
    assert (pins.nbytes, pins.keys, used["t"], pins.next_expiry) == (0, 0, 0, math.inf)
    check(pins)


def test_the_same_name_renews_and_replaces() -> None:
    pins = Pins(30)
    pin(pins, "ctx", [A, B, C], ttl_s=5)
    outcome, changed = pin_told(pins, "ctx", [B, C, D], now=3, ttl_s=5)
    assert (outcome, changed) == (PinOutcome(3, 30, PinLimit.UNSPECIFIED), {A, B, C, D})
    assert ([key in pins for key in (A, B, C, D)], pins.next_expiry) == ([False, True, True, True], 8)
    assert pin(pins, "ctx", [D], now=3, here=[]).blocks == 0
    assert (len(pins), pins.nbytes) == (0, 0)


def test_pins_end_with_their_time() -> None:
    pins = Pins(100)
    pin(pins, "short", [A, B], ttl_s=1)
    pin(pins, "long", [B], ttl_s=3)
    assert set(pins.expire(0.99)) == set()
    assert set(pins.expire(1.0)) == {A, B}
    assert (A in pins, B in pins, pins.next_expiry) == (False, True, 3.0)
    assert set(pins.expire(100.0)) == {B}
    assert len(pins) == 0
    check(pins)


def test_budgets_of_tenants_and_of_the_store() -> None:
    pins = Pins(40, TenantAccount(quotas={"small": 20, "*": 30}))
    assert pin(pins, "a", KEYS, tenant="small") == PinOutcome(2, 20, PinLimit.TENANT_BUDGET)
    assert pin(pins, "b", [A], tenant="small").blocks == 1  # costs nothing more
    assert pin(pins, "a", KEYS[4:], tenant="else") == PinOutcome(2, 20, PinLimit.STORE_BUDGET)
    assert pin(pins, "a", [A, *KEYS[4:]], tenant="else") == PinOutcome(3, 30, PinLimit.TENANT_BUDGET)
    used = pins.account.used
    assert (used.of_row("small", ["small"]), used.of_row("*", ["small"]), pins.nbytes) == (20, 30, 40)


def test_wrong_pins_name_their_field() -> None:
    def field(name: str = "n", keys: Sequence[BlockKey] = (A,), ttl_s: float = 1.0, tenant: str = "") -> str:
        with pytest.raises(InvalidRequest) as refusal:
            pin(Pins(100), name, keys, ttl_s=ttl_s, tenant=tenant)
        return refusal.value.field

    assert field(name="") == field(name="ü" * 129) == "name"
    assert field(keys=()) == field(keys=(A, A)) == "keys"
    assert field(tenant="x" * 1025) == "tenant"
    assert {field(ttl_s=ttl) for ttl in (0, -1, MAX_TTL_S * 2, float("inf"), float("nan"))} == {"ttl_s"}


def test_there_are_only_so_many() -> None:
    pins = Pins(100, max_pins=2, max_entries=3)
    pin(pins, "a", [A], ttl_s=4)
    pin(pins, "b", [A])
    with pytest.raises(Overloaded) as refusal:
        pin(pins, "c", [A], now=1)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("kvstore_pins", 3.0)
    pin(pins, "b", [B], now=1)  # a known name is no new one
    pin(pins, "c", [A], now=4)  # "a" has ended
    with pytest.raises(Overloaded):
        pin(pins, "b", [A, B, C], now=4)
    assert pin(pins, "b", [A, B], now=4).blocks == 2


def pinning(blocks: int, *, pin_blocks: int = 100) -> Driven:
    return Driven(dram_bytes=blocks * BLOCK, pins=Pins(pin_blocks * BLOCK), max_transfers=9)


def test_pinned_blocks_are_not_evicted_and_come_back_as_young_ones() -> None:
    driven = pinning(3)
    driven.put([A])
    driven.put([B])
    assert driven.operations.pin("", "ctx", [A, B, C], 9).blocks == 2
    driven.put([C])
    driven.put([D])
    assert driven.removed == [C]
    check(driven.store)
    assert driven.store.tiers.dram.pinned.total_bytes == 2 * BLOCK
    driven.now = 9
    driven.operations.expire()
    check(driven.store)
    driven.put([KEYS[4]])
    assert driven.removed == [C, D]
    driven.put(KEYS[5:7])
    assert set(driven.removed) == {A, B, C, D}


def test_a_put_into_a_store_full_of_pins_is_refused_at_once_and_told_when_to_come_back() -> None:
    driven = pinning(3)
    driven.put([A, B])
    driven.operations.pin("", "ctx", [A, B], 9)
    with pytest.raises(Overloaded) as refusal:
        driven.store.writes.open(spec_of([C, D]), lambda _: None, lambda _: None, lambda: None, now=2)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("kvstore_pinned", 7.0)
    driven.put([C])  # what there is room for is taken
    driven.put([D])
    assert driven.removed == [C]
    with pytest.raises(InvalidRequest):
        driven.open(spec_of(KEYS[4:]))


def test_the_end_of_a_pin_lets_those_in_who_wait() -> None:
    driven = pinning(2)
    driven.put([A])
    driven.operations.pin("", "ctx", [A], 9)
    lease = driven.store.reads.open([A], driven.store.tiers.format_of(A), promote=False)  # type: ignore[arg-type]
    rooms = driven.rooms
    assert driven.operations.unpin("", "ctx")
    assert driven.rooms == rooms + 1
    check(driven.store)
    driven.store.reads.close(lease)
    check(driven.store)


def test_a_block_that_only_the_durable_tier_has_can_be_pinned_and_stays_when_it_comes_back(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=2 * BLOCK)
    driven.store.tiers.dram.pins.budget_bytes = 10 * BLOCK
    driven.flush([A])
    driven.flush([B, C])
    assert A not in driven.store.tiers.dram
    assert driven.operations.pin("", "ctx", [A], 9).blocks == 1
    assert driven.read([A], promote=True) == [data_of(A)]
    assert driven.store.tiers.dram.pinned.total_bytes == BLOCK
    driven.flush([D])
    driven.flush([KEYS[4]])
    assert A in driven.store.tiers.dram
    ssd.close()


class PinMachine(RuleBasedStateMachine):
    """Against a dictionary of what each pin keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = Pins(5 * 10, TenantAccount(quotas={"t": 40}))
        self.model: dict[tuple[str, str], tuple[list[BlockKey], float]] = {}
        self.now = 0.0
        self.kept: set[BlockKey] = set()

    def changed(self, keys: set[BlockKey]) -> None:
        now = {key for key in KEYS if key in self.pins}
        assert self.kept ^ now <= keys
        self.kept = now

    def end(self) -> None:
        self.model = {place: pin for place, pin in self.model.items() if pin[1] > self.now}

    @rule(
        tenant=st.sampled_from("tu"), name=st.sampled_from("ab"), keys=st.permutations(KEYS), count=st.integers(1, 8),
        ttl=st.integers(1, 5), here=st.sets(st.sampled_from(KEYS), min_size=4),
    )  # fmt: skip
    def pin(self, tenant: str, name: str, keys: list[BlockKey], count: int, ttl: int, here: set[BlockKey]) -> None:
        outcome, changed = self.pins.pin(
            tenant, name, keys[:count], lambda key: 10 if key in here else None, now=self.now, ttl_s=ttl
        )
        self.changed(set(changed))
        self.end()
        self.model.pop((tenant, name), None)
        expected: list[BlockKey] = []
        for key in keys[:count]:
            mine = {k for (t, _), (ks, _) in self.model.items() if t == tenant for k in ks} | {*expected, key}
            all_kept = {k for ks, _ in self.model.values() for k in ks} | {*expected, key}
            if key not in here or (tenant == "t" and len(mine) > 4) or len(all_kept) > 5:
                break
            expected.append(key)
        assert outcome.blocks == len(expected)
        assert (outcome.limit is PinLimit.UNSPECIFIED) == (outcome.blocks == count)
        if expected:
            self.model[tenant, name] = expected, self.now + ttl

    @rule(tenant=st.sampled_from("tu"), name=st.sampled_from("ab"))
    def unpin(self, tenant: str, name: str) -> None:
        changed = self.pins.unpin(tenant, name)
        assert bool(changed) == (self.model.pop((tenant, name), None) is not None)
        self.changed(set(changed))

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.changed(set(self.pins.expire(self.now)))
        self.end()

    @invariant()
    def same(self) -> None:
        check(self.pins)
        expected = {key for keys, _ in self.model.values() for key in keys}
        assert expected == self.kept == {key for key in KEYS if key in self.pins}


PinMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestPinMachine = PinMachine.TestCase
