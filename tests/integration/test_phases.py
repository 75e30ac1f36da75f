"""Each kind of instance is killed in each phase of requests: every answer is whole, and equal to the undisturbed one.

Emulated engines, whose phases last long enough to be hit; a stage of a real pipeline at the end.
"""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult
from moonpool.rpc.tls import open_blocking_channel
from moonpool.sampling_params import SamplingParams
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.faults.judges import EmulatedJudge
from tests.faults.proxy import FaultProxies
from tests.faults.scene import judge_of
from tests.faults.stack import ProxiedStack, children
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

ENGINE = "emulated:llama-70b-a800"
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
STREAMS = 6
PHASE_TIMEOUT_S = 60.0
STORE_TRIES = 10
ASK_S = 20.0
GAUGES = {
    "loading": ("prefill", "loads"),
    "queued": ("prefill", "sequences_waiting"),
    "computing": ("prefill", "steps_in_flight"),
    "streaming KV": ("prefill", "transfers"),
    "promised": ("decode", "transfers_promised"),
    "receiving": ("decode", "transfers_receiving"),
    "decoding": ("decode", "sequences_running"),
}
"""By which gauge of which instances a phase is seen."""
CASES = [
    *(("prefill", phase) for phase in ("queued", "computing", "streaming KV", "decoding")),
    *(("decode", phase) for phase in ("promised", "receiving", "decoding")),
    *(("kvstore", phase) for phase in ("computing", "decoding")),
    *(("conductor", phase) for phase in ("queued", "computing", "receiving", "decoding")),
]


LOADING = ("prefill", "decode", "kvstore", "conductor")
HELD_AFTER_BYTES = 16 << 10
"""Of what the kvstore answers: less than a prefix has, more than all else."""
MEMBERS = ("kvstore-0", "prefill-0", "prefill-1", "decode-0", "decode-1")


class Pair(CheckedStack, ProxiedStack):
    """Checked, with a kvstore behind a proxy."""


@pytest.fixture(scope="module")
def proxies() -> Iterator[FaultProxies]:
    with FaultProxies() as running:
        yield running


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, proxies: FaultProxies) -> Iterator[CheckedStack]:
    """Two of each but for the kvstore, whose KV goes over connections that a proxy can hold back."""
    plan = StackPlan(
        model=str(checkpoint),
        data_dir=tmp_path_factory.mktemp("phases"),
        conductors=2,
        prefill=2,
        decode=2,
        engine=ENGINE,
        block_size=BLOCK,
        extra={"prefill": ["--set", "load_timeout_s=120"], "kvstore": ["--kv-lanes", "grpc"]},
    )
    with Pair(plan, proxies, ["kvstore"]) as stack:
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
    """Waits until some instance is in a phase; which one. Nobody else is asked: others may not be reached."""
    kind, gauge = GAUGES[phase]
    deadline, pause = time.monotonic() + PHASE_TIMEOUT_S, threading.Event()
    with ExitStack() as opened:
        services = {name: it.address for name, it in stack.services.items() if it.kind == kind}
        channels = {name: opened.enter_context(open_blocking_channel(it)) for name, it in services.items()}
        while time.monotonic() < deadline:
            for name, channel in channels.items():
                if any(it.name == gauge and it.value > 0 for it in gauges(kind, channel)):
                    return name
            pause.wait(0.01)
    raise AssertionError(f"no {kind} instance was seen with {gauge} above 0")


def gauges(kind: str, channel: grpc.Channel) -> Iterable[kv_pb2.Gauge]:
    if kind == "prefill":
        return PrefillServiceStub(channel).PrefillStats(prefill_pb2.PrefillStatsRequest(), timeout=ASK_S).gauges
    return DecodeServiceStub(channel).DecodeStats(decode_pb2.DecodeStatsRequest(), timeout=ASK_S).gauges


def prompts_of(victim: str, phase: str) -> tuple[list[int], list[list[int]]]:
    """What the prompts of a case begin with, and the prompts."""
    shared = tokens(40 * BLOCK, f"{victim} {phase}")
    return shared, [shared + tokens(20 * BLOCK + 30 * it, f"{victim} {phase} {it}") for it in range(STREAMS)]


async def with_a_kill(
    stack: CheckedStack,
    prompts: list[list[int]],
    victim: str,
    phase: str,
    before: Callable[[], None] = lambda: None,
    then: Callable[[], object] = lambda: None,
) -> tuple[list[GenerateResult], str]:
    """The answers, while whose phase it is, or the first of the victim's kind, is killed; and who that was."""
    running = asyncio.create_task(answers(stack, prompts))
    await asyncio.to_thread(before)
    found = await asyncio.to_thread(seen_in, stack, phase)
    hit = found if found.startswith(victim) else victim if victim == "conductor" else f"{victim}-0"
    stack.services[hit].signal(signal.SIGKILL)
    then()
    return await running, hit


def indexed(address: str) -> int:
    """Blocks of the kvstore that a conductor knows of."""
    with Client(address) as client:
        return sum(it.indexed_blocks for it in client.cluster_state().instances if it.id == "kvstore-0")


def store(stack: CheckedStack, victim: str) -> list[list[int]]:
    """Has a prefix stored; the prompts that begin with it.

    A kvstore that was just started anew is not reached at once, and what cannot be written to it then is not kept.
    """
    for number in range(STORE_TRIES):
        before = indexed(stack.address)
        shared, prompts = prompts_of(victim, f"loading {number}")
        asyncio.run(answers(stack, [shared]))
        stack.check_at_rest()
        if indexed(stack.address) >= before + len(shared) // BLOCK:
            return prompts
    raise AssertionError("the kvstore keeps nothing")


def forget(stack: CheckedStack) -> None:
    """All members start anew, and all conductors know again what the kvstore has: nobody else has anything."""
    known = [indexed(address) for address in stack.addresses]
    stack.restart_all(MEMBERS)
    deadline, pause = time.monotonic() + PHASE_TIMEOUT_S, threading.Event()
    while any(indexed(address) < before for address, before in zip(stack.addresses, known, strict=True)):
        assert time.monotonic() < deadline, "the kvstore has lost blocks"
        pause.wait(0.01)


def check(judge: EmulatedJudge, prompts: list[list[int]], results: list[GenerateResult]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == SAMPLING.max_tokens
        assert judge.wrong(prompt, result.token_ids, None) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_whoever_is_killed_in_whatever_phase(pair: CheckedStack, judge: EmulatedJudge, victim: str, phase: str) -> None:
    _, prompts = prompts_of(victim, phase)
    results, hit = asyncio.run(with_a_kill(pair, prompts, victim, phase))
    pair.restart(hit)
    check(judge, prompts, results)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", LOADING)
def test_whoever_is_killed_while_a_prefix_is_loaded(
    pair: CheckedStack, proxies: FaultProxies, judge: EmulatedJudge, victim: str
) -> None:
    """The prefix is in the kvstore and nowhere else; what it answers is held back in the middle until then."""
    prompts = store(pair, victim)
    forget(pair)
    proxies.part("kvstore-0", HELD_AFTER_BYTES)
    held, join = partial(proxies.wait_held, "kvstore-0", PHASE_TIMEOUT_S), partial(proxies.join, "kvstore-0")
    results, hit = asyncio.run(with_a_kill(pair, prompts, victim, "loading", held, join))
    pair.restart(hit)
    check(judge, prompts, results)


@pytest.fixture(scope="module")
def staged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two real prefill instances of two stages each."""
    plan = dataclasses.replace(
        small_plan(checkpoint, tmp_path_factory.mktemp("staged")), prefill=2, pipeline_parallel_size=2
    )
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
