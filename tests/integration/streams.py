"""Several streams at once, and something that happens to them when all are under way."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient, GenerateResult

UNDER_WAY = 5
"""Tokens after which a stream counts as under way."""


async def disturbed(
    addresses: str | Sequence[str],
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    disturb: Callable[[], None],
) -> list[GenerateResult]:
    """The answers to all prompts. `disturb` is called in a thread when each stream has had its first tokens."""
    under_way = asyncio.Barrier(len(prompts) + 1)
    async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_follow(client, prompt, sampling, under_way)) for prompt in prompts]
        await under_way.wait()
        await asyncio.to_thread(disturb)
    return [task.result() for task in tasks]


async def _follow(
    client: AsyncClient, prompt: list[int], sampling: SamplingParams, under_way: asyncio.Barrier
) -> GenerateResult:
    stream = client.stream(token_ids=prompt, sampling=sampling)
    outputs: defaultdict[int, list[int]] = defaultdict(list)
    least = 0
    async for event in stream:
        outputs[event.choice] += event.token_ids
        before, least = least, min(len(outputs[choice]) for choice in range(sampling.n))
        if before < UNDER_WAY <= least:
            await under_way.wait()
    assert stream.result is not None
    told = [choice.token_ids for choice in stream.result.choices]
    assert told == [outputs[choice] for choice in range(sampling.n)], "each token came once, in its place"
    return stream.result
