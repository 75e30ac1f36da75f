"""Cancelled prefills give everything back."""

import asyncio

import pytest

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.v1 import kv_pb2, prefill_pb2
from tests.unit.base.transport.fakes import LAYOUT
from tests.unit.engine.prefill.calls import begin, promised, source, storing
from tests.unit.fakes.beside import Held
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, spec


async def test_cancel_while_waiting() -> None:
    """The pool is full: the second waits without blocks, leaves, and nobody notices."""
    async with prefilling(blocks=4) as prefill:
        reached, go = prefill.engine.hold()
        first = await begin(prefill, spec("a", prompt(4 * BLOCK), max_tokens=1))
        await reached.wait()
        second = await begin(prefill, spec("b", prompt(2 * BLOCK, 1), max_tokens=1))
        assert len(prefill.service.core.state.waiting) == 1
        second.call.cancel()
        await prefill.until(lambda: len(prefill.service.core.state.requests) == 1)
        go.set()
        await first.to_the_end()


async def test_cancel_in_a_step() -> None:
    """Blocks stay used until the step that writes to them is over."""
    tokens = prompt(4 * BLOCK)
    async with prefilling() as prefill, decoding() as decode:
        reached, go = prefill.engine.hold(layer=1)
        sequence = spec("a", tokens)
        story = await begin(prefill, sequence, target=await promised(decode, sequence))
        await reached.wait()
        await decode.until(lambda: any(request.table for request in decode.service.executor))
        story.call.cancel()
        await prefill.until(lambda: len(prefill.service.core.state.requests) == 0)
        assert prefill.service.manager.num_used == 4
        assert prefill.service.sending.open_transfers == 0
        go.set()
        await prefill.rest()
        assert len(prefill.engine.steps) == 1
        await decode.rest()


async def test_cancel_while_loading() -> None:
    """The gated step waits for a layer that will never come: it is aborted, and everything comes back.

    The pool has no blocks to compute the prefix beside the load.
    """

    async def first_layer_only(layer: int) -> None:
        if layer > 0:
            await asyncio.Event().wait()

    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes(0)
    async with (
        storing(tokens, frame_bytes=frame) as (store, place),
        prefilling(blocks=8) as prefill,
        decoding() as decode,
    ):
        reached, go = prefill.engine.hold()
        go.set()
        store.before_layer = first_layer_only
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        story = await begin(prefill, sequence, target=target, source=source(place, 4))
        await reached.wait()
        await decode.until(lambda: any(request.table for request in decode.service.executor))
        assert prefill.engine.steps[0].gated
        story.call.cancel()
        await prefill.rest()
        assert prefill.engine.aborts == [prefill.engine.steps[0].step_id]
        assert prefill.service.core.loads.sources.failures == 0, "the store is asked again"
        await decode.rest()


async def test_cancel_while_sending() -> None:
    """The prompt is computed, its KV still leaves: decode is told, and both sides are at rest."""
    tokens = prompt(4 * BLOCK)
    async with prefilling(rate=LAYOUT.slice_bytes(0) * 4.0) as prefill, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(prefill, sequence, target=await promised(decode, sequence))
        await story.first_token()
        await decode.until(lambda: any(request.table for request in decode.service.executor))
        assert prefill.service.manager.num_used == 4
        story.call.cancel()
        await prefill.rest()
        await decode.rest()


async def test_cancel_by_id() -> None:
    async with prefilling() as prefill:
        reached, go = prefill.engine.hold()
        story = await begin(prefill, spec("a", prompt(BLOCK), max_tokens=1))
        await reached.wait()
        for name, outcome in (("b", kv_pb2.CANCEL_OUTCOME_UNKNOWN), ("a", kv_pb2.CANCEL_OUTCOME_IN_FLIGHT)):
            answer = await prefill.stub.Cancel(prefill_pb2.CancelRequest(request_id=name))
            assert answer.outcome == outcome
        with pytest.raises(Unavailable, match="cancelled"):
            await story.read()
        go.set()
        await prefill.rest()


async def test_steps_go_on_while_a_long_prompt_is_read_and_it_may_be_cancelled_by_its_name() -> None:
    threads = Held()
    async with prefilling(executor=threads) as prefill:
        long = prefill.stub.Prefill(prefill_pb2.PrefillRequest(sequence=spec("long", prompt(6 * BLOCK))))
        await prefill.until(lambda: bool(threads.waiting))
        short = prefill.stub.Prefill(prefill_pb2.PrefillRequest(sequence=spec("short", prompt(20), max_tokens=1)))
        await prefill.until(lambda: len(threads.waiting) == 2)
        threads.waiting.rotate()
        threads.release(1)
        assert [event.WhichOneof("event") async for event in short][-1] == "finished"
        assert len(prefill.engine.steps) == 1
        answer = await prefill.stub.Cancel(prefill_pb2.CancelRequest(request_id="long"))
        assert answer.outcome == kv_pb2.CANCEL_OUTCOME_BEFORE_START
        threads.release()
        with pytest.raises(MoonpoolError, match="cancelled during validation"):
            await long.read()
        assert len(prefill.engine.steps) == 1
