"""Runs: the engine goes on by itself, across the borders of blocks, until there is something to decide."""

import pytest

from moonpool.base.kv.keys import block_keys
from moonpool.engine.decode.live_requests import GATHERED_TOKENS
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, decoding, prompt, spec

MANY = 3 * BLOCK


async def test_a_run_goes_on_across_blocks() -> None:
    """The blocks that become full in it are known by their keys, as if each step had been asked for."""
    tokens = prompt(BLOCK + 3)
    answer = continuation(tokens, MANY)
    async with decoding(run_steps=2 * BLOCK) as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=MANY))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()
        assert set(decode.service.manager.keys()) == set(block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK))
        assert decode.engine.runs == [2 * BLOCK, BLOCK - 1]  # the first one needs two blocks more than it begins with
        assert sum(decode.engine.runs) == len(decode.engine.steps) == decode.service.executor.running.steps == MANY - 1


@pytest.mark.parametrize(("run_steps", "together"), [(1, 1), (MANY, 1), (MANY, 5), (MANY, MANY)])
async def test_tokens_for_which_nobody_waits_are_told_together(run_steps: int, together: int) -> None:
    tokens, count = prompt(20), 2 * GATHERED_TOKENS + 6
    answer = continuation(tokens, count)
    async with decoding(run_steps=run_steps) as decode, conducting(decode) as conductor:
        decode.engine.together = together
        target = await reserve(decode, spec("a", tokens, max_tokens=count))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0], gather=True)
        await conductor.until(lambda: len(conductor.tokens.get("a", ())) >= GATHERED_TOKENS)
        assert conductor.messages == 1
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert conductor.messages <= 3
        await decode.rest()
        assert set(decode.service.manager.keys()) == set(block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK))
        assert decode.service.executor.running.steps == count - 1
        assert all(step.patient for step in decode.engine.steps)


async def test_what_patient_steps_wait_does_not_make_the_instance_slow() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        decode.engine.waited_ns = 10**15
        target = await reserve(decode, spec("a", tokens, max_tokens=20))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, continuation(tokens, 1)[0], gather=True)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert decode.service.core.tracker.speeds.decode_per_sequence_s < 1e3


@pytest.mark.parametrize(("slo", "gather"), [({}, False), ({"tbt_slo_s": 1e3}, True)])
async def test_steps_are_not_patient_where_somebody_waits(slo: dict[str, float], gather: bool) -> None:
    tokens = prompt(20)
    async with decoding(run_steps=MANY) as decode, conducting(decode) as conductor:
        for name, fields, gathers in (("a", {}, True), ("b", slo, gather)):
            target = await reserve(decode, spec(name, tokens, max_tokens=4), **fields)
            await transfer(decode, target, tokens)
            await conductor.start(name, target, continuation(tokens, 1)[0], gather=gathers)
        await conductor.until(lambda: {"a", "b"} <= conductor.reasons.keys())
        assert any(not step.patient for step in decode.engine.steps)


async def test_gathered_tokens_are_told_before_the_failure() -> None:
    tokens = prompt(20)
    answer = continuation(tokens, 40)
    async with decoding() as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold(after=6)
        target = await reserve(decode, spec("a", tokens, max_tokens=40))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0], gather=True)
        await reached.wait()
        decode.service.executor.die("it was unplugged")
        await conductor.until(lambda: "a" in conductor.failed)
        assert conductor.tokens["a"] == answer[1:7]
        go.set()


@pytest.mark.parametrize("ends", [True, False])
async def test_who_ends_or_comes_ends_the_run(*, ends: bool) -> None:
    """An end token, and a sequence that waits for its place."""
    first, second = prompt(20), prompt(9, seed=3)
    answer, other = continuation(first, 40), continuation(second, 12)
    async with decoding(run_steps=MANY) as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold(after=3)
        target = await reserve(decode, spec("a", first, max_tokens=40, ends=answer[6:7] if ends else ()))
        await transfer(decode, target, first)
        await conductor.start("a", target, answer[0])
        await reached.wait()
        target = await reserve(decode, spec("b", second, max_tokens=12))
        await transfer(decode, target, second)
        await conductor.start("b", target, other[0])
        await decode.until(lambda: bool(decode.engine.cuts))
        assert decode.engine.cuts == [1]
        go.set()
        await conductor.until(lambda: conductor.reasons.keys() == {"a", "b"})
        assert conductor.tokens == {"a": answer[1 : 7 if ends else 40], "b": other[1:]}
        assert decode.engine.runs[0] == 4
        assert len(decode.engine.steps[4].sequences) == 2


async def test_an_answer_that_is_complete_for_its_conductor_cuts_the_run() -> None:
    tokens = prompt(20)
    answer = continuation(tokens, 40)
    async with decoding(run_steps=MANY) as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold(after=3)
        target = await reserve(decode, spec("a", tokens, max_tokens=40))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await reached.wait()
        await conductor.cancel("a", target, choice=0)
        await decode.until(lambda: bool(decode.engine.cuts))
        go.set()
        await decode.rest()
        assert decode.engine.runs == [4]


async def test_a_sequence_that_skips_steps_gets_the_same_tokens() -> None:
    """A step without a token costs a step: the answer, its length and its blocks are the same."""
    tokens = prompt(BLOCK - 3)
    answer = continuation(tokens, MANY)
    async with decoding(run_steps=BLOCK) as decode, conducting(decode) as conductor:
        decode.engine.late_every = 3
        target = await reserve(decode, spec("a", tokens, max_tokens=MANY))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()
        assert set(decode.service.manager.keys()) == set(block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK))
        assert len(decode.engine.steps) == MANY - 1 + (MANY - 1) // 2
