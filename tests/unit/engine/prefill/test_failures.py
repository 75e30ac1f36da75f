"""A prefill whose decode instance or engine fails."""

from typing import Any

import pytest

from moonpool.base.errors import Internal, InvalidRequest, MoonpoolError, StreamBroken, TransferFailed, Unavailable
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.engine.prefill.core.events import AddRequest
from moonpool.v1 import kv_pb2
from tests.unit.engine.prefill.calls import begin, dismiss, promised
from tests.unit.fakes.engine import UNFOLLOWED
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, spec


async def test_decode_refuses_the_transfer() -> None:
    """The promise is over: the prefill fails, so that the conductor can place the request anew."""
    tokens = prompt(4 * BLOCK)
    async with prefilling() as prefill, decoding() as decode:
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        dismiss(decode)
        story = await begin(prefill, sequence, target=target)
        with pytest.raises(TransferFailed, match="no such transfer"):
            await story.to_the_end()
        target.decode.epoch += 1
        story = await begin(prefill, sequence, target=target)
        with pytest.raises(TransferFailed, match="epoch"):
            await story.to_the_end()


async def test_decode_gives_up_midway() -> None:
    tokens = prompt(2 * BLOCK)
    async with prefilling() as prefill, decoding() as decode:
        reached, go = prefill.engine.hold(layer=1)
        sequence = spec("a", tokens)
        story = await begin(prefill, sequence, target=await promised(decode, sequence))
        await reached.wait()
        await decode.until(lambda: any(request.table for request in decode.service.executor))
        dismiss(decode)
        go.set()
        with pytest.raises((TransferFailed, StreamBroken), match="not wanted"):
            await story.to_the_end()


async def test_decode_gone() -> None:
    sequence = spec("a", prompt(2 * BLOCK))
    async with prefilling() as prefill:
        nobody = kv_pb2.Instance(id="decode-9", epoch=3, address="127.0.0.1:1")
        target = kv_pb2.TransferTarget(decode=nobody, transfer_id=1, generation=1)
        with pytest.raises(MoonpoolError):
            await (await begin(prefill, sequence, target=target)).to_the_end()
        async with decoding() as decode:
            target = await promised(decode, sequence)
            await (await begin(prefill, sequence, target=target)).to_the_end()
            dismiss(decode)


async def test_decode_stops_in_the_middle() -> None:
    """Its streams end: the transfer fails, and the next decode instance under that name is served."""
    sequence = spec("a", prompt(2 * BLOCK))
    async with prefilling() as prefill:
        reached, go = prefill.engine.hold(layer=1)
        async with decoding() as decode:
            story = await begin(prefill, sequence, target=await promised(decode, sequence))
            await reached.wait()
            await decode.until(lambda: any(request.table for request in decode.service.executor))
            dismiss(decode)
        go.set()
        with pytest.raises((TransferFailed, StreamBroken)):
            await story.to_the_end()
        prefill.engine.before_layer = None
        async with decoding(epoch=12) as decode:
            await (await begin(prefill, sequence, target=await promised(decode, sequence))).to_the_end()
            dismiss(decode)


async def test_engine_dies() -> None:
    """All requests fail, the work ends with the reason, nothing more is taken."""
    async with prefilling() as prefill:
        reached, _ = prefill.engine.hold()
        stories = [await begin(prefill, spec(f"r{n}", prompt(BLOCK, n), max_tokens=1)) for n in range(2)]
        await reached.wait()
        prefill.engine.fail("out of memory")
        for story in stories:
            with pytest.raises(Unavailable, match="out of memory"):
                await story.to_the_end()
        await prefill.until(lambda: prefill.death is not None)
        with pytest.raises(Unavailable, match="out of memory"):
            await begin(prefill, spec("late", prompt(BLOCK), max_tokens=1))


async def test_a_prompt_whose_answer_cannot_begin_in_its_format() -> None:
    """The error names what is wrong; others that are computed in the same step go on."""
    sequence = spec("a", prompt(BLOCK, 1))
    sequence.sampling.response_format, sequence.sampling.grammar = "regex", UNFOLLOWED
    async with prefilling() as prefill:
        broken, other = await begin(prefill, sequence), await begin(prefill, spec("b", prompt(BLOCK, 2)))
        with pytest.raises(InvalidRequest, match=rf"sequence\.sampling\.grammar: {UNFOLLOWED}"):
            await broken.to_the_end()
        await other.to_the_end()
        await prefill.rest()


async def test_a_step_that_cannot_be_made_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(BLOCK, 1)

    def defect(*_: object) -> None:
        raise ValueError("a defect")

    async with prefilling() as prefill:
        with monkeypatch.context() as patch:
            patch.setattr(SequenceSampling, "at", defect)
            story = await begin(prefill, spec("a", tokens, max_tokens=1))
            with pytest.raises(Internal, match="the step could not be made: ValueError"):
                await story.to_the_end()
        await (await begin(prefill, spec("b", tokens, max_tokens=1))).to_the_end()
        await prefill.rest()


async def test_a_token_that_cannot_be_told_ends_its_request_and_no_other() -> None:
    async with prefilling() as prefill:
        executor, tokens = prefill.service.executor, prompt(BLOCK, 1)
        reached, go = prefill.engine.hold(layer=1)
        story = await begin(prefill, spec("a", tokens, max_tokens=1))
        await reached.wait()
        [request] = executor.find("a")
        request.transport = 7  # type: ignore[assignment]  # no message can say that
        go.set()
        with pytest.raises(Internal, match="the prefill failed: TypeError"):
            await story.to_the_end()
        await (await begin(prefill, spec("b", tokens, max_tokens=1))).to_the_end()
        await prefill.rest()


async def test_a_core_that_fails_outside_a_request_ends_the_instance() -> None:
    """As where a step ends: its prompts would wait for ever. They end at once, and can be placed anew."""
    async with prefilling() as prefill:
        handle = prefill.service.core.handle

        def fails(now: float, event: Any, out: list[Any]) -> None:
            if isinstance(event, IoEnded):
                raise KeyError("the core has a defect")
            handle(now, event, out)

        prefill.service.core.handle = fails  # type: ignore[method-assign]
        story = await begin(prefill, spec("a", prompt(BLOCK, 1), max_tokens=1))
        await prefill.until(lambda: prefill.death is not None)
        assert isinstance(prefill.death, Internal)
        with pytest.raises(Unavailable, match="the instance has failed"):
            await story.to_the_end()
        with pytest.raises(Unavailable, match="the instance has failed"):
            await begin(prefill, spec("b", prompt(BLOCK, 1), max_tokens=1))


async def test_a_prompt_at_which_the_core_fails_ends_alone() -> None:
    """Also where the core has it already: then its blocks come back."""
    async with prefilling() as prefill:
        handle, tokens = prefill.service.core.handle, prompt(BLOCK, 1)

        def fails(now: float, event: Any, out: list[Any]) -> None:
            handle(now, event, out)
            if isinstance(event, AddRequest):
                raise KeyError("the core has a defect")

        prefill.service.core.handle = fails  # type: ignore[method-assign]
        with pytest.raises(Internal):
            await begin(prefill, spec("a", tokens, max_tokens=1))
        prefill.service.core.handle = handle  # type: ignore[method-assign]
        await (await begin(prefill, spec("b", tokens, max_tokens=1))).to_the_end()
        await prefill.rest()
        assert prefill.death is None
