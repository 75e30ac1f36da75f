"""A kvstore whose machine loses its power: what it had said to be durable is there, if the disk does as it says."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, SamplingParams
from tests.world.cluster import Cluster, Simulation, answer, prompt
from tests.world.disk import Disk, DiskFault
from tests.world.process import on_virtual_time
from tests.world.profiles import slow_prefill

BLOCK, BLOCKS, CHAINS, LOSSES = 16, 6, 4, 2
PREFIX = BLOCKS * BLOCK
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
FLAGS = {
    "conductor": ["--set", "peers=false", "--set", "decode_prompt_tokens=0"],
    "kvstore": ["--ssd-bytes", str(1 << 23)],
    "prefill": ["--block-size", str(BLOCK)],
    "decode": ["--block-size", str(BLOCK)],
}


@pytest.mark.parametrize("without", [(), ("sync", "sync_folder", "index_sync")], ids=["honest", "lying"])
@on_virtual_time
async def test_what_is_durable_outlives_the_loss_of_power(
    simulation: Simulation, tmp_path: Path, without: Sequence[str]
) -> None:
    """Of a disk whose syncs do nothing something is lost, and no token is wrong all the same."""
    cluster = Cluster(simulation, {}, FLAGS, slow_prefill(tmp_path))
    store, prefill = cluster.services["kvstore-0"], cluster.services["prefill-0"]
    store.disk = Disk(tmp_path / "disk", simulation.seed, without=without)
    await cluster.start()
    asked, lost = list[list[int]](), 0
    async with AsyncClient(cluster.addresses) as client:

        async def serve() -> list[int]:
            """All prompts, which prefill has not; tokens of each that came from the store."""
            await prefill.drain()
            await prefill.start()
            await cluster.rest()
            results = [await client.generate(token_ids=each, sampling=GREEDY) for each in asked]
            assert [result.token_ids for result in results] == [answer(each, GREEDY.max_tokens) for each in asked]
            await cluster.rest()  # all of it is durable
            return [result.usage.cached_tokens for result in results]

        for number in range(LOSSES):
            asked += [prompt(PREFIX + 3, f"{number} {chain}") for chain in range(CHAINS)]
            await serve()
            store.kill(power=True)
            await store.start()
            await cluster.rest()
            lost += sum(cached != PREFIX for cached in await serve())
    assert bool(lost) == bool(without), f"{lost} chains are lost"


@on_virtual_time
async def test_a_store_starts_without_memory_and_not_while_its_disk_fails(
    simulation: Simulation, tmp_path: Path
) -> None:
    cluster = Cluster(simulation, {}, FLAGS)
    store = cluster.services["kvstore-0"]
    store.disk = Disk(tmp_path / "disk", simulation.seed)
    await cluster.start()
    faults: tuple[tuple[DiskFault | None, bool], ...] = (("no memory", True), ("broken", False), (None, True))
    for fault, starts in faults:
        store.kill()
        store.disk.files.fault = fault
        store.begin()
        assert await store.is_ready() == starts
