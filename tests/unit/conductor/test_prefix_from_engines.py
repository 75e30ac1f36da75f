"""Engines as sources of prefixes, and orders to replicate hot prefixes, as prefill instances get them."""

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.v1 import kv_pb2, prefill_pb2

from .fakes import BLOCK_SIZE, FakeMember, decode, prefill
from .stack import Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def held(s: Stack, member: FakeMember) -> list[bytes]:
    """A member has the prompt's blocks, and the conductor knows; returns their keys."""
    keys: list[bytes] = [*block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)]
    member.store(keys)
    await s.until(lambda: s.servicer.core.cluster.index.held(member.id) == len(keys))
    return keys


async def test_a_decode_instance_is_named_as_source() -> None:
    p, d = prefill(), decode()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d) as s:
        await held(s, d)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.placement.kvstore, result.placement.predicted_cached_blocks) == ("decode-0", 2)
        assert (p.requests[0].source.instance, p.requests[0].source.blocks) == (d.instance, 2)
        assert p.requests[0].source.instance.kind == kv_pb2.INSTANCE_KIND_DECODE
        [candidate] = (await s.client.explain(result.request_id)).candidates
        assert (candidate.instance, candidate.source) == ("prefill-0", "decode-0")


async def test_without_peers_it_is_not() -> None:
    p, d = prefill(), decode()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, peers=False) as s:
        await held(s, d)
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert not p.requests[0].HasField("source")


async def test_a_block_that_a_peer_has_lost_corrects_the_index() -> None:
    p, d = prefill(), decode()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d) as s:
        keys = await held(s, d)
        p.misses.append(prefill_pb2.StoreMiss(store=d.instance, block=1))
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert s.servicer.core.cluster.index.lengths(keys) == {"decode-0": 1}


async def test_a_copy_is_ordered_when_prompts_go_on_asking() -> None:
    """The prefill instance loads the prefix again and again, and does not tell that it has it."""
    p, d = prefill(), decode()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, copy_share=1.0) as s:
        keys = await held(s, d)
        asked = 0
        while not s.servicer.core.cluster.replication.ordered:
            asked += 1
            assert asked <= 50
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
            await s.settled(p)
        assert asked > 1
        await s.until(lambda: bool(p.orders))
        assert p.orders[0].keys == b"".join(keys)
        assert p.orders[0].source == d.instance
