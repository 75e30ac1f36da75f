"""Tenants share a decode instance: the real services on virtual time."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from moonpool.client import AsyncClient, SamplingParams
from tests.world.cluster import Cluster, Simulation, answer, prompt
from tests.world.process import on_virtual_time

SEED = 3
CALM = prompt(120, "calm")
TOKENS = 60
PLACES = 32


async def calm_times(client: AsyncClient) -> list[float]:
    """When the tokens of the calm tenant's answer come, after the request was sent; the tokens are right."""
    loop = asyncio.get_running_loop()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=SEED, temperature=1.0)
    began, times, tokens = loop.time(), list[float](), list[int]()
    async for event in client.stream(token_ids=CALM, sampling=sampling, tenant="calm", timeout_s=300):
        tokens += event.token_ids
        times += [loop.time() - began] * len(event.token_ids)
    assert tokens == answer(CALM, TOKENS, SEED)
    return times


def gaps(times: Sequence[float]) -> list[float]:
    """Times between tokens."""
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(("requests", "answers"), [(1, PLACES), (PLACES + 16, 1)], ids=["a group", "single answers"])
@on_virtual_time
async def test_a_tenant_that_fills_the_batch_does_not_silence_another(
    simulation: Simulation, requests: int, answers: int
) -> None:
    cluster = Cluster(simulation, {}, {"decode": ["--set", f"max_num_seqs={PLACES}"]})
    await cluster.start()
    async with AsyncClient(cluster.addresses) as client, asyncio.TaskGroup() as group:
        alone = await calm_times(client)
        flood = SamplingParams(max_tokens=240, ignore_eos=True, seed=SEED, temperature=1.0, n=answers)
        prompts = [prompt(100, f"flood {number}") for number in range(requests)]
        tasks = [
            group.create_task(client.generate(token_ids=each, sampling=flood, tenant="flood", timeout_s=300))
            for each in prompts
        ]
        await asyncio.sleep(2.0)
        assert not any(task.done() for task in tasks)
        beside = await calm_times(client)
        assert not any(task.done() for task in tasks), "the flood went on all the time"
        assert max(gaps(beside)) <= 5 * max(gaps(alone)), (max(gaps(beside)), max(gaps(alone)))
        assert sorted(gaps(beside))[-2] <= 3 * max(gaps(alone))
        assert beside[0] <= alone[0] + 1.0
    for asked, task in zip(prompts, tasks, strict=True):
        right = [answer(asked, flood.max_tokens, SEED + number) for number in range(answers)]
        assert [choice.token_ids for choice in task.result().choices] == right
    await cluster.rest()
