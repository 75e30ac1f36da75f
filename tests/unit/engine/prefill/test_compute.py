"""Computing prompts and streaming their KV to decode."""

from pathlib import Path

import pytest

from moonpool.base.contracts import logprobs_from_proto
from moonpool.base.kv.keys import block_keys, tokens_to_bytes
from tests.unit.base.transport.fakes import LAYOUT, ROOT
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised
from tests.unit.fakes.engine import next_token, scores_of
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, read_spans, spec


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("stages", [1, 2])
async def test_computes_and_streams(length: int, stages: int, tmp_path: Path) -> None:
    tokens = prompt(length)
    async with prefilling(stages=stages, spans=tmp_path / "spans") as prefill, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(prefill, sequence, target=await promised(decode, sequence))
        first = await story.to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (0, 0, length)
        assert story.finished is not None
        assert story.finished.sent_bytes == LAYOUT.blocks_for(length) * LAYOUT.block_bytes
        assert_arrived(decode, tokens)
        await prefill.rest()
        assert prefill.service.manager.num_cached == length // BLOCK
        assert set(prefill.service.manager.keys()) == set(block_keys(ROOT, tokens, BLOCK))
        dismiss(decode)
    chunks = -(-length // (2 * BLOCK))
    assert len(read_spans(tmp_path / "spans", "step")) == chunks
    assert len(read_spans(tmp_path / "spans", "engine.layer")) == chunks * LAYOUT.layers
    sends = read_spans(tmp_path / "spans", "kv.send")
    assert {span["args"]["layer"] for span in sends} == set(range(LAYOUT.layers))
    assert sum(span["args"]["bytes"] for span in sends) == LAYOUT.blocks_for(length) * LAYOUT.block_bytes


@pytest.mark.parametrize("length", [1, 2 * BLOCK, 5 * BLOCK + 3])
async def test_log_probabilities_of_the_prompt(length: int) -> None:
    """They come step by step, and are told together."""
    tokens = prompt(length)
    async with prefilling() as prefill:
        asked = spec("a", tokens)
        asked.sampling.prompt_logprobs = 0
        story = await begin(prefill, asked)
        told = await story.first_token()
        assert logprobs_from_proto(told.prompt_logprobs) == scores_of(tokens_to_bytes(tokens[1:]))
        while await story.read():
            pass
        await prefill.rest()


async def test_a_layer_leaves_while_the_next_waits() -> None:
    """Layer 0 of the prompt is at decode before layer 1 has begun."""
    tokens = prompt(2 * BLOCK)
    async with prefilling() as prefill, decoding() as decode:
        reached, go = prefill.engine.hold(layer=1)
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        (request,) = decode.service.executor
        story = await begin(prefill, sequence, target=target)
        await reached.wait()
        await decode.until(lambda: request.transfer.missing() == 2 * (LAYOUT.layers - 1))
        go.set()
        await story.to_the_end()
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_first_token_waits_for_no_transfer() -> None:
    """The token is told while the last frames cannot leave yet."""
    tokens = prompt(2 * BLOCK)
    rate = LAYOUT.block_bytes * 2 / 0.3  # the whole transfer takes about 0.3 s
    async with prefilling(rate=rate) as prefill, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(prefill, sequence, target=await promised(decode, sequence))
        await story.first_token()
        (request,) = decode.service.executor
        assert not request.complete
        assert await story.read() == "finished"
        assert story.finished is not None
        assert story.finished.transfer_tail_s > 0
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_only_one_token_wanted() -> None:
    """Without a target nothing is sent, and the answer is the same."""
    tokens = prompt(2 * BLOCK + 1)
    async with prefilling() as prefill:
        story = await begin(prefill, spec("a", tokens, max_tokens=1))
        assert (await story.to_the_end()).token_id == next_token(tokens)
        assert story.finished is not None
        assert story.finished.sent_bytes == 0


@pytest.mark.parametrize(
    ("length", "local"), [(3 * BLOCK - 1, 2 * BLOCK), (3 * BLOCK, 3 * BLOCK - 1), (3 * BLOCK + 1, 3 * BLOCK)]
)
async def test_local_prefix(length: int, local: int) -> None:
    """The second time only what is not cached is computed; the last token always is. Decode gets all of it."""
    tokens = prompt(length)
    async with prefilling() as prefill, decoding() as decode:
        await (await begin(prefill, spec("warm", tokens, max_tokens=1))).to_the_end()
        sequence = spec("a", tokens)
        first = await (await begin(prefill, sequence, target=await promised(decode, sequence))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.computed_tokens) == (local, length - local)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_what_decode_holds_is_not_sent() -> None:
    tokens = prompt(3 * BLOCK + 2)
    async with prefilling() as prefill, decoding() as decode:
        sequence = spec("a", tokens)
        for held in (0, 3):
            target = await promised(decode, sequence)
            assert target.held_blocks == held
            story = await begin(prefill, sequence, target=target)
            await story.to_the_end()
            assert story.finished is not None
            assert story.finished.sent_bytes == (4 - held) * LAYOUT.block_bytes
            assert_arrived(decode, tokens)
            dismiss(decode)


async def test_many_at_once() -> None:
    prompts = [prompt(9 + 11 * i, i) for i in range(6)]
    async with prefilling(stages=2) as prefill:
        stories = [await begin(prefill, spec("same id", tokens, max_tokens=1)) for tokens in prompts]
        firsts = [await story.to_the_end() for story in stories]
        assert [first.token_id for first in firsts] == [next_token(tokens) for tokens in prompts]
