"""Two prefill instances without a kvstore: a prompt is forced away from the one that has its prefix, and reads it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.base import world
from moonpool.base.kv.keys import block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from moonpool.v1 import conductor_pb2, conductor_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc
from tests.world.cluster import Cluster, Simulation, answer, prompt, rpc, until
from tests.world.process import on_virtual_time
from tests.world.profiles import slow_prefill

RATES = "rates: {load_bytes_per_s: 1.0e+9, transfer_bytes_per_s: 1.28e+5}"
"""KV of a token crosses a link in a millisecond, about as long as computing: no load is overtaken."""
BLOCK = 16
PREFIX, LONG = 64 * BLOCK, 4000
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
OTHER = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}
FLAGS = {
    "prefill": ["--block-size", str(BLOCK), "--max-num-batched-tokens", "64"],
    "decode": ["--block-size", str(BLOCK)],
}


@asynccontextmanager
async def busy(cluster: Cluster, client: AsyncClient, holder: str) -> AsyncIterator[None]:
    """An instance computes a long prompt that no conductor has placed, and the conductor has heard of it."""
    network = world.CURRENT.get().network
    conductor = conductor_pb2_grpc.ConductorServiceStub(network.channel(cluster.addresses[0], ()))
    state = await rpc(conductor.ClusterState(conductor_pb2.ClusterStateRequest()))
    root, long = chain_root(state.model.namespace, "busy"), prompt(LONG, "long")
    spec = kv_pb2.SequenceSpec(
        request_id="busy",
        token_ids=tokens_to_bytes(long),
        prompt_tokens=LONG,
        block_keys=pack_keys(block_keys(root, long, BLOCK)),
        chain_root=root,
        tenant="busy",
        sampling=kv_pb2.Sampling(max_tokens=1, temperature=0.0),
    )
    channel = network.channel(cluster.services[holder].address, ())
    call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(sequence=spec))
    first = await anext(aiter(call))
    assert first.HasField("accepted")

    async def heard() -> bool:
        return any(
            instance.id == holder and instance.queued_tokens for instance in (await client.cluster_state()).instances
        )

    await until(heard, "the conductor knows that it is busy")
    yield
    call.cancel()


async def first_of(cluster: Cluster, client: AsyncClient, prefix: list[int]) -> str:
    """Has a prefix computed; returns where."""
    first = await client.generate(token_ids=prefix, sampling=ONE)
    await cluster.rest()
    return first.placement.prefill


def check(asked: list[int], result: GenerateResult, holder: str) -> None:
    assert (result.placement.prefill, result.placement.kvstore) == (OTHER[holder], holder)
    assert result.token_ids == answer(asked, 1)


@on_virtual_time
async def test_a_prefix_is_read_from_the_other_instance_also_when_it_is_killed_meanwhile(
    simulation: Simulation, tmp_path: Path
) -> None:
    """The read takes a second. What has not come when the peer is killed is computed, and the answer is the same."""
    cluster = Cluster(simulation, {"prefill": 2, "kvstore": 0}, FLAGS, slow_prefill(tmp_path, RATES))
    await cluster.start()
    async with AsyncClient(cluster.addresses) as client:
        prefix, others = prompt(PREFIX, "peer"), prompt(PREFIX, "killed")
        holder = await first_of(cluster, client, prefix)
        asked = [*prefix, *prompt(3, "question")]
        async with busy(cluster, client, holder):
            result = await client.generate(token_ids=asked, sampling=ONE)
        check(asked, result, holder)
        read = result.usage.cached_tokens  # it computes a step of 64 tokens while the first blocks come
        assert PREFIX - 64 <= read <= PREFIX
        assert await cluster.gauge(holder, "peer_read_bytes_total") == read * 128
        await cluster.rest()

        holder = await first_of(cluster, client, others)
        asked, reader = [*others, *prompt(3, "question")], OTHER[holder]
        async with busy(cluster, client, holder):
            running = asyncio.ensure_future(client.generate(token_ids=asked, sampling=ONE))

            async def loading() -> bool:
                return await cluster.gauge(reader, "loads") > 0

            await until(loading, "the prefix is loaded")
            cluster.services[holder].kill()
            result = await running
        check(asked, result, holder)
        assert result.usage.cached_tokens == 0
        assert await cluster.gauge(reader, "load_failures_total") == 1
        await cluster.services[holder].start()
        await cluster.rest()
