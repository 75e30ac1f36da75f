"""Pipelines: a stage that stands still or dies while a prompt or an answer is computed; all tokens are right."""

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
STAGED = ("--set", f"pipeline_parallel_size={STAGES}")
PIPELINE = ("--max-num-batched-tokens", "64", *STAGED)
FLAGS = {kind: [*BLOCK, "--set", "blocks=128"] for kind in ("prefill", "decode")}
HOW = {
    kind: SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for kind, tokens in (("prefill", 6), ("decode", 40))
}
LONG = 600
"""Tokens of a prompt of ten steps, which takes half a second."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("checkpoint") / "tiny-llama", seed=5, dtype="float32")


async def busy_one(cluster: Cluster, kind: str) -> Service:
    """The instance that computes, of the two of a kind."""
    while True:
        for name in (f"{kind}-0", f"{kind}-1"):
            if await cluster.gauge(name, "steps_in_flight"):
                return cluster.services[name]
        await asyncio.sleep(0.01)


@in_new_process
async def test_a_prompt_outlives_a_stage(simulation: Simulation, checkpoint: Path) -> None:
    flags = FLAGS | {"prefill": [*FLAGS["prefill"], *PIPELINE]}
    await outlives_a_stage(Cluster(simulation, {"prefill": 2}, flags, checkpoint=checkpoint), checkpoint, "prefill")


@pytest.mark.slow
@in_new_process
async def test_an_answer_outlives_a_stage(simulation: Simulation, checkpoint: Path) -> None:
    flags = FLAGS | {"decode": [*FLAGS["decode"], *STAGED]}
    await outlives_a_stage(Cluster(simulation, {"decode": 2}, flags, checkpoint=checkpoint), checkpoint, "decode")


async def outlives_a_stage(cluster: Cluster, checkpoint: Path, kind: str) -> None:
    """Stop, then kill each stage of the instance of a kind that works for a request."""
    judge, how = PlainJudge(checkpoint), HOW[kind]
    await cluster.start()

    async def ask(client: AsyncClient, name: str) -> GenerateResult:
        asked = prompt(LONG, name)
        result = await client.generate(token_ids=asked, sampling=how)
        assert not judge.wrong(asked, result.token_ids, how)
        assert len(result.token_ids) == how.max_tokens
        return result

    async with AsyncClient(cluster.addresses) as client:
        for number in range(STAGES):
            asking = asyncio.ensure_future(ask(client, f"stopped {number}"))
            stage = (await busy_one(cluster, kind)).stages[number]
            stage.stop()
            await asyncio.sleep(1.0)
            assert not asking.done()
            stage.resume()
            assert len((await asking).placements) == 1
            await cluster.rest()
        for number in range(STAGES):
            asking = asyncio.ensure_future(ask(client, f"killed {number}"))
            hit = await busy_one(cluster, kind)
            hit.stages[number].kill()
            await asyncio.wait([hit.task])
            assert f"engine stage {number}" in str(hit.task.exception())
            result = await asking
            assert [len(result.placements), getattr(result.placement, kind) == hit.name] == [2, False]
            await hit.start()
            await cluster.rest()
    await cluster.drain()
