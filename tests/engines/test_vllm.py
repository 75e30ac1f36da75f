"""Real vLLM on the CPU behind conductors: answers of a plain forward pass, exact indexes, prefixes that last."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from moonpool.kv.keys import block_keys, chain_root
from moonpool.sampling_params import SamplingParams
from tests.engines.servers import BLOCK_TOKENS, PYTHON, pooled, vllm
from tests.integration.reference import Reference
from tests.unit.adapter.test_adapter import adapter, prompts
from tests.unit.conductor.stack import TINY, Stack, stack
from tests.unit.kvstore.rig import rig

ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]


async def ask(running: Stack, asked: Sequence[list[int]], at_once: int = 4) -> list[list[int]]:
    """The answers to prompts."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> list[int]:
        async with places:
            return (await running.client.generate(token_ids=prompt, sampling=ANSWER)).token_ids

    return list(await asyncio.gather(*map(one, asked)))


def promised(running: Stack, root: bytes, prompt: Sequence[int], instance: str = "vllm-0-prefill") -> int:
    """Leading blocks of a prompt that the conductor's index has at an engine; the last token is computed anyway."""
    index, keys = running.servicer.core.cluster.index, block_keys(root, prompt, BLOCK_TOKENS)
    most = min(len(keys), (len(prompt) - 1) // BLOCK_TOKENS)
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


async def test_answers_are_a_plain_forward_passes_and_the_index_is_the_engines_cache(tmp_path: Path) -> None:
    reference = Reference(TINY)  # takes a while, so before anything is joined
    async with (
        vllm(tmp_path, blocks=64) as server,
        stack() as running,
        adapter(server.url, running.address, "vllm-0"),
    ):
        await joined(running)
        asked = prompts(500, running.checkpoint.config.vocab_size)  # some ten times what the engine can hold
        answers = await ask(running, asked)
        for prompt, answer in zip(asked[:100], answers, strict=False):
            reference.assert_greedy(prompt, answer)
        await running.rest()
        root, index, draw, hits = root_of(running), running.servicer.core.cluster.index, random.Random(11), 0
        for prompt in draw.sample(asked, 200):
            held, keys = promised(running, root, prompt), block_keys(root, prompt, BLOCK_TOKENS)
            _, cached = await server.answer(prompt)
            assert cached == held * BLOCK_TOKENS
            hits += held
            if held < len(keys):  # the events of the probe
                await running.until(lambda key=keys[held]: index.holds("vllm-0-prefill", key))  # type: ignore[misc]
        assert hits > 40


async def test_a_restarted_engine_loads_what_is_in_the_store(tmp_path: Path) -> None:
    draw = random.Random(5)
    asked = [[draw.randrange(400) for _ in range(draw.randrange(100, 500))] for _ in range(20)]
    async with rig(dram_bytes=256 << 20) as store:
        transfer = pooled([store.address])
        async with vllm(tmp_path / "first", 64, transfer) as first:
            before = [await first.answer(prompt, 8) for prompt in asked]
            assert sum(cached for _, cached in before) == 0
        in_store = sum([(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in asked])
        async with vllm(tmp_path / "second", 64, transfer) as second:
            again = [await second.answer(prompt, 8) for prompt in asked]
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
                probes = [(prompt, promised(running, root, prompt)) for prompt in asked]
                assert sum(held for _, held in probes) > 0
                for (prompt, _), (tokens, _) in zip(probes, before, strict=True):
                    result = await running.client.generate(token_ids=prompt, sampling=ANSWER)
                    assert result.token_ids == tokens
                await running.rest()


async def test_without_a_store_requests_wait_no_longer_than_the_limit(tmp_path: Path) -> None:
    draw, limit_s = random.Random(6), 0.5
    asked = [[draw.randrange(400) for _ in range(300)] for _ in range(12)]
    async with AsyncExitStack() as stores:
        store = await stores.enter_async_context(rig(dram_bytes=64 << 20))
        transfer = pooled([store.address], lookup_limit_s=limit_s, breaker_pause_s=3600.0)
        async with vllm(tmp_path, 64, transfer) as server:
            clock = asyncio.get_running_loop().time
            with_store = []
            for prompt in asked[:6]:
                began = clock()
                await server.answer(prompt)
                with_store.append(clock() - began)
            await stores.aclose()
            for prompt in asked[6:]:
                began = clock()
                await server.answer(prompt)
                assert clock() - began < max(with_store) + limit_s
            assert await server.metric("moonpool_kv_open_breakers") == 1
            assert await server.metric("moonpool_kv_lookups_skipped_total") > 0


async def test_a_pair_answers_as_a_plain_forward_pass(tmp_path: Path) -> None:
    reference, transfer = Reference(TINY), {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    async with (
        vllm(tmp_path / "p", 64, transfer) as prefill,
        vllm(tmp_path / "d", 64, transfer) as decode,
        stack() as running,
        adapter(prefill.url, running.address, "p", role="prefill", kv_domain="nixl"),
        adapter(decode.url, running.address, "d", role="decode", kv_domain="nixl"),
    ):
        await joined(running, "p-prefill", "d-decode")
        asked = prompts(100, running.checkpoint.config.vocab_size)
        for prompt, answer in zip(asked, await ask(running, asked), strict=True):
            reference.assert_greedy(prompt, answer)
        await running.rest()
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 0
        moved = await decode.metric("vllm:nixl_bytes_transferred_sum")
        print(f"{moved:,.0f} bytes moved over NIXL")
        assert moved > 0
