"""Generating tokens from KV that came."""

import asyncio
from pathlib import Path

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.kv.keys import block_keys
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.decode.calls import conducting, reserve, sending, slices, transfer
from tests.unit.fakes.engine import UNFOLLOWED, continuation
from tests.unit.instances import BLOCK, WAIT_S, decoding, observed, prompt, read_spans, spec


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
async def test_generates_the_right_tokens(length: int, tmp_path: Path) -> None:
    """The answer is a function of the KV that came: it is right only if every byte is where it belongs."""
    tokens = prompt(length)
    answer = continuation(tokens, 6)
    async with decoding(spans=tmp_path / "spans") as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=6))
        assert (target.transfer_id, target.held_blocks, target.decode.epoch) == (1, 0, 11)
        assert decode.service.core.budget.promised == -(-length // BLOCK)
        await transfer(decode, target, tokens)
        assert decode.service.core.budget.promised == 0
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()
        assert decode.service.core.budget.expected == 0
        full = block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK)
        assert set(decode.service.manager.keys()) == set(full)
    (complete,) = read_spans(tmp_path / "spans", "transfer.complete")
    steps = read_spans(tmp_path / "spans", "decode.step")
    assert [step["args"]["requests"] for step in steps] == [["a"]] * 5
    assert complete["ts"] <= steps[0]["ts"]


@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK])
@pytest.mark.parametrize("known", [1, BLOCK + 3])
async def test_goes_on_behind_tokens_that_are_known(length: int, known: int, tmp_path: Path) -> None:
    """They are computed in one step with the next token, and are told to nobody."""
    tokens = prompt(length)
    answer = continuation(tokens, known + 4)
    async with decoding(spans=tmp_path / "spans") as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=known + 4))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0], known=[answer[1 : 1 + known]])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1 + known :]
        await decode.rest()
        full = block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK)
        assert set(decode.service.manager.keys()) == set(full)
    assert len(read_spans(tmp_path / "spans", "decode.step")) == 3


async def test_start_before_the_last_slice() -> None:
    """The sequence joins the batch only when its ledger is complete."""
    tokens = prompt(2 * BLOCK)
    answer = continuation(tokens, 3)
    async with decoding() as decode, conducting(decode) as conductor, sending(decode) as sender:
        target = await reserve(decode, spec("a", tokens, max_tokens=3))
        async with await sender.open(target) as outbound:
            await outbound.send(slices(tokens, layers=range(2)))
            await conductor.start("a", target, answer[0])
            await decode.until(lambda: any(request.started for request in decode.service.executor))
            assert decode.engine.steps == []
            await outbound.send(slices(tokens, layers=range(2, 3)))
            await outbound.verdict(WAIT_S)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]


async def test_end_token_ends() -> None:
    tokens = prompt(20)
    answer = continuation(tokens, 5)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=50, ends=[answer[3]]))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1 : answer.index(answer[3], 1) + 1]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_STOP


async def test_held_blocks_are_not_sent_again() -> None:
    """What decode has of a prompt is promised as held, and used."""
    tokens = prompt(3 * BLOCK + 2)
    answer = continuation(tokens, 4)
    async with decoding() as decode, conducting(decode) as conductor:
        for number, held in enumerate([0, 3]):
            name = f"r{number}"
            target = await reserve(decode, spec(name, tokens, max_tokens=4))
            assert target.held_blocks == held
            await transfer(decode, target, tokens)
            await conductor.start(name, target, answer[0])
            await conductor.until(lambda name=name: name in conductor.reasons)  # type: ignore[misc]
            assert conductor.tokens[name] == answer[1:]
            await decode.rest()


async def test_everything_held() -> None:
    """A prompt of whole blocks that are all here needs no slice: opening completes it."""
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, conducting(decode) as conductor:
        await transfer(decode, await reserve(decode, spec("warm", tokens)), tokens)
        target = await reserve(decode, spec("a", tokens))
        assert target.held_blocks == 2
        async with sending(decode) as sender, await sender.open(target) as outbound:
            await outbound.verdict(WAIT_S)
        await conductor.start("a", target, continuation(tokens, 1)[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(tokens, 4)[1:]
        warm = next(iter(decode.service.executor))
        decode.service.executor.abort(warm, "not wanted")


async def test_many_at_once_in_one_batch() -> None:
    prompts = {f"r{i}": prompt(5 + 7 * i, i) for i in range(5)}
    async with decoding(max_num_seqs=3) as decode, conducting(decode) as conductor:
        for name, tokens in prompts.items():
            target = await reserve(decode, spec(name, tokens, max_tokens=4))
            await transfer(decode, target, tokens)
            await conductor.start(name, target, continuation(tokens, 1)[0])
        await conductor.until(lambda: len(conductor.reasons) == 5)
        assert conductor.tokens == {name: continuation(tokens, 4)[1:] for name, tokens in prompts.items()}
        assert max(len(step.sequences) for step in decode.engine.steps) <= 3
        histograms = decode.service.context.histograms
        assert observed(histograms.step_s)[""] == observed(histograms.sequences)[""] >= len(decode.engine.steps)


async def test_first_token_must_exist() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 256)
        await conductor.until(lambda: "a" in conductor.failed)
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})


async def test_engine_dies() -> None:
    """Everything fails, nothing more is taken, and the work ends with the reason."""
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        reached, _ = decode.engine.hold()
        target = await reserve(decode, spec("a", tokens))
        await transfer(decode, target, tokens)
        waiting = await reserve(decode, spec("b", tokens))
        await conductor.start("b", waiting, 9)
        await conductor.start("a", target, 9)
        await reached.wait()
        decode.engine.fail("out of memory")
        await conductor.until(lambda: {"a", "b"} <= conductor.failed.keys())
        assert "out of memory" in conductor.failed["a"]
        await decode.until(lambda: decode.death is not None)
        with pytest.raises(Unavailable, match="out of memory"):
            await reserve(decode, spec("c", tokens))


async def test_drains() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold()
        target = await reserve(decode, spec("a", tokens, max_tokens=3))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, continuation(tokens, 1)[0])
        await reached.wait()
        decode.service.drain()
        assert decode.service.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await reserve(decode, spec("b", tokens))
        drained = asyncio.ensure_future(decode.service.drained())
        go.set()
        await conductor.until(lambda: "a" in conductor.reasons)
        await asyncio.wait_for(drained, WAIT_S)
        assert conductor.tokens["a"] == continuation(tokens, 3)[1:]


async def test_an_answer_that_cannot_go_on_in_its_format_fails_alone() -> None:
    tokens, others = prompt(BLOCK, 1), prompt(BLOCK, 2)
    broken = spec("a", tokens, max_tokens=6)
    broken.sampling.response_format, broken.sampling.grammar = "regex", UNFOLLOWED
    async with decoding() as decode, conducting(decode) as conductor:
        targets = [await reserve(decode, broken), await reserve(decode, spec("b", others, max_tokens=6))]
        await transfer(decode, targets[0], tokens)
        await transfer(decode, targets[1], others)
        answer = continuation(others, 6)
        await conductor.start("a", targets[0], 9)
        await conductor.start("b", targets[1], answer[0])
        await conductor.until(lambda: "a" in conductor.failed and "b" in conductor.reasons)
        assert conductor.failed == {"a": UNFOLLOWED}
        assert conductor.tokens == {"b": answer[1:]}
        await decode.rest()
