"""A stage of a real pipeline is killed or hangs while it computes; the prompt is computed elsewhere."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SEEN_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def staged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two real prefill instances of two stages each, which compute all prompts."""
    plan = with_flags(
        small_plan(checkpoint, tmp_path_factory.mktemp("staged")), "conductor", "--set", "decode_prompt_tokens=0"
    )
    plan = dataclasses.replace(plan, prefill=2, pipeline_parallel_size=2)
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


async def while_it_computes(stack: CheckedStack, prompt: list[int], number: signal.Signals) -> tuple[list[int], str]:
    """The answer to a prompt, while which is computed a stage of its pipeline gets a signal; and the instance."""
    running = asyncio.create_task(answers(stack, [prompt]))
    hit = await asyncio.to_thread(computing, stack)
    os.kill(children(stack.services[hit].pid)[0], number)
    [output] = await running
    return output, hit


def test_a_stage_is_killed_while_it_computes(staged: CheckedStack, reference: Reference) -> None:
    """Its instance ends with it."""
    prompt = tokens(1500, "killed stage")
    output, hit = asyncio.run(while_it_computes(staged, prompt, signal.SIGKILL))
    staged.services[hit].wait(60.0)
    staged.spawn_again(hit).wait_ready(60.0)
    staged.wait_joined(60.0)
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)


def test_a_stage_that_is_stopped_while_it_computes(staged: CheckedStack, reference: Reference) -> None:
    """No channel closes, and no step has taken too long; its instance ends all the same."""
    prompt = tokens(1500, "stopped stage")
    output, hit = asyncio.run(while_it_computes(staged, prompt, signal.SIGSTOP))
    staged.services[hit].wait(60.0)
    staged.spawn_again(hit).wait_ready(60.0)
    staged.wait_joined(60.0)
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)
