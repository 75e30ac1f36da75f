"""Two conductors: what is slow or drains is relieved, what stops is noticed; all tokens are right."""

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from tests.integration.streams import disturbed
from tests.world.cluster import Cluster, Simulation, answer, prompt, until
from tests.world.process import on_virtual_time

SEED = 5
SAMPLING = SamplingParams(max_tokens=200, temperature=1.0, seed=SEED, ignore_eos=True)
"""About six seconds."""
FLAGS = ["--block-size", "16", "--set", "emulated_slowdown=10"]


async def pair(simulation: Simulation) -> Cluster:
    """Two of each kind of engine."""
    counts = {"conductor": 2, "prefill": 2, "decode": 2}
    cluster = Cluster(simulation, counts, {"prefill": FLAGS, "decode": FLAGS})
    await cluster.start()
    return cluster


async def run(cluster: Cluster, name: str, disturb: Callable[[], None], answers: int = 1) -> list[GenerateResult]:
    """What comes of some streams, of so many answers each, to which something happens; all are right."""
    prompts = [prompt(100 + 60 * number, f"{name} {number}") for number in range(4)]
    results = await disturbed(cluster.addresses, prompts, replace(SAMPLING, n=answers), disturb)
    for asked, result in zip(prompts, results, strict=True):
        right = [answer(asked, SAMPLING.max_tokens, SEED + number) for number in range(answers)]
        assert [choice.token_ids for choice in result.choices] == right
    return results


@on_virtual_time
async def test_a_slow_instance_is_relieved_and_comes_back(simulation: Simulation) -> None:
    cluster = await pair(simulation)
    victim = cluster.services["decode-0"]
    await run(cluster, "usual", lambda: None)  # so that it is known how quick they are
    results = await run(cluster, "slow", lambda: victim.signal(signal.SIGUSR1))
    assert any(result.placements[0].decode == "decode-0" for result in results), "nothing ran there"
    assert {result.placement.decode for result in results} == {"decode-1"}
    victim.signal(signal.SIGUSR2)
    async with AsyncClient(cluster.addresses) as client:

        async def used() -> bool:
            again = await client.generate(token_ids=prompt(40, "again"), sampling=replace(SAMPLING, max_tokens=20))
            return again.placement.decode == "decode-0"

        await until(used, "it gets a request again")
    await cluster.rest()


@pytest.mark.parametrize("answers", [pytest.param(1, marks=pytest.mark.slow), 3])
@on_virtual_time
async def test_a_draining_instance_hands_its_sequences_over(simulation: Simulation, answers: int) -> None:
    """Also those of several answers, each behind what there is of it: the prompt is placed once more, and no token is
    lost or doubled."""
    cluster = await pair(simulation)
    victim, drained = cluster.services["decode-1"], []

    def drain() -> None:
        drained.append(simulation.loop.create_task(victim.drain()))

    results = await run(cluster, "drain", drain, answers)
    await drained[0]
    assert {result.placement.decode for result in results} == {"decode-0"}
    assert max(len(result.placements) for result in results) == 2
    await victim.start()
    await cluster.rest()


@on_virtual_time
async def test_a_stopped_conductor_costs_no_stream(simulation: Simulation) -> None:
    cluster = await pair(simulation)
    victim = cluster.services["conductor-0"]
    results = await run(cluster, "stopped conductor", victim.stop)
    assert sum(result.resumes >= 1 for result in results) == len(results) / 2, "those that the victim had"
    async with AsyncClient(cluster.addresses[1]) as client:
        assert (await client.cluster_state()).ready
    victim.resume()
    await cluster.rest()
