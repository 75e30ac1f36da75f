"""A conductor, adapters, and fake engines behind them: answers, placement by what engines hold, losses."""

import asyncio
import io
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.telemetry.spans import Recorder
from moonpool.conductor.core.instances import LoadFacts
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.adapter.promised_request import PromisedRequest
from moonpool.interop.adapter.service import serve
from tests.unit.base.checkpoint.test_lora import write
from tests.unit.conductor.fakes import WAIT_S, store
from tests.unit.conductor.stack import TINY, Stack, stack
from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, FakeVllm, answer_to, fake_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def configured(url: str, conductor: str, name: str, **settings: Any) -> AdapterConfig:
    usual = {"model": str(TINY), "drain_s": 2.0}
    return AdapterConfig(engine=url, conductor=(conductor,), id=name, **{**usual, **settings})


@asynccontextmanager
async def adapter(url: str, conductor: str, name: str, **settings: Any) -> AsyncIterator[ProcessContext]:
    """An adapter beside the engine at a URL."""
    context = ProcessContext(name, Recorder(name, None), io.StringIO())
    task = asyncio.create_task(serve(context, configured(url, conductor, name, **settings)))
    try:
        yield context
    finally:
        context.stopping.set()
        await task


@asynccontextmanager
async def cluster(folder: Path, *names: str, **settings: Any) -> AsyncIterator[tuple[Stack, list[FakeVllm]]]:
    """A conductor with an engine and its adapter of each name."""
    async with stack(**settings) as running:
        vocab, engines = running.checkpoint.config.vocab_size, list[FakeVllm]()
        for name in names:
            engine = await running.exit.enter_async_context(fake_vllm(folder, name, vocab))
            await running.exit.enter_async_context(adapter(engine.url, running.address, name))
            for kind in ("prefill", "decode"):
                await running.until(lambda instance=f"{name}-{kind}": running.cluster.find(instance) is not None)  # type: ignore[misc]
            engine.requests.clear()
            engine.hits.clear()
            engines.append(engine)
        yield running, engines


def prompts(count: int, vocab_size: int, seed: int = 7) -> list[list[int]]:
    """Prompts, some of which continue others."""
    draw, found = random.Random(seed), list[list[int]]()
    for _ in range(count):
        begin = draw.choice(found)[: draw.randrange(200)] if found and draw.random() < 0.7 else []
        found.append(begin + [draw.randrange(vocab_size) for _ in range(draw.randrange(1, 60))])
    return found


async def test_a_hundred_answers_are_the_engines_and_the_index_is_its_cache(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one", "two") as (running, engines):
        vocab = running.checkpoint.config.vocab_size
        for at, prompt in enumerate(prompts(100, vocab)):
            tenant = ("", "a")[at % 2]
            result = await running.client.generate(
                token_ids=prompt, tenant=tenant, sampling=SamplingParams(max_tokens=5, **GREEDY)
            )
            assert result.token_ids == answer_to(prompt, 5, vocab)
        await running.rest()
        assert sum(len(engine.requests) for engine in engines) == 100  # prompt and answer are one request each
        namespace = running.cluster.registry.model.namespace  # type: ignore[union-attr]
        index = running.servicer.core.cluster.index

        def differences() -> list[tuple[int, int]]:
            """Blocks that the index promises and that an engine holds, of each prompt for which these differ."""
            found = []
            for (engine, name), tenant in product(zip(engines, ("one", "two"), strict=True), ("", "a")):
                root = chain_root(namespace, tenant)
                salt = f"moonpool:{root.hex()}" if tenant else ""
                for prompt in prompts(100, vocab):
                    keys, held = block_keys(root, prompt, BLOCK_SIZE), engine.engine.hit(prompt, salt)
                    lacking = (at for at, key in enumerate(keys) if not index.holds(f"{name}-prefill", key))
                    if (promised := next(lacking, len(keys))) != held:
                        found.append((promised, held))
            return found

        await running.until(lambda: not differences())  # the engine's last events may be on the way
        assert not any(engine.running for engine in engines)


async def test_requests_for_a_lora_adapter_go_to_the_engines_that_list_it(tmp_path: Path) -> None:
    for name, changes in {"a": {}, "b": {"lora_alpha": 5}, "c": {"lora_alpha": 7}}.items():
        write(tmp_path / name, changes)
    modules = ",".join(f"{name}={tmp_path / name}" for name in "abc")
    async with stack(lora_modules=modules) as running:
        vocab, engines = running.checkpoint.config.vocab_size, dict[str, FakeVllm]()
        for name, loras in {"one": {"sql": "a"}, "two": {"chat": "b", "broken": "nowhere"}}.items():
            engine = engines[name] = await running.exit.enter_async_context(fake_vllm(tmp_path, name, vocab))
            engine.loras = {own: tmp_path / folder for own, folder in loras.items()}
            await running.exit.enter_async_context(adapter(engine.url, running.address, name))
            for kind in ("prefill", "decode"):
                await running.until(lambda instance=f"{name}-{kind}": running.cluster.find(instance) is not None)  # type: ignore[misc]
        prompt, sampling = list(range(3 * BLOCK_SIZE)), SamplingParams(max_tokens=4, **GREEDY)

        async def ask(model: str, tenant: str = "") -> tuple[list[int], str, int]:
            found = await running.client.generate(token_ids=prompt, model=model, tenant=tenant, sampling=sampling)
            await running.rest()
            return found.token_ids, found.placement.prefill, found.usage.cached_tokens

        assert await ask("a") == (answer_to(prompt, 4, vocab, "sql"), "one-prefill", 0)  # by what the files are
        assert await ask("b") == (answer_to(prompt, 4, vocab, "chat"), "two-prefill", 0)
        base, where, cached = await ask("")
        assert (base, cached) == (answer_to(prompt, 4, vocab), 0)  # nothing of an adapter's matches
        assert await ask("a") == (answer_to(prompt, 4, vocab, "sql"), "one-prefill", 2 * BLOCK_SIZE)
        assert (await ask("a", "ann"))[2] == 0
        assert (await ask("a", "ann"))[2] == 2 * BLOCK_SIZE
        with pytest.raises(InvalidRequest, match="model: no engine of this cluster can serve it"):
            await ask("c")
        assert where in ("one-prefill", "two-prefill")


async def test_what_an_engine_holds_draws_the_prompts_that_continue_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one", "two", policy="sglang") as (running, engines):  # the longest prefix decides
        draw = random.Random(3)
        first = [draw.randrange(100) for _ in range(20 * BLOCK_SIZE)]
        sampling = SamplingParams(max_tokens=2, **GREEDY)
        before = await running.client.generate(token_ids=first, sampling=sampling)
        await running.rest()
        for _ in range(4):
            again = await running.client.generate(token_ids=[*first, draw.randrange(100)], sampling=sampling)
            assert again.placement.prefill == before.placement.prefill
            assert again.usage.cached_tokens == 20 * BLOCK_SIZE
        served = next(engine for engine in engines if engine.requests)
        assert served.hits == [0, 20, 20, 20, 20]


async def test_blocks_in_kvstores_count_where_the_engine_uses_kvstores(tmp_path: Path) -> None:
    async with stack() as running:
        engine = await running.exit.enter_async_context(
            fake_vllm(tmp_path, "one", running.checkpoint.config.vocab_size)
        )
        engine.page_namespace = "ab" * 32
        await running.exit.enter_async_context(adapter(engine.url, running.address, "one", kvstores=True))
        await running.until(lambda: all(map(running.cluster.find, ("one-prefill", "one-decode"))))
        prompt = list(range(4 * BLOCK_SIZE))
        root = chain_root(bytes.fromhex(engine.page_namespace), "ann")
        keys = block_keys(root, prompt, BLOCK_SIZE)
        result = await running.client.generate(
            token_ids=prompt, tenant="ann", sampling=SamplingParams(max_tokens=2, **GREEDY)
        )
        assert engine.requests[-1]["kv_transfer_params"] == {"moonpool_tenant": "ann"}
        assert engine.requests[-1]["cache_salt"] == f"moonpool:{root.hex()}"
        keys = block_keys(root, prompt, BLOCK_SIZE)
        await running.until(lambda: running.servicer.core.cluster.index.holds("one-prefill", keys[3]))
        facts = running.servicer.core.cluster.prefills.get("one-prefill").facts  # type: ignore[union-attr]
        assert (facts.loads, facts.kv_domain) == (True, "one")
        assert result.usage.cached_tokens == 0
        await running.rest()


async def test_a_load_that_the_conductor_expects_counts_as_cached(tmp_path: Path) -> None:
    async with stack() as running:
        engine = await running.exit.enter_async_context(
            fake_vllm(tmp_path, "one", running.checkpoint.config.vocab_size)
        )
        engine.page_namespace, engine.token_s = "ab" * 32, 0.0005
        await running.exit.enter_async_context(adapter(engine.url, running.address, "one", kvstores=True))
        await running.until(lambda: all(map(running.cluster.find, ("one-prefill", "one-decode"))))
        prompt, member = list(range(40 * BLOCK_SIZE)), store()
        root = chain_root(bytes.fromhex(engine.page_namespace), "")
        member.keys = [*block_keys(root, prompt, BLOCK_SIZE)[:30]]
        await running.join(member)
        await running.until(lambda: running.servicer.core.cluster.index.holds(member.id, member.keys[-1]))
        result = await running.client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=2, **GREEDY))
        assert result.usage.cached_tokens == 30 * BLOCK_SIZE
        assert result.placement.kvstore == member.id
        await running.rest()


async def test_an_engine_without_the_connector_is_refused_by_name(tmp_path: Path) -> None:
    async with stack() as running:
        engine = await running.exit.enter_async_context(
            fake_vllm(tmp_path, "one", running.checkpoint.config.vocab_size)
        )
        with pytest.raises(ConfigError) as error:
            await serve(
                ProcessContext("one", Recorder("one", None), io.StringIO()),
                configured(engine.url, running.address, "one", kvstores=True),
            )
        assert error.value.field == "kvstores"


async def test_preemptions_are_those_of_all_ranks_of_the_engine(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, _), asyncio.timeout(WAIT_S):
        counted = dict[str, int]()
        while counted.get("decode") != 7:
            state = await running.client.cluster_state()
            counted = {each.kind: each.preemptions for each in state.instances}
        assert counted["prefill"] == 0


async def test_several_answers_are_generated_side_by_side(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        result = await running.client.generate(
            token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4, n=3, **GREEDY)
        )
        expected = answer_to([1, 2, 3], 4, running.checkpoint.config.vocab_size)
        assert [choice.token_ids for choice in result.choices] == [expected] * 3
        assert len({body["sampling_params"]["seed"] for body in engine.requests}) == 3
        await running.rest()


async def test_a_defect_meets_its_own_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, defects = PromisedRequest.start, list[int]()

    def defective(live: PromisedRequest, *told: Any) -> None:
        if len(live.part.incoming.token_ids) == 3:
            defects.append(live.number)
            raise KeyError("a defect")
        start(live, *told)

    monkeypatch.setattr(PromisedRequest, "start", defective)
    async with cluster(tmp_path, "one") as (running, [engine]):
        vocab, sampling = running.checkpoint.config.vocab_size, SamplingParams(max_tokens=40, **GREEDY)
        other = asyncio.create_task(running.client.generate(token_ids=[5, 6], sampling=sampling))
        again = await running.client.generate(
            token_ids=[1, 2, 3], sampling=sampling
        )  # placed anew with its first token
        assert again.token_ids == answer_to([1, 2, 3], 40, vocab)
        assert (await other).token_ids == answer_to([5, 6], 40, vocab)
        assert (len(defects), len(engine.requests)) == (1, 3)  # the other one was not placed anew
        await running.rest()


async def test_an_answer_of_one_token_needs_no_promise(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        result = await running.client.generate(token_ids=[5, 6], sampling=SamplingParams(max_tokens=1, **GREEDY))
        assert result.token_ids == answer_to([5, 6], 1, running.checkpoint.config.vocab_size)
        assert engine.requests[0]["sampling_params"]["max_tokens"] == 1
        await running.rest()


async def test_the_queue_is_what_the_engine_has_not_computed_yet(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        pool = running.servicer.core.cluster.prefills

        def load() -> LoadFacts:
            found = pool.get("one-prefill")
            assert found is not None
            assert found.facts.arrival_order
            return found.load

        engine.half.clear()
        first = list(range(200, 200 + 20 * BLOCK_SIZE))
        asked = []
        for place, prompt in enumerate((first, first[: 16 * BLOCK_SIZE] + [7] * 40)):
            sampling = SamplingParams(max_tokens=1 + place, **GREEDY)
            asked.append(asyncio.create_task(running.client.generate(token_ids=prompt, sampling=sampling)))
            # Half of the first is computed; the second waits for what both begin with, and lacks the other tokens.
            # The engine takes longer than predicted, and is not free.
            await running.until(lambda tokens=10 * BLOCK_SIZE + 40 * place: load().queued_tokens == tokens)  # type: ignore[misc]
            assert (load().running, (load().drain_s or 0.0) > 0.0) == (1 + place, True)
        engine.half.set()
        await asyncio.gather(*asked)
        await running.rest()
        await running.until(lambda: (load().queued_tokens, load().drain_s) == (0, 0.0))


@pytest.mark.parametrize(
    ("option", "field"),
    [({"beam_width": 2}, "sampling.beam_width"), ({"response_format": "json_object"}, "sampling.response_format")],
)
async def test_options_that_no_engine_has_are_refused_by_name(
    tmp_path: Path, option: dict[str, Any], field: str
) -> None:
    async with cluster(tmp_path, "one") as (running, _):
        with pytest.raises(InvalidRequest) as error:
            await running.client.generate(token_ids=[1], sampling=SamplingParams(max_tokens=2, **option))
        assert error.value.field == field


async def test_a_client_that_leaves_ends_the_engines_work(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        engine.gate.clear()
        stream = running.client.stream(token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, **GREEDY))
        async with stream:
            async for _ in stream:
                break
        await running.until(lambda: not engine.running)
        await running.rest()
        assert not engine.running


async def test_an_answer_goes_on_at_another_engine_when_its_own_dies(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one", "two") as (running, engines):
        for engine in engines:
            engine.gate.clear()
        asking = asyncio.create_task(
            running.client.generate(token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=6, **GREEDY))
        )
        await running.until(lambda: any(engine.running for engine in engines))
        dead = next(engine for engine in engines if engine.running)
        dead.dying = True
        for engine in engines:
            engine.gate.set()
        result = await asking
        assert result.token_ids == answer_to([1, 2, 3], 6, running.checkpoint.config.vocab_size)
        assert len(result.placements) > 1
        await running.rest()


async def test_without_another_engine_the_request_fails_clearly(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        engine.gate.clear()
        asking = asyncio.create_task(
            running.client.generate(token_ids=[1, 2, 3], timeout_s=4.0, sampling=SamplingParams(max_tokens=6, **GREEDY))
        )
        await running.until(lambda: bool(engine.running))
        engine.dying = True
        engine.gate.set()
        with pytest.raises(MoonpoolError):
            await asking
        await running.until(lambda: running.cluster.find("one-prefill") is None)
        await running.rest()


async def test_an_engine_that_restarts_joins_again_with_what_it_holds(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        prompt, sampling = list(range(4 * BLOCK_SIZE)), SamplingParams(max_tokens=2, **GREEDY)
        await running.client.generate(token_ids=prompt, sampling=sampling)
        before = running.cluster.find("one-prefill")
        assert before is not None
        engine.restart()

        def is_back() -> bool:
            now = running.cluster.find("one-prefill")
            return now is not None and now.epoch != before.epoch

        await running.until(is_back)
        await running.until(lambda: all(map(running.cluster.find, ("one-prefill", "one-decode"))))
        result = await running.client.generate(token_ids=prompt, sampling=sampling)
        assert result.usage.cached_tokens == 0
        await running.rest()


async def test_deleted_kv_is_not_found_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, "one") as (running, [engine]):
        prompt, sampling = list(range(4 * BLOCK_SIZE)), SamplingParams(max_tokens=2, **GREEDY)
        await running.client.generate(token_ids=prompt, sampling=sampling)
        await running.rest()
        await running.client.delete_kv(tenants=[""])
        result = await running.client.generate(token_ids=prompt, sampling=sampling)
        assert (result.usage.cached_tokens, engine.hits[-1]) == (0, 0)
        salt = engine.requests[-1]["cache_salt"]
        assert salt != engine.requests[0].get("cache_salt")
        keys = block_keys(bytes.fromhex(salt.split(":")[1]), prompt, BLOCK_SIZE)
        index = running.servicer.core.cluster.index
        await running.until(lambda: index.holds("one-prefill", keys[2]))  # the engine's events may be on the way
        again = await running.client.generate(token_ids=prompt, sampling=sampling)
        assert engine.hits[-1] == 3
        assert again.usage.cached_tokens == 3 * BLOCK_SIZE
