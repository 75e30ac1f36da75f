"""What the conductor tells engines about kvstores, and what it learns from a miss."""

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.kv.keys import block_keys, chain_root, window_key, with_window_keys
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.v1 import prefill_pb2

from .fakes import BLOCK_SIZE, decode, prefill, store
from .stack import stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_a_prefix_in_a_store_is_named_as_source_and_write_back() -> None:
    p, d, k = prefill(), decode(), store()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, k) as s:
        index = s.servicer.core.cluster.index
        k.store(list(block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)))
        await s.until(lambda: index.held("kvstore-0") == 2)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.placement.kvstore, result.placement.predicted_cached_blocks) == ("kvstore-0", 2)
        request = p.requests[0]
        assert (request.source.instance.id, request.source.blocks) == ("kvstore-0", 2)
        assert request.write_back.id == "kvstore-0"
        state = await s.client.cluster_state()
        assert {i.id: i.indexed_blocks for i in state.instances} == {"prefill-0": 0, "decode-0": 0, "kvstore-0": 2}
        assert state.ready
        assert state.block_size == BLOCK_SIZE


async def test_copies_are_named_to_prefill_and_decode() -> None:
    p, d, stores = prefill(), decode(), [store(number) for number in range(3)]
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, *stores, kvstore_replicas=2) as s:
        index = s.servicer.core.cluster.index
        keys: list[bytes] = [*block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)]
        stores[0].store(keys)
        stores[2].store(keys[:1])
        await s.until(lambda: (index.held("kvstore-0"), index.held("kvstore-2")) == (2, 1))
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        request, reserved = p.requests[0], d.requests[0]
        assert (request.source.instance.id, request.source.blocks) == ("kvstore-0", 2)
        assert [(other.instance.id, other.blocks) for other in request.other_sources] == [("kvstore-2", 1)]
        assert (request.write_back.id, request.write_back_held) == ("kvstore-0", 2)
        assert [(copy.instance.id, copy.held_blocks) for copy in request.replicas] == [("kvstore-2", 1)]
        assert (reserved.write_back.id, [copy.id for copy in reserved.replicas]) == ("kvstore-0", ["kvstore-2"])


async def test_a_miss_corrects_the_index_until_the_store_reports_the_block_again() -> None:
    p, d, k = prefill(), decode(), store()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, k) as s:
        index = s.servicer.core.cluster.index
        keys: list[bytes] = [*block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)]
        k.store(keys)
        await s.until(lambda: index.lengths(keys) == {"kvstore-0": 2})
        p.misses.append(prefill_pb2.StoreMiss(store=k.instance, block=1))
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.placement.predicted_cached_blocks == 2
        assert index.lengths(keys) == {"kvstore-0": 1}
        p.misses.clear()
        await s.settled(p)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.placement.predicted_cached_blocks == 1
        assert (p.requests[1].source.blocks, p.requests[1].write_back_held) == (1, 1)
        k.store(keys[1:])
        await s.until(lambda: index.lengths(keys) == {"kvstore-0": 2})


async def test_of_a_lost_window_only_the_windowed_slices_are_forgotten() -> None:
    p, d, k = prefill(), decode(), store()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, k) as s:
        index = s.servicer.core.cluster.index
        keys: list[bytes] = [*block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)]
        k.store([*with_window_keys(keys)])
        await s.until(lambda: index.lengths([window_key(keys[1])]) == {"kvstore-0": 1})
        p.misses.append(prefill_pb2.StoreMiss(store=k.instance, block=1, windowed=True))
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert index.lengths([window_key(keys[1])]) == {}
        assert index.lengths([window_key(keys[0])]) == {"kvstore-0": 1}
        assert index.lengths(keys) == {"kvstore-0": 2}


async def test_a_prompt_shorter_than_a_block_has_a_store_for_its_answer() -> None:
    p, d, k = prefill(), decode(), store()
    async with stack(p, d, k) as s:
        await s.client.generate(token_ids=PROMPT[: BLOCK_SIZE - 1], sampling=GREEDY)
        assert d.requests[0].write_back.id == "kvstore-0"
