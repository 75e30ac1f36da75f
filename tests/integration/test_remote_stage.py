"""Instances whose second stage is a process of its own, as on another host: answers, loss, return."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient
from tests.faults.stack import children
from tests.integration.conftest import small_plan, tokens, wait_busy, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
WAIT_S = 120.0


@contextmanager
def stage(leader: str, checkpoint: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stage that joins the leader, again and again."""
    command = [sys.executable, "-m", "moonpool.engine.remote", "--leader", leader, "--node-rank", "1"]
    command += ["--model", str(checkpoint), "--threads", "1"]
    environment = os.environ | {"MOONPOOL_DIE_WITH_PARENT": str(os.getpid())}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(WAIT_S) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def with_stages(plan: StackPlan, kind: str, leader: str) -> StackPlan:
    """The plan, with two stages of instances of this kind; the second joins at `leader`."""
    settings = ["pipeline_parallel_size=2", "nnodes=2", f"stages_listen={leader}"]
    plan = with_flags(plan, kind, *(part for setting in settings for part in ("--set", setting)))
    return dataclasses.replace(plan, pipeline_parallel_size=2) if kind == "prefill" else plan


async def answer(stack: CheckedStack, prompt: list[int]) -> list[int]:
    async with AsyncClient(stack.addresses) as client:
        return (await client.generate(token_ids=prompt, sampling=SAMPLING)).token_ids


async def lose_while_answering(stack: CheckedStack, host: int, name: str, prompt: list[int]) -> None:
    """Lose a process of a stage's host while a prompt is answered: with its only instance, the request fails."""
    running = asyncio.create_task(answer(stack, prompt))
    await asyncio.to_thread(wait_busy, stack.address, name, WAIT_S)
    (process,) = children(host)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(Unavailable, match=f"missing: {name.partition('-')[0]}"):
        await running


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_stage_of_another_host_is_lost_and_comes_back(
    checkpoint: Path, tmp_path: Path, reference: Reference, kind: str
) -> None:
    leader, name = f"127.0.0.1:{free_port()}", f"{kind}-0"
    plan = with_stages(small_plan(checkpoint, tmp_path), kind, leader)
    with stage(leader, checkpoint) as host, CheckedStack(plan) as stack:
        prompt = tokens(300, "whole")
        reference.assert_greedy(prompt, asyncio.run(answer(stack, prompt)))
        prompt = tokens(1500, "again")
        asyncio.run(lose_while_answering(stack, host.pid, name, prompt))
        stack.services[name].wait(WAIT_S)
        stack.spawn_again(name).wait_ready(WAIT_S)
        stack.wait_joined(WAIT_S)
        reference.assert_greedy(prompt, asyncio.run(answer(stack, prompt)))
