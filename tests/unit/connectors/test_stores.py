"""An engine's stores: pages come back, limits hold, a store that does not answer is left alone for a while."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root
from moonpool.base.kv.values import value_key, value_namespace
from moonpool.connectors.page_keys import SALT_MARK, PromptKeys, page_namespace, root_of
from moonpool.connectors.stores import EngineStores, Page, PageSettings, ValueSettings, ValueStores
from moonpool.v1 import kv_pb2
from tests.unit.kvstore.rig import Rig, rig

NAMESPACE = page_namespace({"engine": "test"})
KEYS = block_keys(chain_root(NAMESPACE, ""), list(range(64)), 16)
PARENTS = [NO_PARENT, *KEYS[:-1]]
PAGES = [
    Page(key, BlockKey(parent), bytes([at]) * 3000) for at, (key, parent) in enumerate(zip(KEYS, PARENTS, strict=True))
]
LATER = float("inf")


@asynccontextmanager
async def engine(*stores: str, **settings: Any) -> AsyncIterator[EngineStores]:
    """An engine that uses stores, and waits for them on a busy machine, too."""
    found = EngineStores(PageSettings(stores, **{"lookup_limit_s": 60.0, **settings}), NAMESPACE)
    try:
        yield found
    finally:
        await asyncio.to_thread(found.close)


async def saved(stores: EngineStores, pages: list[Page], tenant: str = "") -> None:
    """Saves pages, and waits for that."""
    stores.save(tenant, pages[0].key, pages, LATER)
    assert await asyncio.to_thread(stores.flush, 10.0)


async def looked_up(stores: EngineStores, keys: list[BlockKey], chain: BlockKey = KEYS[0]) -> list[bool]:
    return await asyncio.wrap_future(stores.look_up("", chain, keys))


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def holders(stores: list[Rig]) -> list[int]:
    """Blocks in each store."""
    return [sum([store.service.store.tiers.dram.get(key) is not None for key in KEYS]) for store in stores]


async def test_pages_come_back_under_the_keys_that_conductors_know() -> None:
    async with rig(dram_bytes=8 << 20) as store, engine(store.address) as stores:
        assert await looked_up(stores, KEYS) == [False] * 4
        await saved(stores, PAGES[:3])
        assert await looked_up(stores, KEYS) == [True, True, True, False]
        block = store.service.store.tiers.dram.get(KEYS[1])
        assert block is not None
        assert (block.info.parent, block.info.tenant) == (KEYS[0], "")
        memory = {page.key: bytearray(3000) for page in PAGES}
        assert await asyncio.wrap_future(stores.load("", KEYS[0], memory)) == [True, True, True, False]
        assert [memory[page.key] for page in PAGES[:3]] == [bytearray(page.data) for page in PAGES[:3]]
        counts = stores.take_counts()
        assert (counts["blocks_saved"], counts["blocks_loaded"], counts["load_misses"]) == (3, 3, 1)
        assert stores.take_counts() == {}


async def test_a_deletion_is_not_undone_by_what_was_computed_before() -> None:
    async with rig(dram_bytes=8 << 20) as store, engine(store.address) as stores:
        await saved(stores, PAGES[:1], "ann")
        selection = kv_pb2.Selection(tenants=["ann"])
        await store.stub.Forget(kv_pb2.ForgetRequest(deletions=[kv_pb2.Deletion(id="d", selection=selection)]))
        began = time.time()
        stores.save("ann", KEYS[0], PAGES[1:2], began)
        assert await asyncio.to_thread(stores.flush, 10.0)
        stores.save("ann", KEYS[0], PAGES[2:3], began)  # the same request as before
        assert await asyncio.to_thread(stores.flush, 10.0)
        assert holders([store]) == [0]
        await saved(stores, PAGES[3:], "ann")
        assert holders([store]) == [1]
        assert stores.take_counts()["blocks_not_saved"] == 2


async def test_a_store_that_refuses_connections_costs_no_request_more_than_the_limit() -> None:
    async with engine(nobody(), lookup_limit_s=0.15, breaker_failures=2, breaker_pause_s=60.0) as stores:
        for _ in range(2):
            began = time.monotonic()
            assert await looked_up(stores, KEYS) == [False] * 4
            assert time.monotonic() - began < 20.0
        assert stores.open_breakers == 1
        assert stores.look_up("", KEYS[0], KEYS).done()  # nothing is asked
        stores.save("", KEYS[0], PAGES, LATER)
        assert await asyncio.wrap_future(stores.load("", KEYS[0], {KEYS[0]: bytearray(8)})) == [False]
        counts = stores.take_counts()
        assert (counts["lookups_failed"], counts["lookups_skipped"], counts["blocks_not_saved"]) == (2, 1, 4)
        assert not stores.accepts(1)


async def test_another_store_takes_the_chains_of_one_that_is_gone() -> None:
    async with rig(dram_bytes=8 << 20) as store:
        gone = nobody()
        async with engine(gone, store.address, breaker_failures=1, breaker_pause_s=60.0) as stores:
            for at in range(16):  # some chains have their home at the store that is gone
                chain = block_keys(chain_root(NAMESPACE, str(at)), list(range(16)), 16)
                await looked_up(stores, chain, chain[0])
            assert stores.open_breakers == 1
            await saved(stores, PAGES)
            assert await looked_up(stores, KEYS) == [True] * 4


async def test_chains_are_spread_over_stores_and_found_again() -> None:
    async with rig(dram_bytes=8 << 20) as first, rig(dram_bytes=8 << 20) as second:
        async with engine(first.address, second.address) as stores:
            for at, page in enumerate(PAGES):
                other = Page(page.key, NO_PARENT, page.data)
                await saved(stores, [other])
                assert await looked_up(stores, KEYS[at : at + 1], KEYS[at]) == [True]
        assert sum(holders([first, second])) == 4


async def test_saves_have_a_bound() -> None:
    async with rig(dram_bytes=8 << 20) as store, engine(store.address, save_bytes=5000) as stores:
        stores.save("", KEYS[0], PAGES, LATER)
        assert stores.take_counts()["blocks_not_saved"] == 4
        assert stores.accepts(5000)
        assert not stores.accepts(5001)


def test_settings_are_checked_by_name() -> None:
    assert PageSettings.read({"stores": "a:1, b:2", "lookup_limit_s": 1}).stores == ("a:1", "b:2")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "stores"),
        ({"stores": ["nowhere"]}, "stores"),
        ({"stores": ["a:1"], "lookup_limit": 1}, "lookup_limit"),
        ({"stores": ["a:1"], "save_bytes": 0}, "save_bytes"),
        ({"stores": ["a:1"], "weights": 3}, "weights"),
    ]
    for given, field in wrong:
        with pytest.raises(ConfigError) as error:
            PageSettings.read(given)
        assert error.value.field == field


NAMES = [f"chunk {at}".encode() for at in range(12)]
CHUNKS = [bytes([at]) * (2000 + at) for at in range(12)]


@asynccontextmanager
async def keeper(*stores: str, **settings: Any) -> AsyncIterator[ValueStores]:
    """A process that keeps values in stores, and waits for them on a busy machine, too."""
    found = ValueStores(ValueSettings(stores, **{"lookup_limit_s": 60.0, **settings}))
    try:
        yield found
    finally:
        await asyncio.to_thread(found.close)


def saving(values: ValueStores, names: list[bytes] = NAMES) -> "asyncio.Future[list[bool]]":
    return asyncio.wrap_future(values.save(names, [CHUNKS[NAMES.index(name)] for name in names]))


async def test_values_are_spread_over_stores_and_found_by_all_who_share_the_name() -> None:
    async with rig(dram_bytes=8 << 20) as first, rig(dram_bytes=8 << 20) as second:
        addresses = first.address, second.address
        async with keeper(*addresses, namespace="a") as keeping, keeper(*addresses, namespace="a") as other:
            assert await asyncio.wrap_future(keeping.look_up(NAMES)) == [False] * 12
            assert await saving(keeping, NAMES[:10]) == [True] * 10
            keys = [value_key(value_namespace("a"), "", name) for name in NAMES]
            for store in (first, second):
                assert any(store.service.store.tiers.dram.get(key) is not None for key in keys)
            assert await asyncio.wrap_future(other.look_up(NAMES)) == [True] * 10 + [False] * 2
            memory = [bytearray(len(chunk)) for chunk in CHUNKS]
            assert await asyncio.wrap_future(other.load(NAMES, memory)) == [True] * 10 + [False] * 2
            assert memory[:10] == CHUNKS[:10]
            assert await asyncio.wrap_future(other.delete(NAMES[:3])) == [True] * 3
            assert await asyncio.wrap_future(keeping.look_up(NAMES[:4])) == [False, False, False, True]
        for settings in ({"namespace": "b"}, {"namespace": "a", "tenant": "ann"}):
            async with keeper(*addresses, **settings) as stranger:
                assert await asyncio.wrap_future(stranger.look_up(NAMES)) == [False] * 12


async def test_values_of_a_store_that_is_gone_go_to_another() -> None:
    async with (
        rig(dram_bytes=8 << 20) as store,
        keeper(nobody(), store.address, breaker_failures=1, breaker_pause_s=60.0) as values,
    ):
        assert False in await saving(values)  # those whose home is gone
        assert values.open_breakers == 1
        assert await saving(values) == [True] * 12
        assert await asyncio.wrap_future(values.look_up(NAMES)) == [True] * 12


async def test_without_a_store_no_value_is_kept_or_deleted() -> None:
    async with keeper(nobody(), breaker_failures=1, breaker_pause_s=60.0) as values:
        for _ in range(2):
            assert await saving(values) == [False] * 12
            assert await asyncio.wrap_future(values.delete(NAMES)) == [False] * 12
            assert await asyncio.wrap_future(values.load(NAMES, [bytearray(8)] * 12)) == [False] * 12


async def test_values_that_wait_have_a_bound() -> None:
    async with rig(dram_bytes=8 << 20) as store, keeper(store.address, save_bytes=5000) as values:
        assert await saving(values) == [False] * 12
        assert values.take_counts() == {"blocks_not_saved": 12}
        assert await saving(values, NAMES[:2]) == [True] * 2


def test_namespaces_differ_with_every_part() -> None:
    parts: dict[str, object] = {"engine": "vllm 1", "dtype": "float32"}
    names: list[dict[str, object]] = [
        parts,
        parts | {"dtype": "bfloat16"},
        parts | {"ranks": (1, 2)},
        {"engine": "vllm 1dtype", "": "float32"},
    ]
    assert len({page_namespace(each) for each in names}) == len(names)
    assert page_namespace(dict(reversed(parts.items()))) == page_namespace(parts)


def test_an_adapters_salt_names_the_root_and_another_salt_is_a_part_of_it() -> None:
    root = chain_root(NAMESPACE, "ann")
    assert root_of(NAMESPACE, "ann", f"{SALT_MARK}{root.hex()}:epoch") == root
    assert root_of(NAMESPACE, "", None) == chain_root(NAMESPACE, "")
    own = [SALT_MARK, f"{SALT_MARK}xyz", f"{SALT_MARK}{'z' * 64}", "salt"]
    assert {root_of(NAMESPACE, "", salt) for salt in own} == {chain_root(NAMESPACE, "", salt) for salt in own}


def test_keys_are_the_chains_of_the_tokens_so_far() -> None:
    root, tokens = chain_root(NAMESPACE, ""), list(range(64))
    keys = PromptKeys(root, 16)
    assert keys.first(2, tokens[:40]) == KEYS[:2]
    assert keys.first(4, tokens) == KEYS
    assert keys.parent(0) == root
    assert keys.parent(3) == KEYS[2]
