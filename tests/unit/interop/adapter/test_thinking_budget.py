"""Engines of other makes think no longer than asked: the adapter ends the thinking, and asks the engine anew behind."""

import random
from array import array
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.thinking import ThinkingBudget
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EngineLoad, EngineOutput, EnginePrompt
from moonpool.interop.adapter.engine_answer import FINISHES, EngineAnswer
from tests.unit.conductor.stack import TINY
from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, next_token
from tests.unit.interop.adapter.test_adapter import GREEDY, cluster
from tests.unit.interop.adapter.test_pairs import pairs

VOCABULARY, END_TOKEN = 9, 0
MARKS = ("<think>", "</think>")


def right(prompt: list[int], thinking: ThinkingBudget, most: int, vocab_size: int, ends: tuple[int, ...]) -> list[int]:
    """The answer of an engine that knows the budget, token by token."""
    tokens = array("i", prompt)
    while len(tokens) < len(prompt) + most:
        forced = thinking.forced(tokens, len(prompt))
        tokens.append(next_token(tokens.tolist(), vocab_size) if forced is None else forced)
        if forced is None and tokens[-1] in ends:
            break
    return tokens[len(prompt) :].tolist()


class Engine(EngineClient):
    """Chooses by a function of the tokens, and tells up to `most` of them at once.

    Attributes:
        asked: what it was asked for.
        closed: answers that ended, or that nobody wanted any more.
    """

    def __init__(self, draw: random.Random, most: int) -> None:
        self._draw, self._most = draw, most
        self.asked: list[EnginePrompt] = []
        self.closed = 0

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        self.asked.append(prompt)
        try:
            for output in self._outputs(prompt):
                yield output
        finally:
            self.closed += 1

    def _outputs(self, prompt: EnginePrompt) -> Iterator[EngineOutput]:
        tokens, part = prompt.token_ids.tolist(), list[int]()
        for left in reversed(range(prompt.max_tokens)):
            token = next_token(tokens, VOCABULARY)
            tokens.append(token)
            part.append(token)
            finish = "stop" if token in prompt.end_token_ids else "" if left else "length"
            if finish or len(part) >= self._draw.randint(1, self._most):
                yield EngineOutput(tuple(part), finish=finish)
                part = []
            if finish:
                return

    async def describe(self) -> EngineFacts:
        raise NotImplementedError

    async def load(self) -> tuple[str, EngineLoad]:
        raise NotImplementedError

    async def clear_cache(self) -> bool:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("seed", range(60))
async def test_an_answer_is_that_of_an_engine_that_knows_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    end = tuple(draw.choices(range(1, VOCABULARY), k=draw.randint(1, 3)))
    thinking = ThinkingBudget(draw.randrange(12), (draw.randrange(1, VOCABULARY),), end, draw.random() < 0.6)
    prompt, most = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5))], draw.randint(1, 40)
    ends = (END_TOKEN,) * draw.randrange(2)
    expected = right(prompt, thinking, most, VOCABULARY, ends)
    moved = draw.randrange(len(expected))  # an answer that moved begins behind some of its tokens
    asked = EnginePrompt(
        "r/0", array("i", prompt + expected[:moved]), SamplingParams(), 7, most - moved, 0, ends, "", 0, -1
    )
    engine, changes = Engine(draw, draw.randint(1, 6)), list[int]()
    answer = EngineAnswer(
        asked, lambda answer: changes.append(len(answer.tokens)), lambda _: None, thinking, len(prompt)
    )
    answer.start(engine)
    assert answer.task is not None
    await answer.task
    assert answer.error is None
    assert answer.tokens.tolist() == expected[moved:]
    finish = "stop" if ends and expected[-1] == END_TOKEN else "length"
    assert answer.finish == FINISHES[finish]
    assert changes == sorted(set(changes))  # no token is told twice
    assert engine.closed == len(engine.asked)
    assert all(again.max_tokens + len(again.token_ids) == len(prompt) + most for again in engine.asked)


async def test_a_budget_holds_behind_an_adapter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False).ids) for mark in MARKS)
    async with cluster(tmp_path, "one") as (running, [engine]):
        vocab, prompt = running.checkpoint.config.vocab_size, [*range(2 * BLOCK_SIZE), *begin]
        for tokens in (0, 5):
            engine.hits.clear()
            sampling = SamplingParams(max_tokens=20, thinking_budget=tokens, thinking_marks=MARKS, n=2, **GREEDY)
            result = await running.client.generate(token_ids=prompt, sampling=sampling)
            expected = right(prompt, ThinkingBudget(tokens, begin, end, is_open=True), 20, vocab, ())
            assert expected[tokens : tokens + len(end)] == list(end)
            assert [choice.token_ids for choice in result.choices] == [expected] * 2
            assert len(engine.hits) == 4  # asked anew once for each answer
            assert min(engine.hits[2:]) >= len(prompt) // BLOCK_SIZE  # which finds the prompt's KV
        with pytest.raises(InvalidRequest) as error:
            await running.client.generate(
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=9, thinking_budget=3, thinking_marks=MARKS, logprobs=1, **GREEDY),
            )
        assert error.value.field.endswith("logprobs")
        await running.rest()


async def test_pairs_refuse_a_budget_by_its_name(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, _, _):
        sampling: dict[str, Any] = {"thinking_budget": 3, "thinking_marks": MARKS, **GREEDY}
        with pytest.raises(InvalidRequest) as error:
            await running.client.generate(token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, **sampling))
        assert error.value.field == "sampling.thinking_budget"
