"""Stages of other hosts, over loopback: tokens, and KV both ways."""

import asyncio
from array import array
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.kv.keys import slice_hash
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step, max_steps_in_flight
from moonpool.engine.interface import Engine
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.platforms.registry import engine_platform
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_processes
from tests.unit.engine.remote.hosts import host, leading, security, stages_listener
from tests.unit.engine.test_worker import generate, greedy, part, spec

PROMPT = list(range(7, 47))
TABLE = (9, 2, 5, 11)


async def check_kv(engine: ProcessEngine, first_step: int) -> None:
    """The leader's pool has all KV of a prompt, and a stage computes with what lands in the leader's pool."""
    all_layers, pool = range(engine.layout.layers), engine.pool
    layers: list[LayerDone] = []
    whole = Step(first_step, (part(PROMPT, 0, TABLE, sample=True),), layer_events=True)
    expected = (await engine.run(whole, on_layer=layers.append)).sampled
    assert sorted(done.layer for done in layers) == list(all_layers)
    assert all(done.start_ns <= done.end_ns for done in layers)

    def land(layer: int) -> None:
        for block, copy in ((9, 0), (2, 1)):
            data, value = pool.read(layer, block)
            assert slice_hash(data) == value
            assert any(data)
            pool.write(layer, copy, data, value)

    for layer in all_layers:
        land(layer)
    loaded = engine.load()
    assert loaded is not None
    await loaded
    suffix = SequenceStep(array("i", PROMPT[32:]).tobytes(), 32, (0, 1, 4), SampleSpec())
    assert (await engine.run(Step(first_step + 1, (suffix,)))).sampled == expected
    gated = asyncio.ensure_future(engine.run(Step(first_step + 2, (suffix,), gated=True)))
    await asyncio.sleep(0)
    for layer in all_layers:
        land(layer)
        engine.open_gate(first_step + 2, layer)
    assert (await gated).sampled == expected
    # A fork goes on in a copy of the part-filled block, which each stage makes of its own.
    (token,) = expected
    assert token is not None
    longer = [*PROMPT, token]
    copied = Step(first_step + 3, (part(longer, 40, (9, 2, 3), sample=True),), copies=((5, 3),))
    forked = (await engine.run(copied)).sampled
    assert (await engine.run(Step(first_step + 4, (part(longer, 40, TABLE, sample=True),)))).sampled == forked
    # A part-filled block comes when it is asked for.
    before = [bytes(pool.slice(layer, 4)) for layer in all_layers]
    await engine.fetch((4,))
    came = [bytes(pool.slice(layer, 4)) != before[layer] for layer in all_layers]
    on_devices = not engine_platform(engine.spec.device).in_host_pool
    assert came == [on_devices or pool.parts[-1].layer_begin <= layer for layer in all_layers]


@pytest.mark.parametrize(
    "secure", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="tls")]
)
async def test_tokens_are_those_of_one_process(checkpoint: Path, tmp_path: Path, secure: bool) -> None:
    """A prompt in two chunks, both in flight, then a token a step."""
    expected = await asyncio.to_thread(greedy, checkpoint, PROMPT, 6)
    certificates = security(tmp_path) if secure else None
    async with (
        stages_listener(security=certificates) as listener,
        host(listener.address, checkpoint, security=certificates),
        leading(spec(checkpoint, stages=2), listener) as engine,
    ):
        assert await generate(engine, 10, PROMPT, TABLE, 6) == expected
        await check_kv(engine, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "hosts", "ranks", "device"), [(3, 2, 1, "cpu"), (2, 1, 2, "cpu"), (2, 1, 2, "staged:6")]
)
async def test_several_hosts_and_ranks(checkpoint: Path, stages: int, hosts: int, ranks: int, device: str) -> None:
    expected = await asyncio.to_thread(greedy, checkpoint, PROMPT, 6)
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(stages_listener(count=hosts))
        for rank in range(1, hosts + 1):
            await stack.enter_async_context(host(listener.address, checkpoint, node_rank=rank, device=device))
        asked = spec(checkpoint, stages=stages, ranks=ranks, measure=True, device=device)
        engine = await stack.enter_async_context(leading(asked, listener))
        assert await generate(engine, 1000, PROMPT, TABLE, 6) == expected
        if hosts == 1:
            await check_kv(engine, 1100)


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_a_prompt_of_64k_tokens_is_that_of_one_process(tmp_path: Path) -> None:
    """In 16 steps, as many in flight as may be; its tokens' KV lies in 4,096 blocks."""
    tokens, chunk = [7 + number * number % 200 for number in range(65_536)], 4096
    overrides = {"max_position_embeddings": 2 * len(tokens)}
    checkpoint = create("tiny-llama", tmp_path / "long", seed=5, dtype="float32", overrides=overrides)
    asked = replace(spec(checkpoint, stages=2), blocks=len(tokens) // 16 + 1, max_num_batched_tokens=chunk)

    async def answer(engine: Engine) -> list[int]:
        table, found = tuple(range(asked.blocks)), list[int]()
        room = asyncio.Semaphore(max_steps_in_flight(engine.stages))

        async def compute(number: int, start: int, ids: list[int]) -> tuple[int | None, ...]:
            last = start + len(ids) >= len(tokens)
            async with room:
                one = SequenceStep(array("i", ids).tobytes(), start, table, SampleSpec() if last else None)
                return (await engine.run(Step(number, (one,)))).sampled

        starts = range(0, len(tokens), chunk)
        steps = [compute(1 + start // chunk, start, tokens[start : start + chunk]) for start in starts]
        sampled = (await asyncio.gather(*steps))[-1]
        for number in range(4):
            (token,) = sampled
            assert token is not None
            found.append(token)
            sampled = await compute(100 + number, len(tokens) + number, [token])
        return found

    async with start_processes(replace(asked, stages=1), start_timeout_s=90) as engine:
        expected = await answer(engine)
    async with (
        stages_listener() as listener,
        host(listener.address, checkpoint),
        leading(asked, listener) as engine,
    ):
        assert await answer(engine) == expected
