"""`--deterministic`: in low precision too, an answer is the same alone and in company, cold and cached."""

import asyncio
import dataclasses

from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, SamplingParams
from tests.integration.conftest import tokens, with_flags

SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


async def answers(address: str, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncClient(address) as client:
        results = await asyncio.gather(*(client.generate(token_ids=prompt, sampling=SAMPLING) for prompt in prompts))
    return [list(result.token_ids) for result in results]


def test_company_changes_nothing(plan: StackPlan) -> None:
    exact = with_flags(with_flags(plan, "prefill", "--deterministic"), "decode", "--deterministic")
    prompts = [tokens(length, seed=f"deterministic/{length}") for length in (7, 33, 64, 90, 131, 150)]
    with LocalStack(dataclasses.replace(exact, dtype="bfloat16")) as stack:
        alone = [asyncio.run(answers(stack.address, [prompt]))[0] for prompt in prompts]
        assert asyncio.run(answers(stack.address, prompts)) == alone
        fresh = [[*prompt[:1], *prompt] for prompt in prompts]  # no prefix of these is cached
        together = asyncio.run(answers(stack.address, fresh))
        assert [asyncio.run(answers(stack.address, [prompt]))[0] for prompt in fresh] == together
