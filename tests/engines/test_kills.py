"""`kill -9` of engine, adapter and conductor under load: no answer is lost, and no prompt is promised too much."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient
from moonpool.sampling_params import SamplingParams
from tests.engines.servers import BLOCK_TOKENS, PYTHON, ROOT, Vllm, free_port, vllm
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack
from tests.unit.adapter.test_adapter import prompts
from tests.unit.conductor.stack import TINY

ANSWER = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
VOCAB, AT_ONCE = 400, 4
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]


@asynccontextmanager
async def adapter_process(url: str, conductors: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """An adapter in a process of its own."""
    flags = ["--engine", url, "--model", str(TINY), "--id", "vllm-0", "--listen", "127.0.0.1:0"]
    flags += ["--conductor", ",".join(conductors), "--dtype", "float32", "--set", "drain_s=1"]
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.adapter", *flags, stdout=file, stderr=file, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def plan(folder: Path) -> StackPlan:
    """Two conductors, and Moonpool's own engines beside the vLLM."""
    return StackPlan(
        model=str(TINY), data_dir=folder, dtype="float32", threads=1, block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20, dram_bytes=16 << 20, conductors=2,
    )  # fmt: skip


async def joined(client: AsyncClient, *, there: bool = True) -> None:
    """Waits until the conductor knows the vLLM, or knows no more of it."""
    async with asyncio.timeout(120):
        while True:
            state = await client.cluster_state()
            if any(one.id == "vllm-0-prefill" for one in state.instances) == there:
                return
            await asyncio.sleep(0.2)


async def load(
    addresses: list[str], asked: list[list[int]], at: int, strike: Callable[[], Awaitable[None]]
) -> tuple[list[list[int]], int]:
    """Asks all prompts, and strikes when `at` of them are answered. Returns answers, and how many vLLM gave."""
    places, answered, struck = asyncio.Semaphore(AT_ONCE), 0, asyncio.Event()
    by_vllm = 0

    async with AsyncClient(addresses) as client:

        async def one(prompt: list[int]) -> list[int]:
            nonlocal answered, by_vllm
            async with places:
                result = await client.generate(token_ids=prompt, sampling=ANSWER)
            answered += 1
            by_vllm += result.placement.prefill == "vllm-0-prefill"
            if answered == at:
                struck.set()
            return result.token_ids

        async def striking() -> None:
            await struck.wait()
            await strike()

        strikes = asyncio.create_task(striking())
        answers = await asyncio.gather(*map(one, asked))
        await strikes
    return list(answers), by_vllm


async def test_no_answer_is_lost_when_a_part_is_killed(tmp_path: Path) -> None:
    asked, reference, port = prompts(200, VOCAB, seed=17), Reference(TINY), free_port()
    with CheckedStack(dataclasses.replace(plan(tmp_path / "stack"))) as own:
        async with AsyncExitStack() as engines, AsyncExitStack() as adapters, AsyncClient(own.addresses) as client:
            engine: Vllm = await engines.enter_async_context(vllm(tmp_path / "vllm", 64, port=port))
            beside = await adapters.enter_async_context(
                adapter_process(engine.url, own.addresses, tmp_path / "adapter.log")
            )
            await joined(client)

            async def kill_adapter() -> None:
                beside.kill()

            async def kill_conductor() -> None:
                own.services["conductor"].signal(signal.SIGKILL)

            parts: list[tuple[Callable[[], Awaitable[None]], int]] = [
                (kill_adapter, 70), (engine.kill, 70), (kill_conductor, 60),
            ]  # fmt: skip
            begin, by_vllm = 0, 0
            for strike, count in parts:
                part = asked[begin : begin + count]
                answers, there = await load(own.addresses, part, count // 3, strike)
                by_vllm += there
                for prompt, answer in zip(part, answers, strict=True):
                    assert len(answer) == ANSWER.max_tokens
                    reference.assert_greedy(prompt, answer)
                begin += count
                if strike == kill_adapter:  # its engine still holds what it computed
                    beside = await adapters.enter_async_context(
                        adapter_process(engine.url, own.addresses, tmp_path / "adapter.log")
                    )
                elif strike == engine.kill:
                    await joined(client, there=False)
                    await engines.enter_async_context(vllm(tmp_path / "vllm", 64, port=port))
                else:
                    await asyncio.to_thread(own.restart, "conductor")
                await joined(client)
            print(f"{by_vllm} of {len(asked)} answers by vLLM")
            assert by_vllm > 20
            for prompt in asked[:40]:
                await client.generate(token_ids=prompt, sampling=ANSWER)
            assert own.gauge("vllm-0-prefill", "prompts_recomputed_total") == 0
