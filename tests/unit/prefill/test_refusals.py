"""Requests that are refused, and draining."""

import asyncio

import pytest

from moonpool.errors import InvalidRequest, Overloaded, Unavailable
from tests.unit.instances import BLOCK, WAIT_S, prefilling, prompt, spec
from tests.unit.prefill.calls import begin


async def test_refuses_what_is_wrong_or_never_fits() -> None:
    async with prefilling(blocks=4) as it:
        wrong = spec("a", prompt(20))
        wrong.chain_root = b"short"
        with pytest.raises(InvalidRequest) as refused:
            await begin(it, wrong)
        assert refused.value.field == "sequence.chain_root"
        with pytest.raises(InvalidRequest):
            await begin(it, spec("long", prompt(4 * BLOCK + 1)))


async def test_queue_is_bounded_and_drains() -> None:
    async with prefilling(max_queue=1) as it:
        reached, go = it.engine.hold()
        story = await begin(it, spec("a", prompt(BLOCK), max_tokens=1))
        await reached.wait()
        with pytest.raises(Overloaded) as refused:
            await begin(it, spec("b", prompt(BLOCK), max_tokens=1))
        assert refused.value.reason == "queue_full"
        load = it.service.load()
        assert (load.running, load.waiting, load.queued_tokens) == (1, 0, BLOCK)
        assert load.drain_s == pytest.approx(0.001 * BLOCK)  # the engine's milliseconds per token
        it.service.drain()
        assert it.service.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await begin(it, spec("b", prompt(BLOCK), max_tokens=1))
        drained = asyncio.ensure_future(it.service.drained())
        go.set()
        await story.to_the_end()
        await asyncio.wait_for(drained, WAIT_S)
