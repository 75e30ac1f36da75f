"""The services on virtual time: right tokens, the same messages under any hash seed, storms, and the simulator."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.emulated.profile import load_profile
from simulator.cluster.config import ClusterConfig
from simulator.experiments.frame import simulate
from simulator.traces.mooncake import Trace
from tests.world.cluster import PROFILE
from tests.world.trace import TRACE

ROOT = Path(__file__).parents[2]
REQUESTS = 20
END_TOLERANCE, TTFT_TOLERANCE = 0.01, 0.05
STORMS = (1, 2, 3)
MORE_STORMS = [range(first, first + 10) for first in range(4, 104, 10)]


def run(module: str, *flags: str, hash_seed: int = 0) -> list[dict[str, Any]]:
    """A program of this folder in a process of its own; its lines of JSON."""
    command = ["python", "-m", f"tests.world.{module}", *flags]
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """The first requests of the trace, served on virtual time."""
    return run("trace", "--requests", str(REQUESTS))[0]


def test_every_token_is_right_and_messages_do_not_depend_on_the_hash_seed(served: dict[str, Any]) -> None:
    assert (served["requests"], served["wrong"]) == (REQUESTS, [])
    again = run("trace", "--requests", str(REQUESTS), hash_seed=1)[0]
    assert (again["messages"], again["digest"]) == (served["messages"], served["digest"])


def test_the_simulator_agrees(served: dict[str, Any]) -> None:
    """It models what the services do; nothing of it is fitted to them."""
    config = ClusterConfig(profile=load_profile(PROFILE), prefill=1, decode=1, kvstore=1)
    summary, _ = simulate(config, Trace(TRACE, REQUESTS))
    assert served["duration_s"] == pytest.approx(summary.duration_s, rel=END_TOLERANCE)
    assert served["ttft_p50_s"] == pytest.approx(summary.ttft_s["p50"], rel=TTFT_TOLERANCE)


def storms(seeds: Sequence[int], seconds: int, hash_seed: int = 0) -> list[dict[str, Any]]:
    """Storms in one process, as most of a storm's start is the imports."""
    flags = ["--seconds", str(seconds), *(flag for seed in seeds for flag in ("--seed", str(seed)))]
    return run("storm", *flags, hash_seed=hash_seed)


def test_storms() -> None:
    assert all(storm["faults"] for storm in storms(STORMS, 10))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", MORE_STORMS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
@pytest.mark.timeout(600)
def test_more_storms(seeds: Sequence[int]) -> None:
    """Each storm twice: its messages do not depend on the hash seed either."""
    first, second = (storms(seeds, 20, hash_seed) for hash_seed in (0, 1))
    assert [storm["log"] for storm in first] == [storm["log"] for storm in second]
