"""What a simulated core heard and decided, as a script for the service's shell and to compare with its journal."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.journal import journal_files, rerun
from moonpool.scheduling.state_machine import Tick
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig, Runs
from simulator.traces.mooncake import TraceRequest
from tests.unit.transport.fakes import LAYOUT

SEED = 20261122
BT = LAYOUT.block_tokens
ONE_BY_ONE = Runs(1)
"""Each step of decode is ordered by itself."""


def some_seeds(often: int, most: int = 60) -> list[Any]:
    """So many seeds from 1 on, and more of them where slow tests run."""
    return [seed if seed <= often else pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, most + 1)]


@dataclass
class Noted:
    """An event, when it was handled, and what followed from it."""

    now: float
    event: Any
    actions: list[Any]


def requests(count: int, rng: random.Random, *, blocks: int = 6, shared: int = 2) -> list[TraceRequest]:
    """Prompts of up to so many blocks, half of them with a common beginning; answers of up to five blocks."""
    found, at, next_id = [], 0.0, 100
    for _ in range(count):
        at += rng.expovariate(25.0) * 1000
        tokens = rng.randint(1, blocks * BT)
        common = rng.randint(0, shared) if rng.random() < 0.5 else 0
        needed = -(-tokens // BT)
        ids = (*range(min(common, needed)), *range(next_id, next_id + max(0, needed - common)))
        next_id += needed
        found.append(TraceRequest(at, tokens, rng.randint(1, 5 * BT), ids))
    return found


def simulated(
    config: ClusterConfig,
    trace: list[TraceRequest],
    name: str,
    runs: Runs = ONE_BY_ONE,
    also: Callable[[Cluster], None] = lambda _: None,
) -> list[Noted]:
    """What the core of the instance "p0" or "d0" of a simulated cluster heard and decided. `also` plans more."""
    noted: list[Noted] = []
    cluster = Cluster(config, lambda _: None, runs=runs)
    host = cluster.prefills[0].host if name == "p0" else cluster.decodes[0].host
    host.heard = lambda now, event, actions: noted.append(Noted(now, event, list(actions)))
    cluster.feed(trace)
    also(cluster)
    cluster.run()
    cluster.check_at_rest()
    return noted


def journalled(folder: Path) -> list[Noted]:
    """What the service's core heard and decided, by its journal, whose rerun gives the same actions."""
    noted: list[Noted] = []
    [path] = journal_files(folder)
    again = rerun(path, lambda _, entry, actions: noted.append(Noted(entry.now, entry.event, actions)), check=True)
    assert again.difference is None
    return noted


def decided(noted: list[Noted], *others: type) -> list[Noted]:
    """Without what only says that time has passed, and other events that decide nothing."""
    return [one for one in noted if not isinstance(one.event, (Tick, *others)) or one.actions]


def plain(value: Any) -> Any:
    """A value to compare: what the shell measures in nanoseconds is about what the simulator has."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-4, abs=1e-6)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if is_dataclass(value):
        return type(value).__name__, [plain(getattr(value, field.name)) for field in fields(value)]
    return value


def assert_same(found: list[Noted], expected: list[Noted]) -> None:
    """The same kinds of events at the same picoseconds, and the same actions."""
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        where = f"event {number} at {other.now}: {other.event}"
        assert type(one.event) is type(other.event), where
        assert one.now == other.now, where
        assert [plain(action) for action in one.actions] == [plain(action) for action in other.actions], where
    assert len(found) == len(expected)
