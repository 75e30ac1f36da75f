"""Loading a stored prefix: layer by layer, and what happens when the store does not give it."""

import asyncio
from pathlib import Path

import pytest

from moonpool.base.kv.keys import block_keys
from moonpool.base.scheduling.steps import Step
from tests.unit.base.transport.fakes import LAYOUT, ROOT
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised, source, storing
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, WAIT_S, decoding, observed, prefilling, prompt, read_spans, spec


async def test_loads_from_the_store(tmp_path: Path) -> None:
    """A stored prefix is loaded layer by layer, followed by a gated step, and goes on to decode."""
    tokens = prompt(4 * BLOCK + 3)
    async with (
        storing(tokens) as (_, place),
        prefilling(spans=tmp_path / "spans") as prefill,
        decoding() as decode,
    ):
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (0, 4 * BLOCK, 3)
        (load,), (chunk,) = first.loads, first.chunks
        assert (load.tokens, chunk.tokens) == (4 * BLOCK, 3)
        assert 0 <= load.begin_s <= load.end_s
        assert 0 <= chunk.begin_s <= chunk.end_s
        assert_arrived(decode, tokens)
        await prefill.rest()
        assert set(prefill.service.manager.keys()) == set(block_keys(ROOT, tokens, BLOCK))
        dismiss(decode)
        histograms = prefill.service.context.histograms
        assert observed(histograms.load_s) == {"kvstore": 1.0, "peer": 0.0}
        assert observed(histograms.step_s) == observed(histograms.tokens) == {"": 1.0}
        assert observed(histograms.send_s)[""] >= 1.0
    loads = read_spans(tmp_path / "spans", "kv.load")
    assert [span["args"]["layer"] for span in loads] == list(range(LAYOUT.layers))


async def test_loads_beyond_the_local_prefix() -> None:
    tokens = prompt(5 * BLOCK)
    async with storing(tokens) as (_, place), prefilling() as prefill, decoding() as decode:
        await (await begin(prefill, spec("warm", tokens[: 2 * BLOCK + 1], max_tokens=1))).to_the_end()
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(place, 5))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (2 * BLOCK, 3 * BLOCK - 1, 1)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_the_step_follows_the_load() -> None:
    """With layer 0 loaded and the rest held back, layer 0 computes and layer 1 waits at its gate.

    The pool has no blocks to compute the prefix beside the load.
    """
    tokens = prompt(3 * BLOCK + 3)
    frame = 3 * LAYOUT.slice_bytes(0)
    async with (
        storing(tokens, frame_bytes=frame) as (store, place),
        prefilling(blocks=6) as prefill,
        decoding() as decode,
    ):
        passed: list[tuple[bool, int]] = []
        gate = asyncio.Event()

        async def before(step: Step, layer: int) -> None:
            passed.append((step.gated, layer))
            if layer == 1:
                gate.set()

        async def hold_layer_1(layer: int) -> None:
            if layer == 1:
                await gate.wait()  # layer 1 leaves the store only after the step has computed layer 0

        store.before_layer = hold_layer_1
        prefill.engine.before_layer = before
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(place, 3))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == 3 * BLOCK
        assert passed == [(True, 0), (True, 1), (True, 2)]
        assert_arrived(decode, tokens)
        dismiss(decode)


@pytest.mark.parametrize("lost_at", [(0, 0), (0, 2), (1, 1), (2, 3)])
async def test_load_lost_midway(lost_at: tuple[int, int]) -> None:
    """A block is found missing when some layers are there and computed with: the rest is computed, all is right."""
    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes(0)
    async with storing(tokens, frame_bytes=frame) as (store, place), prefilling() as prefill, decoding() as decode:
        store.lost_at = lost_at
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == (lost_at[1] * BLOCK if lost_at[0] == 0 else 0)
        assert_arrived(decode, tokens)
        dismiss(decode)


@pytest.mark.parametrize("fault", ["fewer", "nothing", "corrupt", "mute", "early", "refused"])
async def test_store_does_not_give_what_it_has(fault: str) -> None:
    """Whatever the store does, the answer is right and the request not failed."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    timeout_s = 0.1 if fault == "mute" else WAIT_S  # what answers is not hurried
    async with storing(tokens) as (store, place), prefilling(load_timeout_s=timeout_s) as prefill, decoding() as decode:
        if fault == "fewer":
            del store.blocks[keys[2]]
        elif fault == "nothing":
            store.blocks.clear()
        elif fault == "refused":
            place.address = "127.0.0.1:1"
        store.corrupt, store.mute, store.done_early = fault == "corrupt", fault == "mute", fault == "early"
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == (2 * BLOCK if fault == "fewer" else 0)
        assert_arrived(decode, tokens)
        dismiss(decode)
        failed = fault not in ("fewer", "nothing")
        assert prefill.service.core.loads.sources.failures == failed
        if failed:  # and it is left alone for a while
            again = prompt(3 * BLOCK + 3, 7)
            await (await begin(prefill, spec("b", again, max_tokens=1), source=source(place, 3))).to_the_end()
            assert prefill.service.core.loads.sources.failures == 1


@pytest.mark.parametrize("fault", ["mute", "refused", "nothing", "midway"])
async def test_another_store_serves_what_the_first_does_not(fault: str) -> None:
    """As long as nothing has been handed on; after that what is missing is computed.

    The pool has no blocks to compute the prefix beside the load.
    """
    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes(0)
    async with (
        storing(tokens, frame_bytes=frame) as (store, place),
        storing(tokens) as (other, replica),
        prefilling(load_timeout_s=2.0 if fault == "mute" else WAIT_S, blocks=8) as prefill,
        decoding() as decode,
    ):
        replica.id = "replica"
        if fault == "nothing":
            store.blocks.clear()
        elif fault == "refused":
            place.address = "127.0.0.1:1"
        elif fault == "midway":
            store.lost_at = (1, 1)
        store.mute = fault == "mute"
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        story = await begin(
            prefill, sequence, target=target, source=source(place, 4), other_sources=[source(replica, 4)]
        )
        first = await story.to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.loaded_tokens, other.calls) == ((0, 0) if fault == "midway" else (4 * BLOCK, 1))
        assert_arrived(decode, tokens)
        dismiss(decode)
        if fault in ("mute", "refused"):  # the first one is left alone for a while
            again = await begin(prefill, spec("b", tokens, max_tokens=1), source=source(place, 4))
            await again.to_the_end()
            assert prefill.service.core.loads.sources.failures == 1


async def test_loads_only_where_it_is_cheaper() -> None:
    """Loading a block is predicted to take longer than computing it: it is computed."""
    tokens = prompt(2 * BLOCK + 3)
    async with storing(tokens) as (store, place), prefilling() as prefill:
        prefill.service.core.state.tracker.observe_load(1, 3600.0)
        for _ in range(60):
            prefill.service.core.state.tracker.observe_load(1, 3600.0)
        first = await (await begin(prefill, spec("a", tokens, max_tokens=1), source=source(place, 2))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == 0
        assert store.calls == 0
