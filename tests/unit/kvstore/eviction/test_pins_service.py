"""Pins, tenants and long leases over a real server."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, MoonpoolError, Overloaded
from moonpool.base.kv.keys import BlockKey, pack_keys
from moonpool.v1 import kvstore_pb2
from tests.unit.kvstore.helpers import BLOCK, RECORD, data_of, keys_of
from tests.unit.kvstore.rig import Rig, opened_get, opened_put, rig

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]


async def pin(store: Rig, name: str, keys: Sequence[BlockKey], ttl_s: float = 60.0, tenant: str = "") -> Any:
    request = kvstore_pb2.PinRequest(name=name, keys=pack_keys(keys), ttl_s=ttl_s, tenant=tenant)
    return await store.stub.Pin(request)


async def test_a_pinned_chain_stays_until_it_is_unpinned() -> None:
    async with rig(dram_bytes=4 * BLOCK) as store:
        await store.put([A, B])
        answer = await pin(store, "ctx", [A, B, C])
        assert (answer.blocks, answer.bytes, answer.ttl_s, answer.limit) == (
            2, 2 * BLOCK, 60.0, kvstore_pb2.PIN_LIMIT_ABSENT,
        )  # fmt: skip
        for key in KEYS[2:]:
            await store.put([key])
        assert await store.read([A, B]) == [data_of(A), data_of(B)]
        gauges = store.gauges()
        assert (gauges["pins"], gauges["pinned_blocks"], gauges["dram_pinned_bytes"]) == (1, 2, 2 * BLOCK)
        await store.at_rest()
        unpin = kvstore_pb2.UnpinRequest(name="ctx")
        assert [(await store.stub.Unpin(unpin)).found for _ in range(2)] == [True, False]
        await store.put(KEYS[4:])
        assert await store.read([A]) == []
        await store.at_rest()


async def test_a_pin_ends_by_itself_and_those_who_wait_get_in() -> None:
    async with rig(dram_bytes=2 * BLOCK, pin_bytes=2 * BLOCK, room_timeout_s=10) as store:
        await store.put([A])
        await pin(store, "ctx", [A], ttl_s=1.0)
        with pytest.raises(Overloaded) as refusal:
            await store.put([B, C])
        assert refusal.value.reason == "kvstore_pinned"
        assert 0 < refusal.value.retry_after_s <= 1.0
        await store.until("pins", 0)
        assert await store.put([B, C]) == (0, 2)
        await store.at_rest()


async def test_wrong_pins_name_their_field() -> None:
    async with rig() as store:
        for call, field in (
            (pin(store, "", [A]), "name"),
            (pin(store, "x", []), "keys"),
            (pin(store, "x", [A], ttl_s=0), "ttl_s"),
            (store.stub.Pin(kvstore_pb2.PinRequest(name="x", keys=b"short", ttl_s=1)), "keys"),
        ):
            with pytest.raises(MoonpoolError) as error:
                await call
            raised = error.value
            assert isinstance(raised, InvalidRequest)
            assert raised.field == field
        assert (await pin(store, "x", [A])).blocks == 0


async def test_tenants_have_quotas_guarantees_and_gauges(tmp_path: Path) -> None:
    rows = {
        "a": {"dram_guarantee_bytes": 2 * BLOCK, "ssd_quota_bytes": 3 * RECORD},
        "*": {"dram_quota_bytes": 3 * BLOCK, "pin_bytes": 0},
    }
    async with rig(tmp_path, dram_bytes=5 * BLOCK, tenants=rows) as store:
        await store.put([A, B], "a")
        await store.durable()
        for key in KEYS[2:]:
            await store.put([key], "other")
            await store.durable()
        gauges = store.gauges()
        assert gauges['tenant_dram_bytes{tenant="a"}'] == 2 * BLOCK
        assert gauges['tenant_dram_bytes{tenant="*"}'] == 3 * BLOCK
        assert gauges['tenant_ssd_bytes{tenant="*"}'] == 6 * RECORD
        with pytest.raises(InvalidRequest, match="its quota in DRAM"):
            await store.put(keys_of(4, "many"), "other")
        assert (await pin(store, "x", [C], tenant="other")).limit == kvstore_pb2.PIN_LIMIT_TENANT_BUDGET
        more = keys_of(3, "more")
        await store.put(more, "a")
        await store.durable()
        assert store.gauges()['tenant_ssd_bytes{tenant="a"}'] == 3 * RECORD
        await store.at_rest()
    async with rig(tmp_path, tenants=rows) as store:
        assert store.gauges()['tenant_ssd_bytes{tenant="a"}'] == 3 * RECORD
        assert await store.read(more) == [data_of(key) for key in more]
        assert await store.read([A]) == []
        assert store.gauges()['tenant_dram_bytes{tenant="a"}'] == 3 * BLOCK


async def test_a_tenant_that_waits_at_its_quota_keeps_no_other_waiting() -> None:
    async with rig(tenants={"a": {"dram_quota_bytes": BLOCK}}, dram_bytes=4 * BLOCK, room_timeout_s=10) as store:
        first, _ = await opened_put(store, [A], tenant="a")
        await store.send(first, [A], layers=range(1))
        await store.until("dram_reserved_bytes", BLOCK)
        waiting = asyncio.ensure_future(store.put([B], "a"))
        while not store.service.rooms.waits("a"):  # noqa: ASYNC110  # turns of the event loop, no time
            await asyncio.sleep(0)
        await store.put([C], "")
        assert not waiting.done()
        first.cancel()
        await waiting
        assert await store.read([B]) == [data_of(B)]
        await store.at_rest()


async def test_a_lease_does_not_last_for_ever() -> None:
    """Whatever a reader does or does not do with it."""
    async with rig(dram_bytes=2 * BLOCK, lease_timeout_s=0.1, transfer_timeout_s=60) as store:
        await store.put([A, B])
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 2
        assert (await call.read()).message.HasField("done")
        assert await store.put([C, D]) == (0, 2)
        call.cancel()
        await store.at_rest()
