"""Speculation through all services: answers are those of plain forward passes, whatever is guessed.

In batches, preempted, cached or not; greedy, drawn with a seed, with penalties and log probabilities. Each guess is
checked (`ngram`, `suffix`, `draft`), so that many are wrong.
"""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient, GenerateResult
from tests.faults.stack import children
from tests.integration.conftest import BLOCK, tokens
from tests.integration.decoding.conftest import DecodeWith
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack

ANSWER = 4 * BLOCK + 5
ALPHABET = 12
"""Different tokens of the prompts, which repeat themselves."""


NGRAM = ("--speculative", "ngram", "--num-speculative-tokens", "5", "--set", "preempt_every=7")


@pytest.fixture(scope="module", params=["ngram", "suffix", "draft"])
def stack(request: pytest.FixtureRequest, decode_with: DecodeWith, checkpoint: Path) -> CheckedStack:
    """Guesses from the text, from recent answers, and those of a small model, which is the model itself here."""
    if request.param != "draft":
        return decode_with("--speculative", request.param, *NGRAM[2:])
    return decode_with("--speculative", "draft", "--draft-model", str(checkpoint), *NGRAM[2:])


def prompts(seed: str) -> list[list[int]]:
    return [tokens(3 * BLOCK + 5 * number, f"{seed} {number}", 8 + ALPHABET) for number in range(4)]


def answers(stack: CheckedStack, asked: list[list[int]], how: SamplingParams) -> list[GenerateResult]:
    async def together() -> list[GenerateResult]:
        async with AsyncClient(stack.address) as client:
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=how) for prompt in asked))

    return asyncio.run(together())


def ask(stack: CheckedStack, asked: list[list[int]], how: SamplingParams) -> list[GenerateResult]:
    """The answers, of which some were guessed rightly."""
    before = stack.gauge("decode-", "draft_tokens_total"), stack.gauge("decode-", "accepted_tokens_total")
    results = answers(stack, asked, how)
    drafted = stack.gauge("decode-", "draft_tokens_total") - before[0]
    accepted = stack.gauge("decode-", "accepted_tokens_total") - before[1]
    print(f"{drafted} guesses, {accepted} accepted")
    assert drafted >= accepted > 0
    return results


def test_greedy_answers(stack: CheckedStack, reference: Reference) -> None:
    how = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=2)
    asked = prompts("greedy")
    preempted = stack.gauge("decode-", "preemptions_total")
    for result, prompt in zip(ask(stack, asked, how) + ask(stack, asked, how), asked + asked, strict=True):
        assert len(result.token_ids) == ANSWER
        reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)
        assert [logprob.token_id for logprob in result.logprobs or ()] == result.token_ids
        reference.assert_logprobs(prompt, result.logprobs or [], 2)
    assert stack.gauge("decode-", "preemptions_total") > preempted


@pytest.mark.parametrize("penalty", [1.0, 1.02])
def test_drawn_answers_are_those_of_their_seed(stack: CheckedStack, reference: Reference, penalty: float) -> None:
    how = SamplingParams(
        max_tokens=ANSWER, temperature=0.1, top_p=0.9, seed=11, ignore_eos=True, repetition_penalty=penalty
    )
    asked = prompts("drawn")
    for result, prompt in zip(ask(stack, asked, how), asked, strict=True):
        assert result.token_ids == reference.drawn(prompt, result.token_ids, how)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recent_answers_guess_for_the_same_prompts(
    stack: CheckedStack, reference: Reference, temperature: float
) -> None:
    """With a seed, the second answers are the first ones; with other seeds, each is the one of its seed."""
    if "suffix" not in stack.services["decode-0"].arguments:
        pytest.skip("does not look into recent answers")
    how = SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=3, ignore_eos=True)
    asked, source = prompts(f"recent {temperature}"), 'source_accepted_tokens_total{source="answers"}'
    answers(stack, asked, how)
    before = stack.gauge("decode-", source)
    for result, prompt in zip(ask(stack, asked, how), asked, strict=True):
        if temperature:
            assert result.token_ids == reference.drawn(prompt, result.token_ids, how)
        else:
            reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)
    assert stack.gauge("decode-", source) - before > len(asked) * ANSWER / 2
    other = replace(how, seed=4)
    for result, prompt in zip(answers(stack, asked, other), asked, strict=True):
        if temperature:
            assert result.token_ids == reference.drawn(prompt, result.token_ids, other)


def test_answers_go_on_without_the_small_model(stack: CheckedStack, reference: Reference) -> None:
    """The engine of the small model is killed; the instance lives on. Without a small model, that of an instance."""
    if "draft" not in stack.services["decode-0"].arguments:
        pytest.skip("has no small model")
    how = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    asked, decode = prompts("without"), stack.services["decode-0"]
    ask(stack, asked, how)
    small, _ = children(decode.pid)  # the small model's engine starts first
    os.kill(small, signal.SIGKILL)
    accepted = stack.gauge("decode-", "accepted_tokens_total")
    for result, prompt in zip(answers(stack, asked, how), asked, strict=True):
        assert len(result.token_ids) == ANSWER
        reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)
    assert stack.gauge("decode-", "accepted_tokens_total") == accepted
    assert decode.returncode is None
