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
    async with prefilling(blocks=4) as prefill:
        wrong = spec("a", prompt(20))
        wrong.chain_root = b"short"
        with pytest.raises(InvalidRequest) as refused:
            await begin(prefill, wrong)
        assert refused.value.field == "sequence.chain_root"
        with pytest.raises(InvalidRequest):
            await begin(prefill, spec("long", prompt(4 * BLOCK + 1)))


async def test_a_prompt_that_finds_a_longer_queue_than_it_may_is_told_how_long_it_is() -> None:
    async with prefilling() as prefill:
        with pytest.raises(InvalidRequest) as refused:
            await begin(prefill, spec("a", prompt(BLOCK)), max_queue_s=-1.0)
        assert refused.value.field == "max_queue_s"
        for delay_s in (-1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest) as refused:
                await begin(prefill, spec("a", prompt(BLOCK)), delay_s=delay_s)
            assert refused.value.field == "delay_s"
        reached, go = prefill.engine.hold()
        story = await begin(prefill, spec("a", prompt(BLOCK), max_tokens=1), max_queue_s=0.0)
        await reached.wait()
        prefill.service.core.state.tracker = SpeedTracker(Speeds(prefill_base_s=100.0))
        wanted = prefill_pb2.PrefillRequest(sequence=spec("b", prompt(BLOCK), max_tokens=1), max_queue_s=10.0)
        [answer] = [event async for event in prefill.stub.Prefill(wanted, timeout=WAIT_S)]
        assert 10.0 < answer.stale.drain_s <= 100.0
        assert answer.stale.taken == prefill.service.load().taken
        assert prefill.service.load().waiting == 0
        go.set()
        await story.to_the_end()


async def test_queue_is_bounded_and_drains() -> None:
    async with prefilling(max_queue=1) as prefill:
        reached, go = prefill.engine.hold()
        story = await begin(prefill, spec("a", prompt(BLOCK), max_tokens=1))
        await reached.wait()
        with pytest.raises(Overloaded) as refused:
            await begin(prefill, spec("b", prompt(BLOCK), max_tokens=1))
        assert refused.value.reason == "queue_full"
        load = prefill.service.load()
        assert (load.running, load.waiting, load.queued_tokens) == (1, 0, BLOCK)
        assert 0.0 <= load.drain_s <= BLOCK  # the engine's second per token, but for what has passed
        prefill.service.drain()
        assert prefill.service.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await begin(prefill, spec("b", prompt(BLOCK), max_tokens=1))
        drained = asyncio.ensure_future(prefill.service.drained())
        go.set()
        await story.to_the_end()
        await asyncio.wait_for(drained, WAIT_S)


@pytest.mark.parametrize("stages", [1, 2])
async def test_the_time_until_it_is_free_counts_each_prompt_for_itself_and_overlapping_stages(stages: int) -> None:
    """Three prompts queue; pairs of tokens are counted within a prompt only, and what is cached is not computed."""
    async with prefilling(stages=stages) as prefill:
        await (await begin(prefill, spec("known", prompt(4 * BLOCK, seed=9), max_tokens=1))).to_the_end()
        prefill.service.core.state.tracker = SpeedTracker(Speeds(prefill_per_pair_s=1.0))
        assert prefill.service.load().drain_s == 0.0
        reached, go = prefill.engine.hold()
        stories = [
            await begin(prefill, spec(name, prompt(2 * BLOCK, seed=n), max_tokens=1)) for n, name in enumerate("ab")
        ]
        stories.append(await begin(prefill, spec("c", prompt(4 * BLOCK, seed=9), max_tokens=1)))
        await reached.wait()
        cached = attention_pairs(1, 4 * BLOCK - 1)  # the last token is always computed
        alone = 2 * attention_pairs(2 * BLOCK, 0) + cached
        assert prefill.service.load().drain_s == pytest.approx(alone / stages, abs=1.0)  # less what has passed
        go.set()
        for story in stories:
            await story.to_the_end()
        assert prefill.service.load().drain_s == 0.0
