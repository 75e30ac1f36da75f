"""Pipelines of prefill: a stage that stands still or dies while a prompt is computed; all tokens are right."""

import asyncio
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from moonpool.engine.models.random_checkpoint import create
from tests.world.cluster import Cluster, Service, Simulation, prompt
from tests.world.plain import PlainJudge
from tests.world.process import in_new_process

BLOCK = ("--block-size", "16")
STAGES = 3
PIPELINE = ("--max-num-batched-tokens", "64", "--pipeline-parallel-size", str(STAGES))
FLAGS = {
    "prefill": [*BLOCK, *PIPELINE, "--set", "blocks=128"],
    "decode": [*BLOCK, "--set", "blocks=128"],
}
HOW = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = 600
"""Tokens of a prompt of ten steps, which takes half a second."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("checkpoint") / "tiny-llama", seed=5, dtype="float32")


async def busy_one(cluster: Cluster) -> Service:
    """The prefill instance that computes."""
    while True:
        for name in ("prefill-0", "prefill-1"):
            if await cluster.gauge(name, "steps_in_flight"):
                return cluster.services[name]
        await asyncio.sleep(0.01)


@in_new_process
async def test_a_prompt_outlives_a_stage(simulation: Simulation, checkpoint: Path) -> None:
    judge = PlainJudge(checkpoint)
    cluster = Cluster(simulation, {"prefill": 2}, FLAGS, checkpoint=checkpoint)
    await cluster.start()

    async def ask(client: AsyncClient, name: str) -> GenerateResult:
        asked = prompt(LONG, name)
        result = await client.generate(token_ids=asked, sampling=HOW)
        assert not judge.wrong(asked, result.token_ids, HOW)
        assert len(result.token_ids) == HOW.max_tokens
        return result

    async with AsyncClient(cluster.addresses) as client:
        for number in range(STAGES):
            asking = asyncio.ensure_future(ask(client, f"stopped {number}"))
            stage = (await busy_one(cluster)).stages[number]
            stage.stop()
            await asyncio.sleep(1.0)
            assert not asking.done()
            stage.resume()
            assert len((await asking).placements) == 1
            await cluster.rest()
        for number in range(STAGES):
            asking = asyncio.ensure_future(ask(client, f"killed {number}"))
            hit = await busy_one(cluster)
            hit.stages[number].kill()
            await asyncio.wait([hit.task])
            assert f"engine stage {number}" in str(hit.task.exception())
            result = await asking
            assert [len(result.placements), result.placement.prefill == hit.name] == [2, False]
            await hit.start()
            await cluster.rest()
    await cluster.drain()
