"""Instances change roles while clients ask, on virtual time: no token is lost or doubled, and nothing stays held."""

import asyncio
import random
from pathlib import Path

import pytest

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.client import AsyncClient, SamplingParams
from moonpool.v1 import conductor_pb2, conductor_pb2_grpc, kv_pb2
from tests.journals import check_journals
from tests.world.cluster import Cluster, Simulation, answer, prompt, rpc, until
from tests.world.process import on_virtual_time

ENGINE = ["--block-size", "16", "--max-num-batched-tokens", "256", "--set", "either_role=true"]
FLAGS = {"prefill": [*ENGINE, "--set", "grace_s=1"], "decode": [*ENGINE, "--set", "max_queue=50"]}
OTHER = {"prefill": kv_pb2.INSTANCE_KIND_DECODE, "decode": kv_pb2.INSTANCE_KIND_PREFILL}
CLIENTS, CHANGES = 6, 12
LONGEST = 60


async def kinds(client: AsyncClient) -> dict[str, str]:
    """The engines' roles by id."""
    return {each.id: each.kind for each in (await client.cluster_state()).instances if each.kind in OTHER}


async def order(cluster: Cluster, name: str, kind: str) -> None:
    """Order a change by the first conductor; an order that comes at the wrong time is refused."""
    channel = world.CURRENT.get().network.channel(cluster.addresses[0], ())
    request = conductor_pb2.ChangeRoleRequest(instance_id=name, kind=OTHER[kind])
    try:
        await rpc(conductor_pb2_grpc.ConductorServiceStub(channel).ChangeRole(request))
    except (InvalidRequest, NotFound):
        return


async def ask(client: AsyncClient, number: int, stop: asyncio.Event) -> int:
    """Ask until told to stop; returns how often. Each answer is the model's."""
    drawn, asked = random.Random(f"client {number}"), 0
    while not stop.is_set():
        # Some prompts come again, so that KV of either role is found.
        tokens = prompt(drawn.choice((5, 40, 300, 900)), f"{number} {drawn.randrange(4)}")
        count = drawn.randrange(1, LONGEST)
        how = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        result = await client.generate(token_ids=tokens, sampling=how, timeout_s=120.0)
        assert result.token_ids == answer(tokens, count)
        asked += 1
        await asyncio.sleep(drawn.expovariate(10.0))
    return asked


async def change(cluster: Cluster, client: AsyncClient, drawn: random.Random) -> str:
    """Change some instance that is not the last of its kind, and wait until it has changed; returns its id."""
    now = await kinds(client)
    name = drawn.choice(sorted(each for each in now if list(now.values()).count(now[each]) > 1))

    async def changed() -> bool:
        if (await kinds(client)).get(name, now[name]) != now[name]:
            return True
        await order(cluster, name, now[name])  # an earlier order may have been refused, or lost with what was killed
        return False

    await until(changed, f"{name} has changed from {now[name]}")
    return name


@pytest.mark.parametrize(
    ("seed", "drain_s", "killed"),
    [
        (1, 4.0, ()),
        (3, 0.1, ()),
        pytest.param(4, 0.1, (), marks=pytest.mark.slow),
        pytest.param(5, 1.0, ("conductor-1",), marks=pytest.mark.slow),
        pytest.param(6, 1.0, ("kvstore-0", "decode-1"), marks=pytest.mark.slow),
    ],
)
@on_virtual_time
async def test_roles_change_while_clients_ask(
    simulation: Simulation, tmp_path: Path, seed: int, drain_s: float, killed: tuple[str, ...]
) -> None:
    """Answers are whole, also if instances give up what does not end in time; all that was held comes back.

    `killed`: services that are killed meanwhile, and start again.
    """
    flags = {kind: [*given, "--set", f"drain_s={drain_s}"] for kind, given in FLAGS.items()}
    cluster = Cluster(simulation, {"conductor": 2, "prefill": 2, "decode": 2, "kvstore": 1}, flags)
    for service in cluster.services.values():
        if service.kind in OTHER:
            service.journals = tmp_path
    await cluster.start()
    addresses = {name: service.address for name, service in cluster.services.items()}
    drawn, stop = random.Random(f"roles {seed}"), asyncio.Event()
    async with AsyncClient(cluster.addresses) as client:
        asking = [asyncio.ensure_future(ask(client, number, stop)) for number in range(CLIENTS)]
        changed = set()
        for number in range(CHANGES):
            await asyncio.sleep(drawn.uniform(0.0, 2.0))
            if killed and number % 3 == 2:
                service = cluster.services[killed[number // 3 % len(killed)]]
                service.kill()
                await service.start()
            changed.add(await change(cluster, client, drawn))
        stop.set()
        assert min(await asyncio.gather(*asking)) > 0
        assert len(changed) > 1
        for name, kind in (await kinds(client)).items():
            cluster.services[name].kind_now = kind
        await cluster.rest()
    assert {name: cluster.services[name].address for name in addresses if name not in killed} == {
        name: address for name, address in addresses.items() if name not in killed
    }
    assert not any(service.task.done() for service in cluster.services.values())
    await cluster.drain()
    assert check_journals(tmp_path) > 0
