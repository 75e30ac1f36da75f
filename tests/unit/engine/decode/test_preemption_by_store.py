"""Preempted sequences read their KV back from a kvstore over gRPC; whatever the store does, the answer is the same."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.keys import block_keys
from moonpool.base.runtime.journal import journal_files, rerun
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import LAYOUT, ROOT, STORE, FakeStore, served
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation, slice_of_tokens
from tests.unit.instances import BLOCK, Decode, decoding, prompt, spec

TOKENS = prompt(2 * BLOCK + 3)
ANSWER = 2 * BLOCK


def with_prompt(store: FakeStore) -> FakeStore:
    """Prefill has written the prompt's blocks."""
    for index, key in enumerate(block_keys(ROOT, TOKENS, BLOCK)):
        store.blocks[key] = {layer: bytes(slice_of_tokens(TOKENS, index, layer)) for layer in range(LAYOUT.layers)}
    return store


async def answer(it: Decode, address: str) -> None:
    """A sequence that gives up its blocks in every step makes its answer."""
    place = kv_pb2.Instance(id="store", epoch=1, address=address)
    async with conducting(it) as conductor:
        target = await reserve(it, spec("a", TOKENS, max_tokens=ANSWER), write_back=place)
        await transfer(it, target, TOKENS)
        await conductor.start("a", target, continuation(TOKENS, 1)[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(TOKENS, ANSWER)[1:]
        assert it.service.core.preempted.preemptions >= ANSWER - 2
        await it.rest()


async def test_the_kv_comes_back_from_the_store(tmp_path: Path) -> None:
    store = with_prompt(FakeStore())
    async with (
        served((STORE, store)) as (_, address),
        decoding(preemption="store", preempt_every=1, journal_dir=str(tmp_path)) as it,
    ):
        await answer(it, address)
        assert it.service.core.stored_blocks.loaded_blocks >= 2 * (ANSWER - 2), "the prompt's blocks, each time"
        assert it.service.core.stored_blocks.failures == 0
        again = it.service.core.planner.recomputed_tokens
        assert again < (ANSWER - 2) * 2 * BLOCK, "tails only"
        it.service.executor.close()
        [file] = journal_files(tmp_path)
        assert rerun(file, check=True).difference is None


async def test_blocks_that_the_store_does_not_have_are_computed_and_then_written() -> None:
    store = FakeStore()
    async with served((STORE, store)) as (_, address), decoding(preemption="store", preempt_every=1) as it:
        await answer(it, address)
        assert set(block_keys(ROOT, TOKENS, BLOCK)) <= set(store.blocks)
        assert it.service.core.stored_blocks.loaded_blocks > 0


async def test_a_damaged_slice_is_not_taken() -> None:
    store = with_prompt(FakeStore())
    store.corrupt = True
    async with served((STORE, store)) as (_, address), decoding(preemption="store", preempt_every=1) as it:
        await answer(it, address)
        assert it.service.core.stored_blocks.loaded_blocks == 0
        assert store.get_closes


async def never(_layer: int) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("stalled", [True, False])
async def test_a_store_that_stalls_or_is_gone_costs_computing(stalled: bool) -> None:
    store = with_prompt(FakeStore())
    store.before_layer = never
    settings: dict[str, Any] = {"preemption": "store", "preempt_every": 1, "load_timeout_s": 0.02}
    async with served((STORE, store)) as (_, address), decoding(**settings) as it:
        await answer(it, address if stalled else "127.0.0.1:1")
        assert it.service.core.stored_blocks.loaded_blocks == 0
        assert it.service.core.stored_blocks.failures >= 1


async def test_cancelled_while_it_is_loaded() -> None:
    """Its blocks come back when the load is over."""
    store = with_prompt(FakeStore())
    store.before_layer = never
    settings: dict[str, Any] = {"preemption": "store", "preempt_every": 1, "load_timeout_s": 0.1}
    async with served((STORE, store)) as (_, address), decoding(**settings) as it, conducting(it) as conductor:
        place = kv_pb2.Instance(id="store", epoch=1, address=address)
        target = await reserve(it, spec("a", TOKENS, max_tokens=ANSWER), write_back=place)
        await transfer(it, target, TOKENS)
        await conductor.start("a", target, continuation(TOKENS, 1)[0])
        await it.until(lambda: it.service.core.count(RequestStatus.LOADING) == 1)
        await conductor.cancel("a", target)
        await conductor.until(lambda: len(conductor.outcomes) == 1)
        await it.rest()
