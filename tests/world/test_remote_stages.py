"""Stages on hosts of their own: one is lost, stands still or is cut off in each phase; all tokens are right."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.base.errors import Unavailable
from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from moonpool.engine.models.random_checkpoint import create
from tests.world.cluster import Cluster, Service, Simulation, prompt, until
from tests.world.loop import draws
from tests.world.plain import PlainJudge
from tests.world.process import in_new_process
from tests.world.test_roles import change, kinds

POOL = ("--block-size", "16", "--set", "blocks=160")
FLAGS = {
    "prefill": (*POOL, "--max-num-batched-tokens", "64"),
    "decode": (*POOL, "--set", "preempt_every=11", "--set", "preemption=swap"),
}
HOW = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
HOSTS = 2
"""Of the instance's three stages so many are on hosts of their own."""
NOTICED_S = 2.3
"""Silence of 2 s, seen by looks every quarter second."""
CUT_S = 3.0
BEGUN_S = 1.0
"""After so long a supervisor begins an instance that has ended."""
MOMENTS_S = {"prefill": (0.02, 0.11, 0.3), "decode": (0.3, 0.55, 0.7)}
"""After requests were sent: their prompts, KV on its way, decode, several steps ahead."""
LOSSES = ("kill host", "kill process", "stop host", "stop process", "cut off")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("checkpoint") / "tiny-llama", seed=5, dtype="float32")


class Group:
    """Two instances of a kind, of which the first has stages on other hosts."""

    def __init__(self, simulation: Simulation, checkpoint: Path, kind: str) -> None:
        self.kind, self.simulation = kind, simulation
        counts, hosts = {kind: 2}, {f"{kind}-0": HOSTS}
        self.cluster = Cluster(simulation, counts, FLAGS, checkpoint=checkpoint, hosts=hosts)
        self.leader = self.cluster.services[f"{kind}-0"]
        self.stages = [self.cluster.services[f"stage-{number}"] for number in range(HOSTS)]
        self._judge = PlainJudge(checkpoint)
        self._asked = 0

    async def ask(self, client: AsyncClient, tokens: int = 150) -> GenerateResult:
        """Answer a new prompt; all tokens are right."""
        self._asked += 1
        asked = prompt(tokens, self._asked)
        result = await client.generate(token_ids=asked, sampling=HOW)
        assert not self._judge.wrong(asked, result.token_ids, HOW)
        assert len(result.token_ids) == HOW.max_tokens
        return result

    def asking(self, client: AsyncClient, count: int) -> list["asyncio.Task[GenerateResult]"]:
        """Ask for so many answers at the same time."""
        return [asyncio.create_task(self.ask(client)) for _ in range(count)]

    def is_there(self, result: GenerateResult) -> bool:
        """Whether the instance with stages on other hosts has answered."""
        return str(getattr(result.placement, self.kind)) == self.leader.name

    async def formed(self, client: AsyncClient) -> None:
        """The group forms by itself once its leader is begun, and serves."""
        while not await is_formed(self.leader):
            await asyncio.sleep(BEGUN_S)
            self.leader.begin()

        async def serves() -> bool:
            return any(map(self.is_there, await asyncio.gather(*self.asking(client, 3))))

        await until(serves, "the group serves again")
        await self.cluster.rest()


async def is_formed(leader: Service) -> bool:
    """Wait until an instance serves; False if it has lost a stage before."""
    with contextlib.suppress(Unavailable):
        return await leader.is_ready()
    return False


def lose(group: Group, loss: str, stage: Service) -> None:
    """Lose a stage."""
    match loss:
        case "kill host":
            stage.kill()
        case "kill process":
            stage.stages[0].kill()
        case "stop host":
            stage.stop()
        case "stop process":
            stage.stages[0].stop()
        case "cut off":
            group.simulation.network.partition(stage.name, group.leader.name, CUT_S)


async def each_loss(group: Group, moments_s: Sequence[float], losses: Sequence[str] = LOSSES) -> None:
    """Lose a stage in each way in each phase: it is noticed, requests go elsewhere, and the group forms again."""
    numbers = draws(group.kind)
    await group.cluster.start()
    async with AsyncClient(group.cluster.addresses) as client:
        await group.formed(client)
        for moment_s in moments_s:
            for loss in losses:
                stage = numbers.choice(group.stages)
                asking = group.asking(client, 3)
                await asyncio.sleep(moment_s)
                lose(group, loss, stage)
                began = group.simulation.time.now
                await asyncio.wait([group.leader.task])
                assert group.simulation.time.now - began <= NOTICED_S, (loss, moment_s)
                assert "engine stage" in str(group.leader.task.exception())
                results = await asyncio.gather(*asking, group.ask(client))
                assert not group.is_there(results[-1])
                if loss == "kill host":
                    stage.begin()
                elif loss == "stop host":
                    stage.resume()
                await group.formed(client)
    await group.cluster.drain()


async def others(group: Group) -> None:
    """What loses no stage, a leader that is lost, and stages that are lost while they join."""
    network, leader = group.simulation.network, group.leader
    await group.cluster.start()
    async with AsyncClient(group.cluster.addresses) as client:
        await group.formed(client)
        asking = group.asking(client, 4)
        for stage in group.stages:
            for link in ((stage.name, leader.name), (leader.name, stage.name)):
                network.disturb(*link, CUT_S, 0.1, 0.2)
        await asyncio.sleep(0.2)
        group.stages[1].stages[0].slowdown = 8.0
        await asyncio.gather(*asking)
        group.stages[1].stages[0].quicken()
        await cancel_storm(group, client)
        assert not leader.task.done()
        leader.kill()
        await group.ask(client)
        leader.begin()
        await group.formed(client)
        for moment_s in (0.0003, 0.0012, 0.4, 0.6, 0.8):
            leader.kill()
            leader.begin()
            await asyncio.sleep(moment_s)
            group.stages[0].kill()
            await group.ask(client)
            group.stages[0].begin()
            await group.formed(client)
    await group.cluster.drain()


async def cancel_storm(group: Group, client: AsyncClient) -> None:
    """Clients leave at any moment; nothing is left of their requests."""
    numbers = draws("leaves")
    for _ in range(3):
        asking = group.asking(client, 6)
        for task in asking:
            await asyncio.sleep(numbers.uniform(0.0, 0.15))
            task.cancel()
        await asyncio.wait(asking)
    await group.ask(client)
    await group.cluster.rest()


@in_new_process
async def test_a_prompt_outlives_a_stage_of_another_host(simulation: Simulation, checkpoint: Path) -> None:
    group = Group(simulation, checkpoint, "prefill")
    await each_loss(group, MOMENTS_S["prefill"][1:2], ("kill process", "stop host", "cut off"))


@pytest.mark.slow
@in_new_process
async def test_prompts_outlive_each_loss_in_each_phase(simulation: Simulation, checkpoint: Path) -> None:
    await each_loss(Group(simulation, checkpoint, "prefill"), MOMENTS_S["prefill"])


@pytest.mark.slow
@in_new_process
async def test_answers_outlive_each_loss_in_each_phase(simulation: Simulation, checkpoint: Path) -> None:
    await each_loss(Group(simulation, checkpoint, "decode"), MOMENTS_S["decode"])


@pytest.mark.slow
@in_new_process
async def test_prompts_outlive_slow_links_cancels_a_lost_leader_and_lost_joins(
    simulation: Simulation, checkpoint: Path
) -> None:
    await others(Group(simulation, checkpoint, "prefill"))


@pytest.mark.slow
@in_new_process
async def test_answers_outlive_slow_links_cancels_a_lost_leader_and_lost_joins(
    simulation: Simulation, checkpoint: Path
) -> None:
    await others(Group(simulation, checkpoint, "decode"))


@pytest.mark.slow
@in_new_process
async def test_instances_with_stages_of_other_hosts_change_roles(simulation: Simulation, checkpoint: Path) -> None:
    """All tokens are right while clients ask, and each instance has had both roles."""
    engine = (*POOL, "--max-num-batched-tokens", "128", "--set", "either_role=true", "--set", "drain_s=2")
    hosts = {"prefill-0": 1, "decode-0": 1}
    flags = {"prefill": engine, "decode": engine}
    cluster = Cluster(simulation, {"prefill": 2, "decode": 2}, flags, checkpoint=checkpoint, hosts=hosts)
    judge, drawn, over = PlainJudge(checkpoint), random.Random("roles"), asyncio.Event()
    served = set[tuple[str, str]]()

    async def keep_asking(client: AsyncClient, who: int) -> None:
        for number in itertools.count():
            asked = prompt(40 + 130 * (number % 3), f"{who} {number % 7}")
            result = await client.generate(token_ids=asked, sampling=HOW)
            assert not judge.wrong(asked, result.token_ids, HOW)
            served.update((("prefill", result.placement.prefill), ("decode", result.placement.decode)))
            if over.is_set():
                return

    await cluster.start()
    async with AsyncClient(cluster.addresses) as client:
        asking = [asyncio.create_task(keep_asking(client, who)) for who in range(4)]
        for _ in range(12):
            await asyncio.sleep(0.5)
            await change(cluster, client, drawn)
        over.set()
        await asyncio.gather(*asking)
        for name, kind in (await kinds(client)).items():
            cluster.services[name].kind_now = kind
        await cluster.rest()
    assert served.issuperset((kind, name) for kind in ("prefill", "decode") for name in hosts)
    await cluster.drain()
