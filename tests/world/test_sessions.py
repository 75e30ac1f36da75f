"""KV that has gone to SSD is in memory, and in the instance, before a session is back or an announced prompt comes."""

from pathlib import Path

from moonpool.client import AsyncClient, SamplingParams, SessionTurn
from tests.world.cluster import Cluster, Simulation, answer, prompt, until
from tests.world.disk import Disk
from tests.world.process import on_virtual_time
from tests.world.profiles import slow_prefill

BLOCK, BLOCKS, ANSWER = 16, 6, 4
PREFIX = BLOCKS * BLOCK
POOL = 2 * BLOCKS + 2
BLOCK_BYTES = 128 * BLOCK
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
RETURN_S = 12.0
STORE = "kvstore-0"


def cluster_of(simulation: Simulation, folder: Path) -> Cluster:
    """A store with memory for four chains, and engines that keep two: the next turn is loaded from the store."""
    flags = {
        "conductor": ["--set", "peers=false", "--set", "decode_prompt_tokens=0"],
        "kvstore": ["--ssd-bytes", str(1 << 23), "--dram-bytes", str(4 * BLOCKS * BLOCK_BYTES)],
        "prefill": ["--block-size", str(BLOCK), "--set", f"blocks={POOL}", "--set", f"write_back_blocks={POOL}"],
        "decode": ["--block-size", str(BLOCK)],
    }
    cluster = Cluster(simulation, {"kvstore": 1}, flags, slow_prefill(folder))
    cluster.services[STORE].disk = Disk(folder / STORE, STORE)
    return cluster


async def left_memory(cluster: Cluster, client: AsyncClient, tokens: list[int], session: SessionTurn | None) -> None:
    """A turn, and then so many others that the turn's KV is on SSD only."""
    turn = await client.generate(token_ids=tokens, sampling=GREEDY, session=session)
    assert turn.token_ids == answer(tokens, ANSWER)
    await cluster.rest()
    for number in range(8):
        await client.generate(token_ids=prompt(PREFIX + 3, f"{session} {number}"), sampling=GREEDY)
        await cluster.rest()


async def ssd_blocks_of(cluster: Cluster, client: AsyncClient, tokens: list[int]) -> float:
    """Blocks that a turn reads from SSD; all of the turn's prefix is cached."""
    before = await cluster.gauge(STORE, "ssd_hits_total")
    turn = await client.generate(token_ids=tokens, sampling=GREEDY)
    assert turn.token_ids == answer(tokens, ANSWER)
    assert turn.usage.cached_tokens == PREFIX
    return await cluster.gauge(STORE, "ssd_hits_total") - before


@on_virtual_time
async def test_blocks_are_in_memory_before_the_session_is_back(simulation: Simulation, tmp_path: Path) -> None:
    cluster = cluster_of(simulation, tmp_path)
    await cluster.start()
    plain, known = prompt(PREFIX + 3, "plain"), prompt(PREFIX + 3, "known")
    async with AsyncClient(cluster.addresses) as client:
        await left_memory(cluster, client, plain, None)
        assert await ssd_blocks_of(cluster, client, [*plain, *answer(plain, ANSWER)]) == BLOCKS

        await left_memory(cluster, client, known, SessionTurn(id="s", return_s=RETURN_S))

        async def prefetched() -> bool:
            return await cluster.gauge(STORE, "prefetched_blocks_total") >= BLOCKS

        await until(prefetched, "the session's blocks are in memory")
        assert await ssd_blocks_of(cluster, client, [*known, *answer(known, ANSWER)]) == 0
        assert await client.update_session(SessionTurn(id="s", last=True))
        assert not await client.update_session(SessionTurn(id="s", last=True))
        await cluster.rest()


async def loaded_of(cluster: Cluster, client: AsyncClient, tokens: list[int]) -> float:
    """Blocks that an instance loads for a prompt whose prefix is cached; ends with the cluster at rest."""
    before = await cluster.gauge("prefill-0", "loaded_blocks_total")
    turn = await client.generate(token_ids=tokens, sampling=GREEDY)
    assert turn.token_ids == answer(tokens, ANSWER)
    assert turn.usage.cached_tokens == PREFIX
    await cluster.rest()
    return await cluster.gauge("prefill-0", "loaded_blocks_total") - before


@on_virtual_time
async def test_blocks_are_in_the_instance_before_the_prompt_comes(simulation: Simulation, tmp_path: Path) -> None:
    """Of a session's next turn, and of an announced prompt."""
    cluster = cluster_of(simulation, tmp_path)
    await cluster.start()
    known, batch = prompt(PREFIX + 3, "known"), prompt(PREFIX + 3, "batch")
    copied = 0.0

    async def fetched() -> bool:
        return await cluster.gauge("prefill-0", "copied_blocks_total") >= copied + BLOCKS

    async with AsyncClient(cluster.addresses) as client:
        await left_memory(cluster, client, known, SessionTurn(id="s", return_s=RETURN_S))
        await until(fetched, "the session's blocks are in the instance")
        assert await loaded_of(cluster, client, [*known, *answer(known, ANSWER)]) == 0
        copied = await cluster.gauge("prefill-0", "copied_blocks_total")

        await left_memory(cluster, client, batch, None)
        assert await client.announce([{"token_ids": batch}], RETURN_S) == 1
        await until(fetched, "the announced prompt's blocks are in the instance")
        assert await loaded_of(cluster, client, batch) == 0
        assert await cluster.gauge("conductor-0", "instance_prefetches_total") == 2
        await cluster.rest()
