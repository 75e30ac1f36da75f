"""Records that conductors share: pulls from kvstores."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import serving
from moonpool.conductor.records import RecordSync
from moonpool.v1 import kvstore_pb2

from .fakes import WAIT_S
from .stores import FakeStore

KVSTORE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"]


@pytest.fixture
async def stores() -> AsyncIterator[tuple[FakeStore, FakeStore]]:
    both = FakeStore("kvstore-0"), FakeStore("kvstore-1")
    async with (
        serving("127.0.0.1:0", [(KVSTORE, both[0])], grace_s=0.0) as first,
        serving("127.0.0.1:0", [(KVSTORE, both[1])], grace_s=0.0) as second,
    ):
        both[0].address, both[1].address = first.address, second.address
        yield both


@pytest.fixture
async def sync(stores: tuple[FakeStore, FakeStore]) -> AsyncIterator[RecordSync]:
    async with Channels() as channels:
        records = RecordSync(channels, lambda: [store.instance for store in stores])
        yield records
        await records.aclose()


async def test_pulls_ask_a_kvstore_together(stores: tuple[FakeStore, FakeStore], sync: RecordSync) -> None:
    store, _ = stores
    store.answers.clear()
    async with asyncio.timeout(WAIT_S):
        before = [asyncio.create_task(sync.pull()) for _ in range(20)]
        await store.until(lambda: store.synced == 1)
        meanwhile = [asyncio.create_task(sync.pull()) for _ in range(20)]
        await asyncio.sleep(0)  # they have begun
        store.answers.set()
        await asyncio.gather(*before, *meanwhile)
        assert store.synced == 2  # what was asked already, and once more for all who came meanwhile


async def test_a_pull_waits_for_a_silent_kvstore_no_longer_than_it_may(
    stores: tuple[FakeStore, FakeStore], sync: RecordSync
) -> None:
    store, silent = stores
    silent.answers.clear()
    async with asyncio.timeout(WAIT_S):
        for _ in range(100):
            await sync.pull(within_s=0.0)
        await store.until(lambda: store.synced >= 1)
        await silent.until(lambda: silent.synced >= 1)
    assert silent.synced == 1
