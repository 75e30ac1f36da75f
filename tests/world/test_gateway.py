"""Streams through a gateway outlive services, and a gateway leaves nothing behind."""

import asyncio
from collections.abc import Sequence

from tests.world.cluster import Cluster, Simulation, answer, prompt, until
from tests.world.gateway import Exchange, Gateway
from tests.world.process import on_virtual_time

FLAGS = ["--block-size", "16"]
TOKENS = 200
"""Of an answer, which takes about six seconds."""


async def begun(exchanges: Sequence[Exchange]) -> None:
    """Wait until each stream has some tokens."""

    async def all_run() -> bool:
        return all(len(exchange.token_ids) > 5 for exchange in exchanges)

    await until(all_run, "all streams have tokens")


async def started(simulation: Simulation) -> tuple[Cluster, Gateway]:
    """Two decode instances, and a gateway before them."""
    cluster = Cluster(simulation, {"decode": 2}, {"prefill": FLAGS, "decode": FLAGS})
    await cluster.start()
    return cluster, Gateway(simulation, cluster.addresses)


@on_virtual_time
async def test_streams_outlive_a_decode_instance_and_the_conductor(simulation: Simulation) -> None:
    """Their clients see neither a lost nor a doubled token, and no error."""
    cluster, gateway = await started(simulation)
    prompts = [prompt(100 + 60 * number, f"gateway {number}") for number in range(4)]
    streams = [await gateway.stream(asked, TOKENS) for asked in prompts]
    await begun(streams)
    cluster.services["decode-0"].kill()
    await asyncio.sleep(1.0)
    cluster.services["conductor-0"].kill()
    await cluster.services["conductor-0"].start()
    for asked, exchange in zip(prompts, streams, strict=True):
        await exchange.ended.wait()
        assert exchange.status == 200
        assert exchange.token_ids == answer(asked, TOKENS)
        assert exchange.content.rstrip().endswith(b"data: [DONE]")
    await cluster.services["decode-0"].start()
    await cluster.rest()


@on_virtual_time
async def test_clients_that_leave_and_a_killed_gateway_leave_nothing_behind(simulation: Simulation) -> None:
    cluster, gateway = await started(simulation)
    leaving, staying = [await gateway.stream(prompt(100, name), 2000) for name in ("leaves", "stays")]
    await begun([leaving, staying])
    leaving.leave()

    async def one_runs() -> bool:
        return await cluster.gauge("conductor-0", "requests_running") == 1

    await until(one_runs, "the request of the client that left has ended")
    assert not staying.ended.is_set()
    gateway.kill()
    await cluster.rest()
