"""A small model's guesses: what they are, what they take of the small model's pool, and answers that stay the same."""

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.decode.draft_model import DraftModel, DraftRequest
from moonpool.engine.decode.speculation import DraftPlanner
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import LAYOUT
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import FakeEngine, continuation
from tests.unit.instances import decoding, prompt, spec

BLOCK, LONGEST, MANY = LAYOUT.block_size, 512, 60


@asynccontextmanager
async def drafting(blocks: int = 64, longest: int = LONGEST) -> AsyncIterator[tuple[DraftModel, FakeEngine]]:
    engine = FakeEngine(blocks, run_steps=64)
    try:
        yield DraftModel(engine, longest), engine
    finally:
        engine.pool.close()


def request(number: int, tokens: Sequence[int], most: int = 4) -> DraftRequest:
    return DraftRequest(number, array("i", tokens), SampleSpec(), most)


async def test_guesses_are_what_the_small_model_says() -> None:
    """Its tokens depend on all KV before them, so KV of wrong guesses, or of other tokens, would change them."""
    tokens, other = prompt(BLOCK + 3), prompt(2 * BLOCK - 1, 7)
    async with drafting() as (model, engine):
        found = await model.guess([request(1, tokens), request(2, other, 2)])
        assert found == [continuation(tokens, 4), continuation(other, 2)]
        computed = sum(len(part.token_ids) // 4 for part in engine.steps[0].sequences)
        assert computed == len(tokens) + len(other)
        tokens += [*found[0][:2], 5]  # two were right, then another token
        assert await model.guess([request(1, tokens)]) == [continuation(tokens, 4)]
        assert len(engine.steps[4].sequences[0].token_ids) // 4 == 1
        tokens += [*continuation(tokens, 4), 9]  # all were right
        assert await model.guess([request(1, tokens, 6)]) == [continuation(tokens, 6)]
        assert len(engine.steps[8].sequences[0].token_ids) // 4 == 2
        model.forget(1)
        model.forget(2)
        assert model.free_blocks == engine.blocks


async def test_a_long_prompt_is_computed_in_steps() -> None:
    tokens = prompt(5 * BLOCK + 2)
    async with drafting() as (_, engine):
        engine.max_num_batched_tokens = BLOCK + 1
        assert await DraftModel(engine, LONGEST).guess([request(1, tokens)]) == [continuation(tokens, 4)]
        assert max(len(step.sequences[0].token_ids) // 4 for step in engine.steps) == BLOCK + 1


async def test_answers_make_room_for_others() -> None:
    async with drafting(blocks=5) as (model, engine):
        texts = {number: prompt(BLOCK + 1, number) for number in (1, 2, 3)}
        for number in (1, 2, 1, 3):  # the third has no room: the second is the least recent
            assert await model.guess([request(number, texts[number])]) == [continuation(texts[number], 4)]
        steps = len(engine.steps)
        await model.guess([request(1, texts[1])])
        assert len(engine.steps[steps].sequences[0].token_ids) // 4 == 1
        steps = len(engine.steps)
        assert await model.guess([request(number, texts[number]) for number in (1, 2, 3)]) == [
            continuation(texts[1], 4), [], continuation(texts[3], 4)
        ]  # fmt: skip
        assert await model.guess([request(4, prompt(6 * BLOCK))]) == [[]]
    async with drafting(longest=BLOCK + 8) as (model, _):
        assert await model.guess([request(1, prompt(BLOCK + 5)), request(2, prompt(BLOCK))]) == [
            [], continuation(prompt(BLOCK), 4)
        ]  # fmt: skip


FREE = Speeds(decode_base_s=1.0, decode_per_sequence_s=0.0, decode_per_context_token_s=0.0)
QUICK, SLOW = replace(FREE, decode_base_s=0.1), replace(FREE, decode_base_s=0.9)


def test_guesses_are_asked_for_where_they_pay() -> None:
    planner = DraftPlanner(8, lambda: FREE)
    assert 1 < planner.model_guesses(1, 99, QUICK) <= 8
    assert planner.model_guesses(1, 99, SLOW) == 0
    always = DraftPlanner(8, lambda: FREE, always=True, ngram=False)
    assert always.model_guesses(1, 99, SLOW) == 8
    assert not always.may_pay(1, 99)
    dear = replace(FREE, decode_per_sequence_s=1.0)
    assert DraftPlanner(8, lambda: dear).model_guesses(4, 99, QUICK) == 0


def test_wrong_guesses_are_not_asked_for_until_they_are_forgotten() -> None:
    planner = DraftPlanner(8, lambda: FREE)
    for _ in range(20):
        planner.observe_model(1, 0, 0.8, 0.8)
    runs = next(run for run in range(999) if planner.model_guesses(1, 99, QUICK))
    assert 9 < runs < 500
    for _ in range(99):
        planner.observe_model(8, 8, 0.8, 0.8)
    assert planner.model_guesses(1, 99, QUICK) == 8
    for _ in range(99):  # the small model takes nine times what it is said to take
        planner.observe_model(8, 8, 7.2, 0.8)
    assert planner.model_guesses(1, 99, QUICK) == 0


@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 3}])
@pytest.mark.parametrize("right", [True, False])
async def test_answers_are_the_same(flags: dict[str, Any], *, right: bool) -> None:
    prompts = {name: prompt(BLOCK + 3 * seed, seed) for seed, name in enumerate("abc")}
    answers = {name: continuation(tokens, MANY) for name, tokens in prompts.items()}
    async with (
        drafting() as (model, drafts),
        decoding(speculative="draft", num_speculative_tokens=5, draft_model=model, **flags) as decode,
        conducting(decode) as conductor,
    ):
        drafts.different = decode.engine.different if right else 3
        for name, tokens in prompts.items():
            target = await reserve(decode, spec(name, tokens, max_tokens=MANY))
            await transfer(decode, target, tokens)
            await conductor.start(name, target, answers[name][0])
        await conductor.until(lambda: len(conductor.reasons) == 3)
        for name in prompts:
            assert conductor.tokens[name] == answers[name][1:]
            assert conductor.reasons[name] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()
        planner = decode.service.core.planner
        assert planner.drafted_tokens > 0
        assert (planner.accepted_tokens > planner.drafted_tokens // 2) == right
        assert model.free_blocks == drafts.blocks


async def test_answers_go_on_without_the_small_model() -> None:
    tokens = prompt(BLOCK)
    answer = continuation(tokens, MANY)
    async with (
        drafting() as (model, drafts),
        decoding(speculative="draft", draft_model=model) as decode,
        conducting(decode) as conductor,
    ):
        target = await reserve(decode, spec("a", tokens, max_tokens=MANY))
        await transfer(decode, target, tokens)
        reached, go = drafts.hold(after=20)
        await conductor.start("a", target, answer[0])
        await reached.wait()
        drafts.fail("killed")
        go.set()
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert decode.service.core.planner.accepted_tokens > 0
