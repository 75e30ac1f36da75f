"""A rank of a real pipeline's stage is killed or stopped while it computes; the prompt is computed elsewhere."""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient
from tests.faults.stack import children
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SEEN_TIMEOUT_S = 60.0
STAGES, RANKS = 2, 2


@pytest.fixture(scope="module")
def staged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two real prefill instances of two stages with two ranks each, which compute all prompts."""
    plan = with_flags(
        small_plan(checkpoint, tmp_path_factory.mktemp("staged")), "conductor", "--set", "decode_prompt_tokens=0"
    )
    plan = with_flags(plan, "prefill", "--set", f"tensor_parallel_size={RANKS}")
    plan = dataclasses.replace(plan, prefill=2, pipeline_parallel_size=STAGES)
    with CheckedStack(plan) as stack:
        yield stack


async def answers(stack: CheckedStack, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncClient(stack.addresses) as client:
        asked = (client.generate(token_ids=prompt, sampling=SAMPLING) for prompt in prompts)
        return [result.token_ids for result in await asyncio.gather(*asked)]


def computing(stack: CheckedStack) -> str:
    """Waits until a prefill instance computes; which one."""
    deadline, pause = time.monotonic() + SEEN_TIMEOUT_S, threading.Event()
    while time.monotonic() < deadline:
        for name in ("prefill-0", "prefill-1"):
            if stack.gauge(name, "steps_in_flight"):
                return name
        pause.wait(0.01)
    raise AssertionError("no prefill instance was seen computing")


async def while_it_computes(
    stack: CheckedStack, prompt: list[int], number: signal.Signals, which: int
) -> tuple[list[int], str]:
    """The answer to a prompt, while which is computed a process of its pipeline gets a signal; and the instance."""
    running = asyncio.create_task(answers(stack, [prompt]))
    hit = await asyncio.to_thread(computing, stack)
    processes = children(stack.services[hit].pid)
    assert len(processes) == STAGES * RANKS
    os.kill(processes[which], number)
    [output] = await running
    return output, hit


@pytest.mark.parametrize("which", range(STAGES * RANKS))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_is_lost_while_it_computes(
    staged: CheckedStack, reference: Reference, number: signal.Signals, which: int
) -> None:
    """Its instance ends with it, and comes up again whole. Of a stopped process no channel closes."""
    prompt = tokens(1500, f"{number.name} {which}")
    output, hit = asyncio.run(while_it_computes(staged, prompt, number, which))
    staged.services[hit].wait(60.0)
    staged.spawn_again(hit).wait_ready(60.0)
    staged.wait_joined(60.0)
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)
