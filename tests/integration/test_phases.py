"""Each kind of instance is killed in each phase of requests: every answer is whole, and equal to the undisturbed one.

Emulated engines, whose phases last long enough to be hit; a stage of a real pipeline at the end.
"""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.cli.check import read_gauges
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, GenerateResult, SamplingParams
from tests.faults.judges import EmulatedJudge
from tests.faults.scene import judge_of
from tests.faults.stack import children
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

ENGINE = "emulated:llama-70b-a800"
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
STREAMS = 6
PHASE_TIMEOUT_S = 60.0
GAUGES = {
    "queued": ("prefill", "sequences_waiting"),
    "computing": ("prefill", "steps_in_flight"),
    "streaming KV": ("prefill", "transfers"),
    "promised": ("decode", "transfers_promised"),
    "receiving": ("decode", "transfers_receiving"),
    "decoding": ("decode", "sequences_running"),
}
"""By which gauge of which instances a phase is seen. A load from a kvstore is too short here to be hit surely."""
CASES = [
    *(("prefill", phase) for phase in ("queued", "computing", "streaming KV", "decoding")),
    *(("decode", phase) for phase in ("promised", "receiving", "decoding")),
    *(("kvstore", phase) for phase in ("computing", "decoding")),
    *(("conductor", phase) for phase in ("queued", "computing", "receiving", "decoding")),
]


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two of each but for the kvstore. A step of prefill takes long, so that a prompt has several and others wait."""
    slow = ["--emulated-slowdown", "10"]
    plan = StackPlan(
        model=str(checkpoint),
        data_dir=tmp_path_factory.mktemp("phases"),
        conductors=2,
        prefill=2,
        decode=2,
        engine=ENGINE,
        block_tokens=BLOCK,
        extra={"prefill": slow, "decode": slow},
    )
    with CheckedStack(plan) as stack:
        yield stack


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> EmulatedJudge:
    found = judge_of(checkpoint, ENGINE)
    assert isinstance(found, EmulatedJudge)
    return found


async def answers(stack: CheckedStack, prompts: list[list[int]]) -> list[GenerateResult]:
    async with AsyncClient(stack.addresses) as client:
        return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=SAMPLING) for prompt in prompts))


def seen_in(stack: CheckedStack, phase: str) -> str:
    """Waits until some instance is in a phase; which one."""
    kind, gauge = GAUGES[phase]
    deadline, pause = time.monotonic() + PHASE_TIMEOUT_S, threading.Event()
    while time.monotonic() < deadline:
        for it in read_gauges(stack.address, stack.plan.tls):
            if it.instance.startswith(kind) and it.name == gauge and it.value > 0:
                return it.instance
        pause.wait(0.01)
    raise AssertionError(f"no {kind} instance was seen with {gauge} above 0")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_whoever_is_killed_in_whatever_phase(pair: CheckedStack, judge: EmulatedJudge, victim: str, phase: str) -> None:
    shared = tokens(40 * BLOCK, f"{victim} {phase}")
    prompts = [shared + tokens(20 * BLOCK + 30 * number, f"{victim} {phase} {number}") for number in range(STREAMS)]

    async def run() -> tuple[list[GenerateResult], str]:
        running = asyncio.create_task(answers(pair, prompts))
        found = await asyncio.to_thread(seen_in, pair, phase)
        hit = found if found.startswith(victim) else victim if victim == "conductor" else f"{victim}-0"
        pair.services[hit].signal(signal.SIGKILL)
        return await running, hit

    results, hit = asyncio.run(run())
    pair.restart(hit)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == SAMPLING.max_tokens
        assert judge.wrong(prompt, result.token_ids, None) == ""


@pytest.fixture(scope="module")
def staged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two real prefill instances of two stages each."""
    plan = dataclasses.replace(small_plan(checkpoint, tmp_path_factory.mktemp("staged")), prefill=2, stages=2)
    with CheckedStack(plan) as stack:
        yield stack


async def while_it_computes(stack: CheckedStack, prompt: list[int], number: signal.Signals) -> tuple[list[int], str]:
    """The answer to a prompt, while which is computed a stage of its pipeline gets a signal; and the instance."""
    running = asyncio.create_task(answers(stack, [prompt]))
    hit = await asyncio.to_thread(seen_in, stack, "computing")
    os.kill(children(stack.services[hit].pid)[0], number)
    [result] = await running
    return result.token_ids, hit


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stage_is_killed_while_it_computes(staged: CheckedStack, reference: Reference) -> None:
    """Its instance ends with it, and the prompt is computed elsewhere."""
    prompt = tokens(1500, "killed stage")
    output, hit = asyncio.run(while_it_computes(staged, prompt, signal.SIGKILL))
    staged.services[hit].wait(60.0)
    staged.spawn_again(hit).wait_ready(60.0)
    staged.wait_joined(60.0)
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prefill_engine_that_hangs_is_noticed_and_relieved(staged: CheckedStack, reference: Reference) -> None:
    """Its process goes on reporting, its steps do not end."""
    lessons = [tokens(150 + 5 * number, f"lesson {number}") for number in range(80)]
    for first in range(0, len(lessons), 4):
        asyncio.run(answers(staged, lessons[first : first + 4]))
    prompt = tokens(1500, "hanging")
    output, hit = asyncio.run(while_it_computes(staged, prompt, signal.SIGSTOP))
    os.kill(children(staged.services[hit].pid)[0], signal.SIGCONT)
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)
