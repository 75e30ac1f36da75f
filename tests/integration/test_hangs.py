"""A process of a real engine hangs: it is stopped, or computes for ever. Others relieve it, and no token is wrong."""

import asyncio
import dataclasses
import itertools
import os
import platform
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import GenerateResult
from tests.faults.stack import children
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack
from tests.integration.streams import disturbed

JUMP_TO_ITSELF = {"x86_64": b"\xeb\xfe", "aarch64": b"\x00\x00\x00\x14"}.get(platform.machine(), b"")
RANKS = 2
SAMPLING = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
SHORT = dataclasses.replace(SAMPLING, max_tokens=150)
USUAL_S = 10.0
"""An instance's first five seconds of work tell the conductor how quick it usually is."""
RELIEVED_S = 200.0
"""A busy machine's time for all streams, beside a process that spins. The engine gives a step up after 300 s."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not JUMP_TO_ITSELF, reason="no code of this machine's processor that jumps to itself"),
]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def spin(pid: int) -> None:
    """Lets each thread of a process jump to itself from where it is now, or where its system call ends."""
    tasks = Path(f"/proc/{pid}/task")
    stop(pid)
    pause = threading.Event()
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        pause.wait(0.001)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for task in tasks.iterdir():
            memory.seek(int((task / "syscall").read_text().split()[-1], 16))
            memory.write(JUMP_TO_ITSELF)
    os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def four(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two instances of each kind of engine, each of two ranks. Prefill computes all prompts."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("four"))
    for kind in ("prefill", "decode"):
        plan = with_flags(plan, kind, "--set", f"tensor_parallel_size={RANKS}")
    with CheckedStack(dataclasses.replace(plan, prefill=2, decode=2, kvstore=0)) as stack:
        yield stack


def run(
    stack: CheckedStack, reference: Reference, name: str, sampling: SamplingParams, disturb: Callable[[], None]
) -> list[GenerateResult]:
    """Some streams, to which something happens when all are under way; all are right."""
    prompts = [tokens(60 + 40 * number, f"{name} {number}") for number in range(4)]
    results = asyncio.run(disturbed(stack.addresses, prompts, sampling, disturb))
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == sampling.max_tokens
        reference.assert_greedy(prompt, result.token_ids)
    return results


def usual(stack: CheckedStack, reference: Reference, name: str) -> str:
    """Streams until the decode instance that gets them has worked for so long that its usual speed is known."""
    worked = Counter[str]()
    for number in itertools.count():
        began = time.monotonic()
        placed = {result.placement.decode for result in run(stack, reference, f"{name} {number}", SHORT, lambda: None)}
        worked.update(dict.fromkeys(placed, int(1000 * (time.monotonic() - began))))
        if len(placed) == 1 and worked[victim := placed.pop()] > 1000 * USUAL_S:
            return victim
    raise AssertionError


def process_of(stack: CheckedStack, instance: str, rank: int) -> int:
    """An engine process of an instance."""
    processes = children(stack.services[instance].pid)
    assert len(processes) == RANKS
    return processes[rank]


@pytest.mark.parametrize(("hang", "rank"), [(stop, 1), (spin, 0), (spin, 1)], ids=["stopped-1", "spins-0", "spins-1"])
def test_streams_leave_a_decode_instance_that_hangs(
    four: CheckedStack, reference: Reference, hang: Callable[[int], None], rank: int
) -> None:
    """A stopped process ends its instance. One that spins is alive: its steps are overdue, so its instance is slow."""
    name = f"{hang.__name__} {rank}"
    victim = usual(four, reference, name)
    process, began = process_of(four, victim, rank), 0.0

    def disturb() -> None:
        nonlocal began
        began = time.monotonic()
        hang(process)

    results = run(four, reference, name, SAMPLING, disturb)
    seconds = time.monotonic() - began
    print(f"{name}: all streams are over {seconds:.1f} s later")
    assert any(result.placements[0].decode == victim for result in results), "nothing ran there"
    assert victim not in {result.placement.decode for result in results}
    assert seconds < RELIEVED_S
    if hang is spin:
        os.kill(process, signal.SIGKILL)
    four.services[victim].wait(60.0)
    four.spawn_again(victim).wait_ready(60.0)
    four.wait_joined(60.0)
