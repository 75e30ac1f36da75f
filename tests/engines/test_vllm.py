"""Real vLLM on the CPU behind conductors: answers of a plain forward pass, exact indexes, prefixes that last."""

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from tests.engines.servers import BLOCK_SIZE, NIXL, PYTHON, Sglang, Vllm, pooled, valve, vllm
from tests.integration.reference import Reference
from tests.unit.conductor.stack import TINY, Stack, stack
from tests.unit.interop.adapter.test_adapter import adapter, prompts
from tests.unit.kvstore.rig import rig

VLLM = "vllm-0-prefill"
ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LOOKUP_BYTES = 16 << 10
"""More than answers to look-ups take, less than a block."""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]


async def ask(running: Stack, asked: Sequence[list[int]], at_once: int = 4) -> list[list[int]]:
    """The answers to prompts."""
    places = asyncio.Semaphore(at_once)

    async def ask(prompt: list[int]) -> list[int]:
        async with places:
            return (await running.client.generate(token_ids=prompt, sampling=ANSWER)).token_ids

    return list(await asyncio.gather(*map(ask, asked)))


def promised(running: Stack, root: bytes, prompt: Sequence[int], instance: str = VLLM) -> int:
    """Leading blocks of a prompt that the conductor's index has at an engine; the last token is computed anyway."""
    index, keys = running.servicer.core.cluster.index, block_keys(root, prompt, BLOCK_SIZE)
    most = min(len(keys), (len(prompt) - 1) // BLOCK_SIZE)
    return next((at for at in range(most) if not index.holds(instance, keys[at])), most)


async def joined(running: Stack, *names: str) -> None:
    """Waits until engines have joined."""
    for name in names or ("vllm-0-prefill", "vllm-0-decode"):
        await running.until(lambda name=name: running.cluster.find(name) is not None)  # type: ignore[misc]


def root_of(running: Stack) -> bytes:
    """Root of the chains of nobody's tenant."""
    model = running.cluster.registry.model
    assert model is not None
    return chain_root(model.namespace, "")


async def assert_index_is_the_cache(
    running: Stack, server: Vllm | Sglang, reference: Reference, count: int, probes: int, instance: str = VLLM
) -> None:
    """Answers to `count` prompts, several times what the engine can hold, and then what probes find cached."""
    asked = prompts(count, running.checkpoint.config.vocab_size)
    answers = await ask(running, asked)
    for prompt, answer in zip(asked[:100], answers, strict=False):
        reference.assert_greedy(prompt, answer)
    await running.rest()
    root, index, draw = root_of(running), running.servicer.core.cluster.index, random.Random(11)
    hits = evicted = 0
    for prompt in draw.sample(asked, probes):
        held, keys = promised(running, root, prompt, instance), block_keys(root, prompt, BLOCK_SIZE)
        _, cached = await server.answer(prompt)
        assert cached == held * BLOCK_SIZE
        hits += held
        evicted += (len(prompt) - 1) // BLOCK_SIZE - held
        if held < len(keys):  # the events of the probe
            await running.until(lambda key=keys[held]: index.holds(instance, key))  # type: ignore[misc]
    print(f"{probes} probes: {hits} blocks held, {evicted} evicted")
    assert min(hits, evicted) > probes // 5


async def test_answers_are_a_plain_forward_passes_and_the_index_is_the_engines_cache(tmp_path: Path) -> None:
    reference = Reference(TINY)  # takes a while, so before anything is joined
    async with (
        vllm(tmp_path, blocks=64) as server,
        stack() as running,
        adapter(server.url, running.address, "vllm-0"),
    ):
        await joined(running)
        await assert_index_is_the_cache(running, server, reference, 500, probes=200)


async def test_a_restarted_engine_loads_what_is_in_the_store(tmp_path: Path) -> None:
    draw = random.Random(5)
    asked = [[draw.randrange(400) for _ in range(draw.randrange(100, 500))] for _ in range(20)]
    async with rig(dram_bytes=256 << 20) as store, valve(store.address) as way:
        transfer = pooled([way.address], lookup_limit_s=30.0, transfer_limit_s=60.0)
        in_store = sum([(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in asked])
        async with vllm(tmp_path / "first", 64, transfer) as first:
            before = [await first.answer(prompt, 8) for prompt in asked]
            assert sum(cached for _, cached in before) == 0
            await store.until("dram_blocks", sum([(len(prompt) + 7) // BLOCK_SIZE for prompt in asked]))
        async with vllm(tmp_path / "second", 64, transfer) as second:
            await way.set(LOOKUP_BYTES)  # look-ups are answered, loads are not
            loading = asyncio.create_task(second.answer(asked[0], 8))
            await second.until("vllm:num_requests_waiting", 1)
            other, _ = await second.answer([7] * 40, 200)
            assert (len(other), loading.done()) == (200, False)  # others compute while a request loads
            await way.set(math.inf)
            again = [await loading, *[await second.answer(prompt, 8) for prompt in asked[1:]]]
            assert [tokens for tokens, _ in again] == [tokens for tokens, _ in before]
            loaded = sum(cached for _, cached in again)
            print(f"loaded {loaded} of {in_store} prompt tokens in the store, {sum(map(len, asked))} in all")
            assert loaded >= 0.95 * in_store
            assert await second.metric("moonpool_kv_load_misses_total") == 0
            async with (
                stack() as running,
                adapter(second.url, running.address, "vllm-0", kvstores=True),
            ):  # and through a conductor, which knows by the namespace what the engine holds
                await joined(running)
                root = root_of(running)
                await running.until(lambda: any(promised(running, root, prompt) for prompt in asked))
                for prompt, (tokens, _) in zip(asked, before, strict=True):
                    result = await running.client.generate(token_ids=prompt, sampling=ANSWER)
                    assert result.token_ids == tokens
                await running.rest()


async def test_without_a_store_requests_wait_no_longer_than_the_limit(tmp_path: Path) -> None:
    draw, limit_s, clock = random.Random(6), 0.5, asyncio.get_running_loop().time
    asked = [[draw.randrange(400) for _ in range(300)] for _ in range(24)]
    async with AsyncExitStack() as stores:
        store = await stores.enter_async_context(rig(dram_bytes=64 << 20))
        way = await stores.enter_async_context(valve(store.address))
        transfer = pooled([way.address], lookup_limit_s=limit_s, breaker_failures=4, breaker_pause_s=1.0)
        async with vllm(tmp_path, 64, transfer) as server:

            async def longest_s(prompts: Sequence[list[int]]) -> float:
                times = [clock()]
                for prompt in prompts:
                    await server.answer(prompt)
                    times.append(clock())
                return max(after - before for before, after in pairwise(times))

            with_store_s = await longest_s(asked[:8])
            await way.set(0)  # the store stands still
            still_s = await longest_s(asked[8:16])
            assert await server.metric("moonpool_kv_open_breakers") == 1
            await stores.aclose()  # and is gone
            gone_s = await longest_s(asked[16:])
            print(f"longest request: {with_store_s:.2f} s with a store, {still_s:.2f} s, {gone_s:.2f} s without")
            assert max(still_s, gone_s) < with_store_s + limit_s
            assert await server.metric("moonpool_kv_lookups_skipped_total") > 0


async def test_a_pair_answers_as_a_plain_forward_pass(tmp_path: Path) -> None:
    reference = Reference(TINY)
    async with (
        vllm(tmp_path / "p", 64, NIXL) as prefill,
        vllm(tmp_path / "d", 64, NIXL) as decode,
        stack() as running,
        adapter(prefill.url, running.address, "p", role="prefill", kv_domain="nixl"),
        adapter(decode.url, running.address, "d", role="decode", kv_domain="nixl"),
    ):
        await joined(running, "p-prefill", "d-decode")
        asked = prompts(100, running.checkpoint.config.vocab_size)
        before = await sources(decode)
        for prompt, answer in zip(asked, await ask(running, asked), strict=True):
            reference.assert_greedy(prompt, answer)
        await running.rest()
        after = await sources(decode)
        moved, held, computed = (new - old for old, new in zip(before, after, strict=True))
        print(f"of {sum(map(len, asked))} prompt tokens {moved:g} came over NIXL, {held:g} were held")
        # Each planned transfer is seen: of prompts and first tokens, decode computed none.
        firsts = sum(len(prompt) % BLOCK_SIZE > 0 for prompt in asked)  # others are drawn again
        assert (moved + held, computed) == (sum(map(len, asked)) + firsts, 0)
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert await decode.metric("vllm:nixl_bytes_transferred_sum") > 0


async def sources(server: Vllm) -> list[float]:
    """Prompt tokens that came from another engine, that were held, and that were computed."""
    kinds = "external_kv_transfer", "local_cache_hit", "local_compute"
    return [await server.metric("vllm:prompt_tokens_by_source_total", source=kind) for kind in kinds]
