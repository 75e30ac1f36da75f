"""A store that stalls in the middle of a load delays no other prompt, and its own by no more than computing takes."""

import asyncio

from tests.unit.base.transport.fakes import LAYOUT, FakeStore
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised, source, storing
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, spec

NO_SPARE_BLOCKS = 8
"""The late prompt has five of them."""


def stall_after_layer_0(store: FakeStore) -> asyncio.Event:
    """Layer 0 comes, the others when the event is set."""
    go_on = asyncio.Event()

    async def before(layer: int) -> None:
        if layer > 0:
            await go_on.wait()

    store.before_layer = before
    return go_on


async def test_others_go_on_while_a_load_stalls_and_it_is_used_when_it_comes() -> None:
    """The step that follows the load waits at layer 1; when another prompt comes, it goes on without the late one.

    The pool has no blocks to compute the late prompt's prefix beside the load.
    """
    tokens, others = prompt(4 * BLOCK + 3), [prompt(2 * BLOCK + 1, seed) for seed in (1, 2, 3)]
    async with (
        storing(tokens, frame_bytes=4 * LAYOUT.slice_bytes(0)) as (store, place),
        prefilling(load_timeout_s=20.0, blocks=NO_SPARE_BLOCKS) as prefill,
        decoding() as decode,
    ):
        go_on = stall_after_layer_0(store)
        reached, go = prefill.engine.hold(layer=1)
        go.set()
        sequence = spec("late", tokens)
        late = await begin(prefill, sequence, target=await promised(decode, sequence), source=source(place, 4))
        await reached.wait()
        for number, other in enumerate(others):
            quick = await begin(prefill, spec(f"quick-{number}", other, max_tokens=1))
            assert (await quick.to_the_end()).token_id == next_token(other)
        assert late.token is None
        go_on.set()
        first = await late.to_the_end()
        assert (first.token_id, first.loaded_tokens, first.computed_tokens) == (next_token(tokens), 4 * BLOCK, 3)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_a_shared_step_goes_on_without_the_prompt_whose_load_stalls() -> None:
    tokens, other = prompt(4 * BLOCK + 3), prompt(BLOCK + 1, 1)
    async with (
        storing(tokens, frame_bytes=4 * LAYOUT.slice_bytes(0)) as (store, place),
        prefilling(load_timeout_s=20.0) as prefill,
        decoding() as decode,
    ):
        go_on = stall_after_layer_0(store)
        reached, go = prefill.engine.hold()
        first = await begin(prefill, spec("first", prompt(2 * BLOCK, 2), max_tokens=1))
        await reached.wait()
        sequence = spec("late", tokens)
        late = await begin(prefill, sequence, target=await promised(decode, sequence), source=source(place, 4))
        quick = await begin(prefill, spec("quick", other, max_tokens=1))
        loads = prefill.service.core.state.requests
        await prefill.until(
            lambda: any(
                request.prefix.load is not None and request.prefix.load.layers == 1 for request in loads.values()
            )
        )
        go.set()
        await first.to_the_end()
        assert (await quick.to_the_end()).token_id == next_token(other)
        shared = prefill.engine.steps[1]
        assert shared.gated
        assert len(shared.sequences) == 2
        assert prefill.engine.drops == [(shared.step_id, 0)]
        go_on.set()
        assert (await late.to_the_end()).token_id == next_token(tokens)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_past_its_deadline_the_rest_is_computed_while_others_go_on() -> None:
    tokens, other = prompt(4 * BLOCK + 3), prompt(2 * BLOCK + 1, 1)
    async with (
        storing(tokens, frame_bytes=4 * LAYOUT.slice_bytes(0)) as (store, place),
        prefilling(load_timeout_s=2.0, blocks=NO_SPARE_BLOCKS) as prefill,
        decoding() as decode,
    ):
        stall_after_layer_0(store)
        sequence = spec("late", tokens)
        late = await begin(prefill, sequence, target=await promised(decode, sequence), source=source(place, 4))
        quick = await begin(prefill, spec("quick", other, max_tokens=1))
        assert (await quick.to_the_end()).token_id == next_token(other)
        assert late.token is None
        first = await late.to_the_end()
        assert (first.token_id, first.loaded_tokens) == (next_token(tokens), 0)
        assert prefill.service.core.loads.sources.failures == 1
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_a_stalled_load_is_overtaken() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with (
        storing(tokens, frame_bytes=4 * LAYOUT.slice_bytes(0)) as (store, place),
        prefilling(load_timeout_s=20.0, token_s=0.001) as prefill,
        decoding() as decode,
    ):
        stall_after_layer_0(store)
        sequence = spec("late", tokens)
        late = await begin(prefill, sequence, target=await promised(decode, sequence), source=source(place, 4))
        first = await late.to_the_end()
        assert (first.token_id, first.loaded_tokens) == (next_token(tokens), 0)
        assert first.overtaken_tokens == 4 * BLOCK
        assert (prefill.service.core.loads.overtaken, prefill.service.core.loads.sources.failures) == (1, 0)
        assert_arrived(decode, tokens)
        dismiss(decode)
