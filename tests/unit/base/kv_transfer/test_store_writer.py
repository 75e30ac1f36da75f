"""Writing to a store over real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.base.errors import FrameError, InvalidRequest, MoonpoolError, Overloaded, StreamBroken, TransferFailed
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.store_writer import PutOutcome, StoreWriter, missing_slices
from moonpool.v1 import kvstore_pb2
from tests.slices import hashed
from tests.unit.base.kv_transfer.stored import KEYS, PARENTS, SLICE, WAIT_S, fill, read_content
from tests.unit.base.transport.fakes import HELLO, LAYOUT, STORE, FakeStore, content, served


@asynccontextmanager
async def writing(store: FakeStore, **options: Any) -> AsyncIterator[StoreWriter]:
    async with served((STORE, store)) as (channels, address):
        writer = StoreWriter(KVEndpoint(channels, address, HELLO, LAYOUT), **options)
        try:
            yield writer
            assert writer.channels == 0
        finally:
            await writer.aclose()


@pytest.mark.parametrize("frame_bytes", [SLICE // 2, SLICE, 3 * SLICE, 1 << 20])
async def test_put(frame_bytes: int) -> None:
    store = FakeStore(window=8 * SLICE)
    async with writing(store, frame_bytes=frame_bytes) as writer:
        assert await writer.put(KEYS, PARENTS, "t", hashed(read_content), timeout_s=WAIT_S) == PutOutcome(0, 5)
        await store.until(lambda: store.put_closes == [(1, False)])
    for index, key in enumerate(KEYS):
        assert store.blocks[key] == {layer: bytes(content(layer, index)) for layer in range(3)}
        assert store.parents[key] == PARENTS[index]


async def test_put_sends_only_what_is_not_there() -> None:
    store = FakeStore()
    fill(store, 2)
    asked: set[int] = set()

    def read(layer: int, index: int) -> memoryview:
        asked.add(index)
        return read_content(layer, index)

    async with writing(store, frame_bytes=4 * SLICE) as writer:
        assert await writer.put(KEYS[1:4], PARENTS[1:4], "", hashed(read), timeout_s=WAIT_S) == PutOutcome(1, 2)
        assert asked == {1, 2}
        asked.clear()
        assert await writer.put(KEYS[:4], PARENTS[:4], "", hashed(read), timeout_s=WAIT_S) == PutOutcome(4, 0)
        assert await writer.put([], [], "", hashed(read), timeout_s=WAIT_S) == PutOutcome(0, 0)
        assert not asked
        await store.until(lambda: not store.puts)
        assert store.calls == 1
    assert set(store.blocks) == set(KEYS[:4])


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("there", [0, 2, 5])
async def test_a_small_put_travels_with_its_opening(takes: bool, there: int) -> None:
    store = FakeStore(window=8 * SLICE)
    store.takes = takes
    fill(store, there)
    async with writing(store) as writer:
        for _ in range(3):  # credits come back, however the frame was met
            assert await writer.put(KEYS, PARENTS, "t", hashed(read_content), timeout_s=WAIT_S) == PutOutcome(
                there, 5 - there
            )
            assert store.frames == (1 if takes or there < 5 else 0)
            for key in KEYS[there:]:
                del store.blocks[key]
            store.frames = 0
        await store.until(lambda: not store.puts)
        assert len(store.put_closes) == (0 if takes else 3)


def test_what_another_writer_finishes_meanwhile_is_not_read_any_more() -> None:
    missing = {0, 1, 3}
    slices = missing_slices(KEYS, missing, hashed(read_content), LAYOUT, 2 * SLICE)
    assert [(item.layer, item.block) for item in (next(slices), next(slices))] == [(0, 0), (0, 1)]
    missing -= {0, 3}
    assert [(item.layer, item.block) for item in slices] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", InvalidRequest),
        ("deleted", InvalidRequest),
        ("bad_frame", FrameError),
        ("kvstore_pinned", Overloaded),
        ("", TransferFailed),
    ],
)
async def test_a_refusal_says_whether_to_come_again(code: str, kind: type[MoonpoolError]) -> None:
    store = FakeStore()
    store.refuse = "open"
    store.refusal = kvstore_pb2.PutRefused(reason="keys: too many", code=code, retry_after_s=3.5)
    async with writing(store) as writer:
        with pytest.raises(kind, match="too many") as refusal:
            await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S)
    if isinstance(refusal.value, Overloaded):
        assert (refusal.value.reason, refusal.value.retry_after_s) == ("kvstore_pinned", 3.5)


async def test_a_put_says_which_deletions_it_is_younger_than() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        await writer.put(KEYS, PARENTS, "t", hashed(read_content), timeout_s=WAIT_S, forgotten=["a", "b"])
        await writer.put(KEYS, PARENTS, "t", hashed(read_content), timeout_s=WAIT_S)
    assert store.forgotten == [["a", "b"], []]


@pytest.mark.parametrize("when", ["open", "frame"])
async def test_a_refused_put(when: str) -> None:
    store = FakeStore()
    store.refuse = when
    async with writing(store) as writer:
        with pytest.raises(TransferFailed, match="full"):
            await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S)
        store.refuse = ""
        assert await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S) == PutOutcome(0, 5)
        await store.until(lambda: not store.puts)
    assert store.calls == 1


@pytest.mark.parametrize("fault", ["mute", "acks"])
async def test_a_put_without_answers_times_out_and_is_aborted(fault: str) -> None:
    store = FakeStore()
    setattr(store, fault, fault == "mute")
    async with writing(store) as writer, asyncio.timeout(WAIT_S):
        while not store.put_closes:  # of a put whose time is over before it begins, the store does not hear
            with pytest.raises(TransferFailed, match="took"):
                await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=0.2)


async def test_a_put_that_cannot_read_is_aborted() -> None:
    store = FakeStore()

    def read(layer: int, index: int) -> memoryview:
        raise RuntimeError("no such block")

    async with writing(store) as writer:
        with pytest.raises(RuntimeError, match="no such block"):
            await writer.put(KEYS, PARENTS, "", hashed(read), timeout_s=WAIT_S)
        await store.until(lambda: store.put_closes == [(1, True)])
        assert not store.puts


async def test_a_cancelled_put_is_aborted_and_the_stream_lives() -> None:
    store = FakeStore()
    store.acks = False
    async with writing(store) as writer:
        put = asyncio.ensure_future(writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S))
        await store.until(lambda: len(store.blocks) == 5)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert writer.channels == 0
        assert await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S) == PutOutcome(5, 0)
        assert store.calls == 1


async def test_a_broken_stream_fails_the_put_and_the_next_reconnects() -> None:
    store = FakeStore()
    store.mute = True
    async with writing(store) as writer:
        put = asyncio.ensure_future(writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S))
        await store.until(lambda: bool(store.parents))
        store.break_now.set()
        with pytest.raises(StreamBroken, match="on purpose"):
            await put
        store.mute = False
        assert await writer.put(KEYS, PARENTS, "", hashed(read_content), timeout_s=WAIT_S) == PutOutcome(0, 5)
        assert store.calls == 2
