"""Rows of pictures beside KV: each class keeps its share of both tiers, whatever comes of the other."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.kv.blocks import PICTURES, BlockFormat
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.picture_rows import PICTURE_NAMESPACE, row_keys, rows_layout
from moonpool.base.kv.values import value_namespace
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.policies import LRU, POLICIES
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantRow
from tests.unit.kvstore.helpers import BLOCK, FORMAT, RECORD, ROWS_FORMAT, Driven, block_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check
from tests.unit.kvstore.rig import rig

BLOCKS, SHARE = 12, 4
"""Blocks of DRAM, and those of them that are for pictures."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_neither_class_takes_the_share_of_the_other(policy: str, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    dram = DramTier(BLOCKS * BLOCK, POLICIES[policy](), account=TenantAccount.of({}, "dram", SHARE * BLOCK))
    for key in keys_of(150, f"s{seed}"):
        kind, tenant = chance.choice((FORMAT, ROWS_FORMAT)), chance.choice("ab")
        of_pictures = {here for here, block in dram.items() if block.info.format.of_pictures}
        of_kv = set(dram) - of_pictures
        victims = dram.reserve(BLOCK, kind.account(tenant))
        assert victims is not None
        if kind is FORMAT:
            assert not of_pictures.intersection(victims)
        elif len(of_kv) <= BLOCKS - SHARE:
            assert not of_kv.intersection(victims), "KV within its own share stays"
        dram.insert([block_of(key, tenant, kind)])
        dram.touch(chance.sample(sorted(dram), min(len(dram), 2)))
        check(dram)
    assert dram.account.used[PICTURES] == SHARE * BLOCK
    assert 0 < dram.picture_evictions < dram.evictions


class Watched(LRU):
    """Counts the blocks of KV that are looked at."""

    looked = 0

    def candidates(self) -> Iterator[BlockKey]:
        for key in super().candidates():
            self.looked += 1
            yield key


def test_who_makes_room_in_one_class_passes_over_none_of_the_other() -> None:
    """However many lie there, older than all else: a store with a full share of pictures evicts KV as quickly."""
    order = Watched()
    dram = DramTier(BLOCKS * BLOCK, order, account=TenantAccount.of({}, "dram", SHARE * BLOCK))
    rows, text, own = keys_of(2 * SHARE, "rows"), keys_of(BLOCKS, "text"), BLOCKS - SHARE

    def put(key: BlockKey, kind: BlockFormat, leaves: list[BlockKey], looked: int = 0) -> None:
        before = order.looked
        assert dram.reserve(BLOCK, kind.account("a")) == leaves
        assert order.looked - before == looked
        dram.insert([block_of(key, "a", kind)])
        check(dram)

    for key in rows[:SHARE]:
        put(key, ROWS_FORMAT, [])
    for key in text[:own]:
        put(key, FORMAT, [])
    for key, oldest in zip(text[own:], text, strict=False):
        put(key, FORMAT, [oldest], looked=1)
    dram.touch([rows[0], *text])
    for key, oldest in zip(rows[SHARE:], [*rows[1:SHARE], rows[0]], strict=True):
        put(key, ROWS_FORMAT, [oldest])


def test_kv_uses_the_room_that_pictures_leave() -> None:
    dram = DramTier(BLOCKS * BLOCK, POLICIES["lru"](), account=TenantAccount.of({}, "dram", SHARE * BLOCK))
    for key in keys_of(BLOCKS):
        assert dram.reserve(BLOCK, "a") == []
        dram.insert([block_of(key, "a")])


def test_a_full_ssd_keeps_both_shares(tmp_path: Path) -> None:
    account = TenantAccount.of({}, "ssd", 2 * RECORD)
    ssd = open_ssd(tmp_path, capacity=8 * RECORD, segment=RECORD, account=account)
    driven = Driven(ssd, dram_bytes=2 * BLOCK, account=TenantAccount.of({}, "dram", BLOCK))
    text, pictures = keys_of(4, "text"), keys_of(20, "pictures")
    for key in text:
        driven.flush([key], "a")
    for key in pictures:
        driven.flush([key], "a", ROWS_FORMAT)
    assert set(ssd.catalogue) == {*text, *pictures[-2:]}
    for key in keys_of(20, "more"):
        driven.flush([key], "b")
    assert set(pictures[-2:]) < set(ssd.catalogue)
    assert ssd.account.used[PICTURES] == 2 * RECORD
    ssd.close()
    again = open_ssd(tmp_path, capacity=8 * RECORD, segment=RECORD, account=TenantAccount.of({}, "ssd", 2 * RECORD))
    assert again.account.used[PICTURES] == 2 * RECORD, "a restart knows the class"
    again.close()


def test_rows_are_deleted_with_their_tenant() -> None:
    driven = Driven()
    mine, theirs = keys_of(2)
    driven.flush([mine], "a", ROWS_FORMAT)
    driven.flush([theirs], "b", ROWS_FORMAT)
    list(driven.store.delete_selected(KVSelection(tenants=frozenset("a"))))
    assert set(driven.store.tiers.dram) == {theirs}
    check(driven.store)


def test_guarantees_of_tenants_come_before_the_share_of_pictures() -> None:
    def granted(**settings: object) -> tuple[int, int]:
        config = KVStoreConfig(dram_bytes=1600, **settings)  # type: ignore[arg-type]
        return config.picture_dram_bytes, config.picture_ssd_bytes

    assert granted() == (100, 0)
    assert granted(picture_share=0) == (0, 0)
    assert granted(tenants={"a": TenantRow(dram_guarantee_bytes=1550)}) == (50, 0)
    assert granted(data_dir=(Path("a"), Path("b")), ssd_bytes=160, segment_bytes=10) == (100, 20)


def test_keys_of_rows() -> None:
    model, digest = b"m" * 32, b"d" * 32
    keys = row_keys(model, "a", digest, 3)
    assert keys[:2] == row_keys(model, "a", digest, 2)
    others = [row_keys(b"n" * 32, "a", digest, 3), row_keys(model, "", digest, 3), row_keys(model, "a", b"e" * 32, 3)]
    assert len({key for some in (keys, *others) for key in some}) == 12
    assert [key.hex()[:8] for key in keys] == ["d064f54e", "23bbfca6", "2f01329a"]
    assert value_namespace("moonpool picture rows namespace v1") != PICTURE_NAMESPACE


@pytest.mark.parametrize("row_bytes", [2, 1152, 2304, 4 * 4096 * 4, 2 * 5120 * 4])
def test_a_block_holds_its_rows(row_bytes: int) -> None:
    layout = rows_layout(row_bytes)
    assert 64 * row_bytes <= layout.block_bytes <= max(128, 1.25 * 64 * row_bytes + 64)


async def test_a_store_counts_pictures() -> None:
    keys = keys_of(3)
    async with rig(picture_share=2 / 64) as store:
        for key in keys:
            assert await store.put([key], block_format=ROWS_FORMAT) == (0, 1)
        assert await store.put(keys_of(1, "text")) == (0, 1)
        assert await store.read(keys[:1], block_format=ROWS_FORMAT) == []
        assert len(await store.read(keys[1:], block_format=ROWS_FORMAT)) == 2
        assert await store.read(keys[1:]) == [], "rows are no KV"
        gauges = {gauge.name: gauge.value for gauge in store.service.gauges.read()}
    wanted = {"dram_bytes": 2 * BLOCK, "evictions_total": 1, "hits_total": 2, "misses_total": 1}
    assert {name: gauges[f"picture_{name}"] for name in wanted} == wanted
