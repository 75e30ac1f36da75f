"""Answers do not depend on preemption: a decode instance that takes every sequence's KV away, again and again.

Each way of giving blocks up, in every step, at each place in a block, and in a pool too small for all.
"""

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from moonpool.sampling import stream_seed
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack

POOL = 26
ANSWER = 3 * BLOCK + 5


@dataclass(frozen=True)
class Served:
    """A running stack whose decode instance preempts."""

    way: str
    stack: CheckedStack
    reference: Reference

    async def _all(self, asked: list[tuple[list[int], SamplingParams]]) -> list[GenerateResult]:
        async with AsyncClient(self.stack.address) as client:
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=how) for prompt, how in asked))

    def check(self, prompts: list[list[int]], answer: int) -> None:
        """Greedy and sampled answers to the prompts, all at once, are the reference's."""
        hows = [
            SamplingParams(max_tokens=answer, temperature=float(n % 2), seed=n, ignore_eos=True)
            for n in range(len(prompts))
        ]
        for prompt, how, result in zip(
            prompts, hows, asyncio.run(self._all(list(zip(prompts, hows, strict=True)))), strict=True
        ):
            assert len(result.token_ids) == answer
            if how.temperature:
                assert max(self.reference.misses(prompt, result.token_ids, how.seed or 0)) <= GAP_TOLERANCE
            else:
                self.reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)

    def check_several(self, prompt: list[int], how: SamplingParams) -> None:
        """Each of several answers is the reference's for its seed."""
        [result] = asyncio.run(self._all([(prompt, dataclasses.replace(how, ignore_eos=True))]))
        assert len(result.choices) == how.n
        for index, choice in enumerate(result.choices):
            assert len(choice.token_ids) == how.max_tokens
            seed = stream_seed(how.seed or 0, index)
            assert max(self.reference.misses(prompt, choice.token_ids, seed)) <= GAP_TOLERANCE


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    flags = ["--preempt-every", "1", "--assumed-answer-tokens", "4", "--step-tokens", "40", "--blocks", str(POOL)]
    plan = with_flags(small_plan(checkpoint, tmp_path_factory.mktemp("stack")), "decode", *flags)
    with CheckedStack(plan, invariants=True) as stack:
        yield stack


@pytest.fixture(scope="module", params=["cache", "recompute", "swap", "store"])
def served(request: pytest.FixtureRequest, stack: CheckedStack, reference: Reference) -> Served:
    """The stack with a decode instance that preempts this way."""
    stack.services["decode-0"].arguments += ["--preemption", request.param]
    stack.restart("decode-0")
    return Served(request.param, stack, reference)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_alone(served: Served, length: int) -> None:
    """Preempted after every token, so at each border of a block."""
    before = served.stack.gauge("decode-", "preemptions")
    served.check([tokens(length, f"{served.way} {length}")], BLOCK + 3)
    assert served.stack.gauge("decode-", "preemptions") - before >= BLOCK


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_several_answers(served: Served, length: int) -> None:
    """A group is preempted whole after every token, so at each border of a block; each answer is that of its seed."""
    prompt, before = tokens(length, f"{served.way} several {length}"), served.stack.gauge("decode-", "preemptions")
    served.check_several(prompt, SamplingParams(max_tokens=BLOCK + 3, temperature=1.0, seed=2**64 - 2, n=4))
    assert served.stack.gauge("decode-", "preemptions") - before >= BLOCK


def test_in_company_and_too_many(served: Served) -> None:
    """Eight sequences grow to twice the pool."""
    loaded = served.stack.gauge("decode-", "loaded_blocks")
    prompts = [tokens(5 + 6 * number, f"{served.way} company {number}") for number in range(8)]
    assert sum(-(-(len(prompt) + ANSWER) // BLOCK) for prompt in prompts) > 1.5 * POOL
    served.check(prompts, ANSWER)
    swaps = served.stack.gauge("decode-", "swaps")
    assert (swaps > 0) == (served.way == "swap")
    assert (served.stack.gauge("decode-", "loaded_blocks") > loaded) == (served.way == "store")
