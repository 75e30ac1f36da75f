"""Requests that are refused, and draining."""

import asyncio

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded, Unavailable
from moonpool.base.scheduling.latency import Speeds, attention_pairs
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.v1 import prefill_pb2
from tests.unit.engine.prefill.calls import begin
from tests.unit.instances import BLOCK, WAIT_S, prefilling, prompt, spec


async def test_refuses_what_is_wrong_or_never_fits() -> None:
    async with prefilling(blocks=4) as it:
        wrong = spec("a", prompt(20))
        wrong.chain_root = b"short"
        with pytest.raises(InvalidRequest) as refused:
            await begin(it, wrong)
        assert refused.value.field == "sequence.chain_root"
        with pytest.raises(InvalidRequest):
            await begin(it, spec("long", prompt(4 * BLOCK + 1)))


async def test_a_prompt_that_finds_a_longer_queue_than_it_may_is_told_how_long_it_is() -> None:
    async with prefilling() as it:
        with pytest.raises(InvalidRequest) as refused:
            await begin(it, spec("a", prompt(BLOCK)), max_queue_s=-1.0)
        assert refused.value.field == "max_queue_s"
        for delay_s in (-1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest) as refused:
                await begin(it, spec("a", prompt(BLOCK)), delay_s=delay_s)
            assert refused.value.field == "delay_s"
        reached, go = it.engine.hold()
        story = await begin(it, spec("a", prompt(BLOCK), max_tokens=1), max_queue_s=0.0)
        await reached.wait()
        it.service.core.state.tracker = SpeedTracker(Speeds(prefill_base_s=100.0))
        wanted = prefill_pb2.PrefillRequest(sequence=spec("b", prompt(BLOCK), max_tokens=1), max_queue_s=10.0)
        [answer] = [event async for event in it.stub.Prefill(wanted, timeout=WAIT_S)]
        assert 10.0 < answer.stale.drain_s <= 100.0
        assert answer.stale.taken == it.service.load().taken
        assert it.service.load().waiting == 0
        go.set()
        await story.to_the_end()


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
        assert 0.0 <= load.drain_s <= BLOCK  # the engine's second per token, but for what has passed
        it.service.drain()
        assert it.service.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await begin(it, spec("b", prompt(BLOCK), max_tokens=1))
        drained = asyncio.ensure_future(it.service.drained())
        go.set()
        await story.to_the_end()
        await asyncio.wait_for(drained, WAIT_S)


@pytest.mark.parametrize("stages", [1, 2])
async def test_the_time_until_it_is_free_counts_each_prompt_for_itself_and_overlapping_stages(stages: int) -> None:
    """Three prompts queue; pairs of tokens are counted within a prompt only, and what is cached is not computed."""
    async with prefilling(stages=stages) as it:
        await (await begin(it, spec("known", prompt(4 * BLOCK, seed=9), max_tokens=1))).to_the_end()
        it.service.core.state.tracker = SpeedTracker(Speeds(prefill_per_pair_s=1.0))
        assert it.service.load().drain_s == 0.0
        reached, go = it.engine.hold()
        stories = [await begin(it, spec(name, prompt(2 * BLOCK, seed=n), max_tokens=1)) for n, name in enumerate("ab")]
        stories.append(await begin(it, spec("c", prompt(4 * BLOCK, seed=9), max_tokens=1)))
        await reached.wait()
        cached = attention_pairs(1, 4 * BLOCK - 1)  # the last token is always computed
        alone = 2 * attention_pairs(2 * BLOCK, 0) + cached
        assert it.service.load().drain_s == pytest.approx(alone / stages, abs=1.0)  # less what has passed
        go.set()
        for story in stories:
            await story.to_the_end()
        assert it.service.load().drain_s == 0.0
