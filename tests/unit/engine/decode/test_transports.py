"""Transfers to a decode instance over each transport; leases that end while payloads are under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.kv.frames import Slice
from moonpool.base.kv.pool import KVPool
from moonpool.base.kv_transfer.sender import TransferSender
from tests.unit.base.transport.fakes import LAYOUT
from tests.unit.base.transport.pairs import NIXL, Cuttable, shared, transport_settings
from tests.unit.engine.decode.calls import conducting, reserve, sending
from tests.unit.fakes.engine import slice_of_tokens
from tests.unit.instances import BLOCK, WAIT_S, Decode, decoding, prompt, spec

TOKENS = prompt(3 * BLOCK + 5)
TRANSPORTS = ["local", "tcp", "tls", "grpc", NIXL]


def pool_of(tokens: list[int]) -> KVPool:
    """A prefill instance's pool with a prompt's KV, as its engine leaves it: the last block holds some tokens only."""
    pool = KVPool.create(LAYOUT, LAYOUT.blocks_for(len(tokens)), [(0, 2), (2, LAYOUT.layers)])
    for layer in range(LAYOUT.layers):
        for block in range(pool.blocks):
            pool.slice(layer, block)[:] = slice_of_tokens(tokens, block, layer)
            pool.seal(layer, block, LAYOUT.valid_tokens(len(tokens), block))
    return pool


def slices(pool: KVPool, layers: range = range(LAYOUT.layers)) -> list[Slice]:
    return [
        Slice(layer, block, data, LAYOUT.valid_tokens(len(TOKENS), block), value)
        for layer in layers
        for block in range(pool.blocks)
        for data, value in [pool.read(layer, block)]
    ]


@asynccontextmanager
async def transferring(
    folder: Path, transport: str, **options: Any
) -> AsyncIterator[tuple[Decode, TransferSender, Cuttable, KVPool]]:
    pool = pool_of(TOKENS)
    dialer = Cuttable(transport, folder, shared(pool), **options)
    async with decoding(**transport_settings(transport, folder)) as decode, sending(decode, dialer) as sender:
        yield decode, sender, dialer, pool
    pool.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_arrives_whole_and_is_what_prefill_computed(sockets: Path, transport: str) -> None:
    async with transferring(sockets, transport) as (decode, sender, _, pool), conducting(decode) as conductor:
        target = await reserve(decode, spec("a", TOKENS, max_tokens=6))
        await conductor.start("a", target, 9)
        async with await sender.open(target) as outbound:
            assert await outbound.send(slices(pool)) == LAYOUT.layers * pool.blocks * LAYOUT.slice_bytes(0)
            outbound.close(aborted=False)
            await outbound.verdict(WAIT_S)
        assert sender.transport == transport
        await conductor.until(lambda: "a" in conductor.reasons)  # the fake engine fails on any other KV


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_comes_after_a_transfer_s_end_is_dropped_and_its_memory_is_free(
    sockets: Path, transport: str
) -> None:
    async with transferring(sockets, transport) as (decode, sender, dialer, pool):
        target = await reserve(decode, spec("a", TOKENS))
        outbound = await sender.open(target)
        await outbound.send(slices(pool, range(1)))
        await decode.until(lambda: any(request.transfer.missing() < 12 for request in decode.service.executor))
        decode.service.executor.abort(next(iter(decode.service.executor)), "its lease is over")
        late = asyncio.gather(*(outbound.send(slices(pool, range(1, 2))) for _ in range(3)), return_exceptions=True)
        with pytest.raises(MoonpoolError, match="its lease is over"):
            await outbound.verdict(WAIT_S)
        await late
        again = await sender.open(await reserve(decode, spec("b", TOKENS)))
        await again.send(slices(pool))
        await again.verdict(WAIT_S)
        assert (sender.transport, dialer.failures) == (transport, 0)
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_a_connection_that_breaks_fails_its_transfers_and_the_next_goes_over_grpc(
    sockets: Path, transport: str
) -> None:
    async with transferring(sockets, transport) as (decode, sender, dialer, pool):
        first = await sender.open(await reserve(decode, spec("a", TOKENS)))
        await first.send(slices(pool, range(1)))
        dialer.cut()
        with pytest.raises(StreamBroken, match="cut"):
            await first.verdict(WAIT_S)
        assert dialer.failures == 1
        second = await sender.open(await reserve(decode, spec("b", TOKENS)))
        await second.send(slices(pool))
        await second.verdict(WAIT_S)
        assert sender.transport == "grpc"
        for request in list(decode.service.executor):
            decode.service.executor.abort(request, "not wanted")


async def test_a_damaged_block_is_named(sockets: Path) -> None:
    async with transferring(sockets, "local") as (decode, sender, _, pool):
        pool.slice(1, 2)[7] ^= 1
        outbound = await sender.open(await reserve(decode, spec("a", TOKENS)))
        with pytest.raises(TransferFailed, match="layer 1 of block 2: wrong hash"):
            await asyncio.gather(outbound.send(slices(pool)), outbound.verdict(WAIT_S))
        assert sender.transport == "local"
