"""Several kvstores: chains spread over them, each is found again, and the loss of one costs its own share only."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from tests.world.cluster import Cluster, Simulation, answer, prompt, until
from tests.world.disk import Disk
from tests.world.process import on_virtual_time
from tests.world.profiles import slow_prefill

BLOCK, BLOCKS, ANSWER = 16, 6, 4
PREFIX = BLOCKS * BLOCK
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


def cluster_of(simulation: Simulation, folder: Path, replicas: int) -> Cluster:
    """Three stores, and a prefill pool of two chains: whatever comes later is loaded from a store, or computed."""
    pool = str(2 * BLOCKS + 2)
    flags = {
        "conductor": [
            "--kvstore-replicas",
            str(replicas),
            "--set",
            "peers=false",
            "--set",
            "decode_prompt_tokens=0",
        ],
        "kvstore": ["--ssd-bytes", str(1 << 23)],
        "prefill": ["--block-size", str(BLOCK), "--set", f"blocks={pool}", "--set", f"write_back_blocks={pool}"],
        "decode": ["--block-size", str(BLOCK)],
    }
    cluster = Cluster(simulation, {"kvstore": 3}, flags, slow_prefill(folder))
    for name, service in cluster.services.items():
        service.disk = Disk(folder / name, name) if service.kind == "kvstore" else None
    return cluster


def prompts(count: int, what: str) -> list[list[int]]:
    return [prompt(PREFIX + 3, f"{what} {number}") for number in range(count)]


async def serve(client: AsyncClient, asked: Sequence[list[int]]) -> list[GenerateResult]:
    """One after the other; all answers are right."""
    results = [await client.generate(token_ids=each, sampling=GREEDY) for each in asked]
    assert [result.token_ids for result in results] == [answer(each, ANSWER) for each in asked]
    return results


async def indexed(client: AsyncClient) -> dict[str, int]:
    """Blocks that the conductor knows of in each store."""
    state = await client.cluster_state()
    return {instance.id: instance.indexed_blocks for instance in state.instances if instance.kind == "kvstore"}


async def stored(client: AsyncClient, blocks: int) -> dict[str, int]:
    """Wait until the conductor has heard of so many blocks."""

    async def there() -> bool:
        return sum((await indexed(client)).values()) >= blocks

    await until(there, f"{blocks} blocks are stored")
    return await indexed(client)


async def killed_while_loading(cluster: Cluster, client: AsyncClient, store: str, asked: list[int]) -> GenerateResult:
    """A request that loads from a store which says no more, and then dies; the conductor notices."""
    cluster.services[store].stop()
    serving = asyncio.ensure_future(serve(client, [asked]))

    async def loading() -> bool:
        return await cluster.gauge("prefill-0", "loads") > 0

    async def gone() -> bool:
        return store not in await indexed(client)

    await until(loading, "something is loaded")
    cluster.services[store].kill()
    [met] = await serving
    await until(gone, f"{store} has left")
    return met


def cached(results: Sequence[GenerateResult]) -> list[int]:
    return [result.usage.cached_tokens for result in results]


@on_virtual_time
async def test_chains_spread_and_a_lost_store_costs_its_share(simulation: Simulation, tmp_path: Path) -> None:
    """One copy of each chain."""
    cluster, asked = cluster_of(simulation, tmp_path, 1), prompts(18, "one copy")
    await cluster.start()
    async with AsyncClient(cluster.addresses) as client:
        await serve(client, asked)
        held = await stored(client, len(asked) * BLOCKS)
        assert len(held) == 3
        assert all(blocks > 0 and blocks % BLOCKS == 0 for blocks in held.values()), held
        second = await serve(client, asked)
        homes = [result.placement.kvstore for result in second]
        assert cached(second) == [PREFIX] * len(asked)
        assert {name: count * BLOCKS for name, count in Counter(homes).items()} == held

        lost = homes[0]
        met = await killed_while_loading(cluster, client, lost, asked[0])
        assert met.usage.cached_tokens == 0
        third = await serve(client, asked[1:])
        assert cached(third) == [0 if home == lost else PREFIX for home in homes[1:]]

        await cluster.services[lost].start()
        await stored(client, len(asked) * BLOCKS)
        assert cached(await serve(client, asked)) == [PREFIX] * len(asked)
        new, before = prompts(8, "after its return"), await indexed(client)
        await serve(client, new)
        after = await stored(client, sum(before.values()) + len(new) * BLOCKS)
        assert after[lost] > before.get(lost, 0)
        await cluster.rest()


@on_virtual_time
async def test_a_copy_serves_when_a_store_is_lost(simulation: Simulation, tmp_path: Path) -> None:
    """Two copies of each chain: no store's loss is a miss, not even in the middle of a load."""
    cluster, asked = cluster_of(simulation, tmp_path, 2), prompts(5, "two copies")
    await cluster.start()
    async with AsyncClient(cluster.addresses) as client:
        await serve(client, asked)
        held = await stored(client, 2 * len(asked) * BLOCKS)
        assert sum(held.values()) == 2 * len(asked) * BLOCKS
        assert max(held.values()) <= len(asked) * BLOCKS
        second = await serve(client, asked)
        lost = second[0].placement.kvstore
        met = await killed_while_loading(cluster, client, lost, asked[0])
        assert met.usage.cached_tokens == PREFIX
        third = await serve(client, asked)
        assert cached(third) == [PREFIX] * len(asked)
        assert lost not in {result.placement.kvstore for result in third}
        # What was served has two copies again, on the stores that are left.
        again = await stored(client, 2 * len(asked) * BLOCKS)
        assert again == {name: len(asked) * BLOCKS for name in held if name != lost}
        await cluster.services[lost].start()
        await cluster.rest()
