"""Two conductors, emulated engines: what is slow or drains is relieved, what stops is noticed; tokens are right."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult
from moonpool.sampling_params import SamplingParams
from tests.faults.judges import EmulatedJudge
from tests.faults.scene import judge_of
from tests.integration.conftest import BLOCK, tokens
from tests.integration.stack import CheckedStack
from tests.integration.streams import disturbed

ENGINE = "emulated:llama-70b-a800"
SEED = 5
SAMPLING = SamplingParams(max_tokens=200, temperature=1.0, seed=SEED, ignore_eos=True)
"""About six seconds."""


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two of each kind of engine."""
    plan = StackPlan(
        model=str(checkpoint),
        data_dir=tmp_path_factory.mktemp("pair"),
        conductors=2,
        prefill=2,
        decode=2,
        engine=ENGINE,
        block_size=BLOCK,
        extra={"decode": ["--set", "emulated_slowdown=10"], "prefill": ["--set", "emulated_slowdown=10"]},
    )
    with CheckedStack(plan) as stack:
        yield stack


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> EmulatedJudge:
    found = judge_of(checkpoint, ENGINE)
    assert isinstance(found, EmulatedJudge)
    return found


def run(
    stack: CheckedStack, judge: EmulatedJudge, name: str, disturb: Callable[[], None], answers: int = 1
) -> list[GenerateResult]:
    """What comes of some streams, of so many answers each, to which something happens; all are right."""
    prompts = [tokens(100 + 60 * number, f"{name} {number}") for number in range(4)]
    results = asyncio.run(disturbed(stack.addresses, prompts, replace(SAMPLING, n=answers), disturb))
    for prompt, result in zip(prompts, results, strict=True):
        for number, choice in enumerate(result.choices):
            assert len(choice.token_ids) == SAMPLING.max_tokens
            assert judge.wrong(prompt, choice.token_ids, SEED + number) == ""
    return results


@pytest.mark.slow
def test_a_slow_instance_is_relieved_and_comes_back(pair: CheckedStack, judge: EmulatedJudge) -> None:
    victim = pair.services["decode-0"]
    run(pair, judge, "usual", lambda: None)  # so that it is known how quick they are
    results = run(pair, judge, "slow", lambda: victim.signal(signal.SIGUSR1))
    began = [result for result in results if result.placements[0].decode == "decode-0"]
    assert began, "nothing ran there"
    assert {result.placement.decode for result in results} == {"decode-1"}
    victim.signal(signal.SIGUSR2)
    asyncio.run(until_used(pair, "decode-0"))


async def until_used(stack: CheckedStack, decode: str) -> None:
    """Asks until an instance has got a request."""
    async with asyncio.timeout(60.0), AsyncClient(stack.addresses) as client:
        used = ""
        while used != decode:
            answer = await client.generate(token_ids=tokens(40, "again"), sampling=replace(SAMPLING, max_tokens=20))
            used = answer.placement.decode


@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 3])
def test_a_draining_instance_hands_its_sequences_over(pair: CheckedStack, judge: EmulatedJudge, answers: int) -> None:
    """Also those of several answers, each behind what there is of it: the prompt is placed once more, and no token is
    lost or doubled."""
    victim = pair.services["decode-1"]
    results = run(pair, judge, f"drain {answers}", lambda: victim.signal(signal.SIGTERM), answers)
    assert victim.wait(20.0) == 0
    assert {result.placement.decode for result in results} == {"decode-0"}
    assert max(len(result.placements) for result in results) == 2
    pair.spawn_again("decode-1").wait_ready(60.0)
    pair.wait_joined(60.0)


@pytest.mark.slow
def test_a_stopped_conductor_costs_no_stream(pair: CheckedStack, judge: EmulatedJudge) -> None:
    victim = pair.services["conductor"]
    try:
        results = run(pair, judge, "stopped conductor", lambda: victim.signal(signal.SIGSTOP))
    finally:
        victim.signal(signal.SIGCONT)
    assert all(result.resumes >= 1 for result in results)
    with Client(pair.addresses[1]) as client:
        assert client.cluster_state().ready
    pair.wait_joined(60.0)
