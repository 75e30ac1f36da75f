"""A rank of a real engine's stage is killed or stopped in each phase of requests and instances: answers are right.

`tests/unit/engine/test_start_engine.py` has the engine alone.
"""

import dataclasses
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import ServiceProcess
from moonpool.client import Client, GenerateResult
from tests.faults.stack import children, descendants, wait_gone
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.shared.test_contexts import until
from tests.integration.stack import TRIES, CheckedStack
from tests.integration.test_faults import PATIENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RANKS, WAIT_S = 2, 120.0
SAMPLING = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
LONG = 1500
"""Tokens of a prompt that is computed, sent and loaded for long enough to be seen."""
SENT_PER_S, LENT_PER_S = 1.5e6, 12e6
"""Bytes of KV that prefill sends, and that decode lends to prefill; a token has a thousand."""
SEEN_BY = {
    "computing": ("prefill", "steps_in_flight"),
    "streaming KV": ("prefill", "transfers"),
    "loading": ("prefill", "loads"),
    "prefill drains": ("prefill", "steps_in_flight"),
    "receiving": ("decode", "transfers_receiving"),
    "decoding": ("decode", "sequences_running"),
    "preempted": ("decode", "sequences_preempted"),
    "decode drains": ("decode", "sequences_running"),
}
"""By which gauge of which instances a phase of a request is seen."""
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
PROCESSES = {"first": 0, "last": -1}
Lose = Callable[[ServiceProcess], None]


@pytest.fixture(scope="module", params=[1, 2], ids="stages{}".format)
def stack(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckedStack]:
    """Two instances of each kind, of so many stages with two ranks each; prefixes are read from decode's pools."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("lost"))
    for kind, rate in (("prefill", SENT_PER_S), ("decode", LENT_PER_S)):
        settings = f"tensor_parallel_size={RANKS}", f"link_bytes_per_s={rate}", "either_role=false"
        plan = with_flags(plan, kind, *(part for setting in settings for part in ("--set", setting)))
    stages = f"pipeline_parallel_size={request.param}"
    plan = with_flags(plan, "decode", "--set", stages, "--set", "preempt_every=2", "--set", "preemption=swap")
    plan = with_flags(plan, "conductor", *PATIENT)
    plan = dataclasses.replace(plan, prefill=2, decode=2, kvstore=0, pipeline_parallel_size=request.param)
    with CheckedStack(plan) as stack:
        yield stack


class Loss:
    """Takes an engine process away from an instance of a stack.

    Attributes:
        victim: the instance, once it has lost a process.
    """

    def __init__(self, stack: CheckedStack, number: signal.Signals, which: str) -> None:
        self.stack = stack
        self.victim: ServiceProcess | None = None
        self._number, self._which = number, PROCESSES[which]
        self._processes = list[int]()
        self._shared = self._shared_memories()

    def hit(self, service: ServiceProcess) -> None:
        """Lose a process, once all have been started."""
        until(lambda: len(children(service.pid)) == self.stack.plan.pipeline_parallel_size * RANKS)
        self.victim, self._processes = service, children(service.pid)
        os.kill(self._processes[self._which], self._number)

    def hit_in(self, phase: str, over: Callable[[], bool]) -> None:
        """Lose a process of the instance in which a request is in a phase, unless the request is over before."""
        (kind, gauge), pause = SEEN_BY[phase], threading.Event()
        services = [self.stack.services[f"{kind}-{number}"] for number in range(2)]
        while not (found := [service for service in services if self.stack.gauge(service.id, gauge)]):
            if over():
                return
            pause.wait(0.005)
        if phase.endswith("drains"):
            found[0].signal(signal.SIGTERM)
        self.hit(found[0])

    def check(self) -> None:
        """The instance ends with all its processes; started again it serves, and no memory is left."""
        assert self.victim is not None
        self.victim.wait(WAIT_S)
        assert not wait_gone(self._processes, WAIT_S)
        self.stack.spawn_again(self.victim.id).wait_ready(WAIT_S)
        self.stack.wait_joined(WAIT_S)
        self.stack.check_at_rest()
        until(lambda: self._shared_memories() <= self._shared)

    def _shared_memories(self) -> int:
        """Number of pools and of ranks' pages that processes of the stack have."""
        found = set[str]()
        for service in self.stack.services.values():
            for pid in (service.pid, *descendants(service.pid)):
                found.update(re.findall(r"(\d+) +/memfd:moonpool-kv", Path(f"/proc/{pid}/maps").read_text()))
        return len(found)


def ask(stack: CheckedStack, prompt: list[int]) -> GenerateResult:
    with Client(stack.addresses) as client:
        return client.generate(token_ids=prompt, sampling=SAMPLING)


def ask_and_check(stack: CheckedStack, reference: Reference, prompt: list[int]) -> None:
    output = ask(stack, prompt).token_ids
    assert len(output) == SAMPLING.max_tokens
    reference.assert_greedy(prompt, output)


@pytest.mark.parametrize("which", PROCESSES)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", SEEN_BY)
def test_a_process_is_lost_under_a_request(
    stack: CheckedStack, reference: Reference, phase: str, number: signal.Signals, which: str
) -> None:
    loss = Loss(stack, number, which)
    for tried in range(TRIES):
        prompt = tokens(LONG, f"{phase} {number.name} {which} {tried}")
        if phase == "loading":  # what the decode instance has, and prefill has forgotten
            first = ask(stack, prompt)
            stack.check_at_rest()
            stack.restart(first.placement.prefill)
            prompt += tokens(20, "tail")
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(ask_and_check, stack, reference, prompt)
            loss.hit_in(phase, running.done)
            running.result()
        if loss.victim is not None:
            break
    loss.check()


@pytest.mark.parametrize("which", PROCESSES)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_process_is_lost_idle(
    stack: CheckedStack, reference: Reference, kind: str, number: signal.Signals, which: str
) -> None:
    loss = Loss(stack, number, which)
    loss.hit(stack.services[f"{kind}-0"])
    ask_and_check(stack, reference, tokens(60, f"idle {kind} {number.name} {which}"))
    loss.check()


@pytest.mark.parametrize("which", PROCESSES)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_process_is_lost_while_its_instance_starts(
    stack: CheckedStack, reference: Reference, kind: str, number: signal.Signals, which: str
) -> None:
    """Others serve meanwhile."""
    loss, name = Loss(stack, number, which), f"{kind}-0"
    stack.services[name].signal(signal.SIGTERM)
    stack.services[name].wait(WAIT_S)
    loss.hit(stack.spawn_again(name))
    ask_and_check(stack, reference, tokens(60, f"starting {kind} {number.name} {which}"))
    assert stack.services[name].wait(WAIT_S) != 0
    loss.check()
