"""The load tests' arithmetic, and what an open loop must not hide."""

import asyncio
from collections.abc import Callable

import pytest

from moonpool.base.errors import Unavailable
from moonpool.cli.load_generator.loops import RequestOutcome, closed_loop, open_loop, poisson_arrivals
from moonpool.cli.load_generator.summary import percentiles, summarize


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentiles(values) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_summary_counts_from_the_due_time_and_skips_the_warm_up() -> None:
    outcomes = [
        RequestOutcome(due=0.0, first=9.0, ended=9.0, tokens=1),
        RequestOutcome(due=1.0, first=1.5, ended=2.5, tokens=11),
        RequestOutcome(due=2.0, first=4.0, ended=5.0, tokens=11),
        RequestOutcome(due=3.0, ended=3.1, error="Overloaded"),
    ]
    summary = summarize(outcomes, warmup=1, ttft_slo_s=1.0)
    assert summary.requests == 3
    assert summary.errors == {"Overloaded": 1}
    assert summary.duration_s == 4.0
    assert summary.tokens_per_s == 22 / 4
    assert summary.goodput_per_s == 1 / 4
    assert summary.ttft_s["p50"] == 0.5
    assert summary.ttft_s["p99"] == 2.0
    assert summary.tpot_s["p50"] == pytest.approx(0.1)


def test_arrivals_are_reproducible() -> None:
    assert poisson_arrivals(10, 5, seed=1) == poisson_arrivals(10, 5, seed=1)
    assert poisson_arrivals(10, 2000, seed=1)[-1] == pytest.approx(200, rel=0.1)


async def test_closed_loop_keeps_its_concurrency() -> None:
    running = 0
    most = 0

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        outcome.first, outcome.tokens = clock(), 1

    outcomes = await closed_loop(3, range(10), send)
    assert len(outcomes) == 10
    assert most == 3


async def test_open_loop_does_not_wait_for_a_stalled_server() -> None:
    started: list[int] = []
    all_started = asyncio.Event()

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        started.append(index)
        if len(started) == 4:
            all_started.set()
        await all_started.wait()
        if index == 0:
            raise Unavailable("gone")
        outcome.first, outcome.tokens = clock(), 1

    outcomes = await open_loop([0.0, 0.0, 0.0, 0.0], send)
    assert [outcome.error for outcome in outcomes] == ["Unavailable", "", "", ""]
