"""SGLang behind an adapter: answers, its events with salts, pairs that meet by bootstrap, what is refused."""

import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.adapter.base import EnginePrompt
from moonpool.interop.adapter.engine_http import EngineHttp
from moonpool.interop.adapter.sglang import SglangClient, request_body
from moonpool.interop.kv_events.events import read_batch
from tests.unit.conductor.stack import Stack, stack
from tests.unit.interop.adapter.fake_sglang import FakeSglang, fake_sglang
from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, answer_to
from tests.unit.interop.adapter.test_adapter import GREEDY, adapter, prompts


@asynccontextmanager
async def cluster(folder: Path, *names: str, **settings: Any) -> AsyncIterator[tuple[Stack, list[FakeSglang]]]:
    """A conductor with SGLang servers and their adapters."""
    async with stack(**settings) as running:
        engines = list[FakeSglang]()
        for name in names:
            engine = await running.exit.enter_async_context(
                fake_sglang(folder, name, running.checkpoint.config.vocab_size)
            )
            await running.exit.enter_async_context(adapter(engine.url, running.address, name, kind="sglang"))
            both = (f"{name}-prefill", f"{name}-decode")
            await running.until(lambda both=both: all(map(running.cluster.find, both)))  # type: ignore[misc]
            engine.requests.clear()
            engine.hits.clear()
            engines.append(engine)
        yield running, engines


async def test_answers_are_the_engines_and_the_index_is_its_cache_also_with_salts(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        vocab = running.checkpoint.config.vocab_size
        for at, prompt in enumerate(prompts(40, vocab)):
            engine.whole = at % 3 > 0
            tenant = ("", "a")[at % 2]
            result = await running.client.generate(
                token_ids=prompt, tenant=tenant, sampling=SamplingParams(max_tokens=5, logprobs=0, **GREEDY)
            )
            assert result.token_ids == answer_to(prompt, 5, vocab)
        await running.rest()
        index = running.servicer.core.cluster.index
        namespace = running.cluster.registry.model.namespace  # type: ignore[union-attr]

        def differences() -> list[tuple[int, int]]:
            found = []
            for tenant in ("", "a"):
                root = chain_root(namespace, tenant)
                salt = f"moonpool:{root.hex()}" if tenant else ""
                for prompt in prompts(40, vocab):
                    keys, held = block_keys(root, prompt, BLOCK_SIZE), engine.engine.hit(prompt, salt)
                    lacking = (at for at, key in enumerate(keys) if not index.holds("one-prefill", key))
                    if (promised := next(lacking, len(keys))) != held:
                        found.append((promised, held))
            return found

        await running.until(lambda: not differences())
        assert any(engine.hits)


async def test_a_dying_engines_answer_goes_on_at_the_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one", "two") as (running, engines):
        vocab = running.checkpoint.config.vocab_size
        engines[0].dying = True
        for prompt in prompts(6, vocab):
            result = await running.client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=4, **GREEDY))
            assert result.token_ids == answer_to(prompt, 4, vocab)


async def test_both_engines_of_a_pair_are_asked_at_once_and_meet(tmp_path: Path) -> None:
    async with stack() as running:
        vocab, engines = running.checkpoint.config.vocab_size, list[FakeSglang]()
        for role in ("prefill", "decode"):
            engine = await running.exit.enter_async_context(fake_sglang(tmp_path, role, vocab, role))
            engines.append(engine)
            engine.rooms = engines[0].rooms
            settings: dict[str, Any] = {"kind": "sglang", "role": role, "kv_domain": "bootstrap"}
            await running.exit.enter_async_context(adapter(engine.url, running.address, role, **settings))
            await running.until(lambda instance=f"{role}-{role}": running.cluster.find(instance) is not None)  # type: ignore[misc]
            engine.requests.clear()
        draw = random.Random(2)
        for prompt in prompts(10, vocab):
            most = draw.randrange(2, 6)
            result = await running.client.generate(
                token_ids=prompt, sampling=SamplingParams(max_tokens=most, n=1 + most % 2, **GREEDY)
            )
            assert result.token_ids == answer_to(prompt, most, vocab)
        await running.rest()
        rooms = [[body["bootstrap_room"] for body in engine.requests] for engine in engines]
        assert sorted(rooms[0]) == sorted(rooms[1])
        assert len(set(rooms[0])) == len(rooms[0])
        assert {body["sampling_params"]["max_new_tokens"] for body in engines[0].requests} == {1}
        once = await running.client.generate(token_ids=[5, 6], sampling=SamplingParams(max_tokens=1, **GREEDY))
        assert once.token_ids == answer_to([5, 6], 1, vocab)
        assert engines[0].requests[-1]["bootstrap_host"] == "2.2.2.2"  # no other engine is needed


async def described(engine: FakeSglang, **info: Any) -> Any:
    engine.info |= info
    client = SglangClient(EngineHttp("SGLang", engine.url))
    try:
        return await client.describe()
    finally:
        await client.aclose()


async def test_what_an_engine_lacks_is_named(tmp_path: Path) -> None:
    async with fake_sglang(tmp_path, "one", 100) as engine:
        facts = await described(engine, dp_size=2)
        assert (facts.version, facts.block_size, len(facts.sources)) == ("sglang 0.5.23", BLOCK_SIZE, 2)
        for info, remedy in (
            ({"page_size": 1}, "--page-size"),
            ({"page_size": 16, "kv_events_config": None}, "--kv-events-config"),
            ({"disable_radix_cache": True, "kv_events_config": '{"publisher": "zmq"}'}, "--disable-radix-cache"),
        ):
            with pytest.raises(ConfigError, match=remedy):
                await described(engine, **info)
        await described(engine, disaggregation_mode="decode")  # keeps nothing by default
        with pytest.raises(Unavailable):
            await described(engine, disable_radix_cache=False, page_size=16, max_total_num_tokens=0)


async def test_refusals_and_losses_are_told_apart(tmp_path: Path) -> None:
    prompt = EnginePrompt("r", array("i", [1] * 2000), SamplingParams(), 7, 1, 0, (2,), "", 0, -1)
    async with fake_sglang(tmp_path, "one", 100) as engine:
        client = SglangClient(EngineHttp("SGLang", engine.url))
        with pytest.raises(InvalidRequest, match="too long"):
            [output async for output in client.generate(prompt)]
        assert await client.clear_cache()
    with pytest.raises(Unavailable):
        await client.load()
    await client.aclose()


def test_a_request_in_sglangs_form() -> None:
    params = SamplingParams(temperature=0.5, top_k=0, logprobs=2, logit_bias={3: 1.5})
    transfer = {"bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 5}
    body = request_body(
        EnginePrompt("r", array("i", [4, 5]), params, 1 << 40, 8, 1, (2,), "s", -3, 1, transfer=transfer)
    )
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["top_k"]) == (8, 1, -1)
    assert (sampling["stop_token_ids"], sampling["logit_bias"]) == ([2], {"3": 1.5})
    assert (body["input_ids"], body["extra_key"], body["priority"], body["data_parallel_rank"]) == ([4, 5], "s", -3, 1)
    assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 2)
    assert body.items() >= transfer.items()


def test_salts_in_a_field_of_their_own_count_only_where_events_are_known_to_tell_them() -> None:
    stored = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1], "block_size": 1, "medium": "GPU"}
    for salt, extra in (({}, ((),)), ({"cache_salt": "s"}, (("s",),))):
        [event] = read_batch([1.0, [stored | salt], 0], salt_field=True).events
        assert event.extra_keys == extra  # type: ignore[union-attr]
        [event] = read_batch([1.0, [stored | salt], 0]).events
        assert event.extra_keys is None  # type: ignore[union-attr]
    [event] = read_batch([1.0, [["BlockStored", [7], None, [1], 1, None]], 0], salt_field=True).events
    assert event.extra_keys is None  # type: ignore[union-attr]
