"""An instance whose second stage is a process of its own, as on another host, beside a whole one: loss and return."""

import asyncio
import dataclasses
import itertools
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
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, GenerateResult
from tests.faults.stack import children
from tests.integration.conftest import small_plan, tokens, wait_busy, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
WAIT_S = 240.0


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


class OneWithStages(CheckedStack):
    """A stack whose first instance of a kind has a second stage, which joins at `leader`; the others have one.

    Attributes:
        name: the instance.
    """

    def __init__(self, plan: StackPlan, kind: str, leader: str) -> None:
        self.name = f"{kind}-0"
        self._settings = ["pipeline_parallel_size=2", "nnodes=2", f"stages_listen={leader}"]
        super().__init__(plan)

    def member_arguments(self, kind: str, service_id: str) -> list[str]:
        arguments = super().member_arguments(kind, service_id)
        if service_id == self.name:
            arguments += [part for setting in self._settings for part in ("--set", setting)]
        return arguments

    def answer(self, client: AsyncClient, prompt: list[int]) -> "asyncio.Task[GenerateResult]":
        return asyncio.create_task(client.generate(token_ids=prompt, sampling=SAMPLING))

    def serves(self, result: GenerateResult) -> bool:
        """Whether the instance of two stages has served a request."""
        return self.name in (result.placement.prefill, result.placement.decode)


async def all_serve(stack: OneWithStages, reference: Reference) -> None:
    """Requests come until some went to the instance of two stages; all answers are right."""
    async with AsyncClient(stack.addresses) as client, asyncio.timeout(WAIT_S):
        for number in itertools.count():
            prompts = [tokens(200, f"{number} {other}") for other in range(4)]
            results = await asyncio.gather(*(stack.answer(client, prompt) for prompt in prompts))
            for prompt, result in zip(prompts, results, strict=True):
                reference.assert_greedy(prompt, result.token_ids)
            if any(map(stack.serves, results)):
                return


async def lose_while_answering(stack: OneWithStages, host: int, reference: Reference) -> None:
    """Lose a process of a stage's host while prompts are answered: they and the next one are answered elsewhere."""
    over = asyncio.Event()

    async def keep_asking(client: AsyncClient, who: int) -> None:
        for number in itertools.count():
            prompt = tokens(600, f"{who} {number}")
            reference.assert_greedy(prompt, (await stack.answer(client, prompt)).token_ids)
            if over.is_set():
                return

    async with AsyncClient(stack.addresses) as client, asyncio.timeout(WAIT_S):
        async with asyncio.TaskGroup() as group:
            for who in range(4):
                group.create_task(keep_asking(client, who))
            await asyncio.to_thread(wait_busy, stack.address, stack.name, WAIT_S)
            (process,) = children(host)
            os.kill(process, signal.SIGKILL)
            await asyncio.to_thread(stack.services[stack.name].wait, WAIT_S)
            over.set()
        prompt = tokens(600, "elsewhere")
        result = await stack.answer(client, prompt)
        reference.assert_greedy(prompt, result.token_ids)
        assert not stack.serves(result)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_requests_go_elsewhere_until_a_lost_stage_has_joined_again(
    checkpoint: Path, tmp_path: Path, reference: Reference, kind: str
) -> None:
    leader = f"127.0.0.1:{free_port()}"
    plan = dataclasses.replace(
        small_plan(checkpoint, tmp_path), prefill=1 + (kind == "prefill"), decode=1 + (kind == "decode")
    )
    for each in ("prefill", "decode"):
        plan = with_flags(plan, each, "--set", "either_role=false")
    even = "--policy", "round_robin", "--set", "decode_policy=fewest_sequences"  # both have work, whichever is quicker
    plan = with_flags(plan, "conductor", *even)
    with stage(leader, checkpoint) as host, OneWithStages(plan, kind, leader) as stack:
        asyncio.run(all_serve(stack, reference))
        asyncio.run(lose_while_answering(stack, host.pid, reference))
        stack.spawn_again(stack.name).wait_ready(WAIT_S)
        stack.wait_joined(WAIT_S)
        asyncio.run(all_serve(stack, reference))
