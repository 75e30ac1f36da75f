"""A prefill instance whose second stage is a process of its own, as on another host: answers, loss, return."""

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

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient
from tests.faults.stack import children
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
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


def answer(stack: CheckedStack, prompt: list[int]) -> list[int]:
    async def ask() -> list[int]:
        async with AsyncClient(stack.addresses) as client:
            return (await client.generate(token_ids=prompt, sampling=SAMPLING)).token_ids

    return asyncio.run(ask())


def test_a_stage_of_another_host_is_lost_and_comes_back(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    leader = f"127.0.0.1:{free_port()}"
    plan = with_flags(
        small_plan(checkpoint, tmp_path), "prefill", "--set", "nnodes=2", "--set", f"stages_listen={leader}"
    )
    plan = dataclasses.replace(plan, pipeline_parallel_size=2)
    with stage(leader, checkpoint) as host, CheckedStack(plan) as stack:
        prompt = tokens(300, "whole")
        reference.assert_greedy(prompt, answer(stack, prompt))
        (process,) = children(host.pid)
        os.kill(process, signal.SIGKILL)
        (name,) = [name for name in stack.services if name.startswith("prefill")]
        stack.services[name].wait(WAIT_S)
        stack.spawn_again(name).wait_ready(WAIT_S)
        stack.wait_joined(WAIT_S)
        prompt = tokens(300, "again")
        reference.assert_greedy(prompt, answer(stack, prompt))
