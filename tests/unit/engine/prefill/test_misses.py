"""A store that has lost blocks: the request is served, and the first token says which block was missing."""

import asyncio

import pytest

from moonpool.base.kv.keys import block_keys
from moonpool.v1 import kv_pb2, prefill_pb2
from tests.unit.base.transport.fakes import LAYOUT, ROOT, STORE, FakeStore, served
from tests.unit.fakes.engine import slice_of_tokens
from tests.unit.instances import BLOCK, WAIT_S, prefilling, prompt, spec

TOKENS = prompt(4 * BLOCK + 3)
KEYS = block_keys(ROOT, TOKENS, BLOCK)


def full_store() -> FakeStore:
    store = FakeStore(frame_bytes=4 * LAYOUT.slice_bytes(0))
    for index, key in enumerate(KEYS):
        store.blocks[key] = {n: bytes(slice_of_tokens(TOKENS, index, n)) for n in range(LAYOUT.layers)}
    return store


async def misses(store: FakeStore, believed: int = 4) -> list[tuple[str, int]]:
    """Serves a prompt whose prefix is believed to be in the store; returns what was reported missing."""
    async with served((STORE, store)) as (_, address), prefilling() as prefill, asyncio.timeout(WAIT_S):
        place = kv_pb2.Instance(id="store", epoch=1, kind=kv_pb2.INSTANCE_KIND_KVSTORE, address=address)
        source = prefill_pb2.PrefixSource(instance=place, blocks=believed)
        request = prefill_pb2.PrefillRequest(sequence=spec("a", TOKENS, max_tokens=1), source=source)
        first = [event.first_token async for event in prefill.stub.Prefill(request) if event.HasField("first_token")]
        return [(miss.store.id, miss.block) for miss in first[0].misses]


@pytest.mark.parametrize("lost", [0, 2, 3])
async def test_the_first_block_that_the_store_has_lost_is_reported(lost: int) -> None:
    store = full_store()
    del store.blocks[KEYS[lost]]
    assert await misses(store) == [("store", lost)]


@pytest.mark.parametrize("lost_at", [(0, 2), (1, 1)])
async def test_a_block_lost_during_the_load_is_reported(lost_at: tuple[int, int]) -> None:
    store = full_store()
    store.lost_at = lost_at
    assert await misses(store) == [("store", lost_at[1])]


async def test_a_store_that_has_all_or_fails_otherwise_is_not_reported() -> None:
    assert await misses(full_store()) == []
    damaged = full_store()
    damaged.corrupt = True
    assert await misses(damaged) == []
