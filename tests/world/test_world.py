"""The services on virtual time: right tokens, the same messages under any hash seed, and the simulator."""

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.world.process import in_copy
from tests.world.starvation import starved
from tests.world.trace import Outcome, Run, simulated

ROOT = Path(__file__).parents[2]
EACH = {"ttft_s": 0.02, "tpot_s": 0.05, "end_s": 0.01}
"""By what share a time of one request may differ between the two; an answer of two tokens is the worst."""
ALL = 0.003
"""The same of median and mean."""
ELSEWHERE = 0.15
"""Share of requests that may be placed at another prefill instance."""


def run(module: str, *flags: str, hash_seed: int = 0) -> list[dict[str, Any]]:
    """A program of this folder in a process of its own; its lines of JSON."""
    command = ["python", "-m", f"tests.world.{module}", *flags]
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


WORKLOAD = Run(requests=20, prefill=3, decode=3, jitter_s=0.0)
"""Without random delays: what comes first decides between equal instances in both worlds alike."""
FLAGS = ("--requests", "20", "--prefill", "3", "--decode", "3", "--jitter-s", "0")


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """The first requests of the trace, served on virtual time."""
    return run("trace", *FLAGS)[0]


def test_every_token_is_right_and_messages_do_not_depend_on_the_hash_seed(served: dict[str, Any]) -> None:
    assert (len(served["outcomes"]), served["wrong"]) == (WORKLOAD.requests, [])
    again = run("trace", *FLAGS, hash_seed=1)[0]
    assert (again["messages"], again["digest"]) == (served["messages"], served["digest"])


def test_the_simulator_decides_and_takes_as_long_as_the_services(served: dict[str, Any]) -> None:
    """It models what the services do; nothing of it is fitted to them.

    Which of two equal instances gets a request follows from the last digits of the speeds that they have measured. So
    prefill instances are compared under the names that fit best, and placements at decode, where all are equal often,
    by what a request meets there.
    """
    found, expected = [Outcome(**outcome) for outcome in served["outcomes"]], simulated(WORKLOAD)
    assert [each.cached_tokens for each in found] == [each.cached_tokens for each in expected]
    names = [f"prefill-{number}" for number in range(WORKLOAD.prefill)]
    renamed = [dict(zip(names, others, strict=True)) for others in itertools.permutations(names)]
    pairs = [(each.prefill, other.prefill) for each, other in zip(found, expected, strict=True)]
    elsewhere = min(sum(other != name[each] for each, other in pairs) for name in renamed)
    assert elsewhere <= ELSEWHERE * len(found), f"{elsewhere} of {len(found)} at another prefill instance"
    for figure, tolerance in EACH.items():
        times = [[getattr(each, figure) for each in outcomes] for outcomes in (found, expected)]
        for number, (one_s, other_s) in enumerate(zip(*times, strict=True)):
            assert one_s == pytest.approx(other_s, rel=tolerance), f"{figure} of request {number}"
        for quantile in (statistics.median, statistics.fmean):
            one_s, other_s = map(quantile, times)
            assert one_s == pytest.approx(other_s, rel=ALL), f"{figure}, {quantile.__name__}"


RULES = ("random", "load_balance", "kvcache_centric", "social")
"""From the slowest on."""
CROWDED = Run(requests=80, prefill=4, decode=4, jitter_s=0.0, speed=8.0, decode_prompt_tokens=0)
"""What is compared is where prompts are computed."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rules_of_placement_are_in_the_same_order_as_in_the_simulator() -> None:
    """More comes than the instances can do for the whole time, so that rules differ by a tenth and more."""
    flags = ["--requests", "80", "--prefill", "4", "--decode", "4", "--jitter-s", "0", "--speed", "8"]
    flags += ["--decode-prompt-tokens", "0"]
    means: dict[str, list[float]] = {"services": [], "simulator": []}
    for rule in RULES:
        outcomes = [Outcome(**each) for each in run("trace", *flags, "--policy", rule)[0]["outcomes"]]
        means["services"].append(statistics.fmean([outcome.ttft_s for outcome in outcomes]))
        means["simulator"].append(statistics.fmean([each.ttft_s for each in simulated(replace(CROWDED, policy=rule))]))
    assert all(found == sorted(found, reverse=True) for found in means.values()), means
    for services_s, simulator_s in list(zip(*means.values(), strict=True))[1:]:  # draws differ
        assert services_s == pytest.approx(simulator_s, rel=0.05), means


EVERY_SERVICE = ("conductor-0", "kvstore-0", "prefill-0", "decode-0", "decode-1")


@pytest.mark.parametrize(
    "services", [("decode-0",), pytest.param(EVERY_SERVICE[1:], marks=pytest.mark.slow), EVERY_SERVICE]
)
def test_who_gets_no_processor_is_not_lost(services: Sequence[str]) -> None:
    """For twenty seconds, while a stream runs there: it goes on where it was."""
    found = in_copy(partial(starved, services, "starve"))
    assert found == {"lost": [], "right": True, "placements": 1}


def test_who_is_stopped_is_lost() -> None:
    found = in_copy(partial(starved, ("decode-0",), "stop"))
    assert found == {"lost": ["decode-0"], "right": True, "placements": 2}
