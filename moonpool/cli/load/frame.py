"""The frame of `moonpool bench serve` and of all load tests: arrivals, outcomes, percentiles.

Open loop: requests start when they are due, whatever the others do, and latency counts from the due time, so a stalled
server cannot hide its stall (no coordinated omission). Closed loop: a fixed number of clients, each starting its next
request when the last has ended.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from moonpool.errors import MoonpoolError
from moonpool.rpc.errors import from_rpc_error


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds since the test began.

    Attributes:
        due: when it should have started.
        first: when its first token came; None before.
        ended: when it ended.
        last: when its last tokens came.
        tokens: tokens received.
        gaps: seconds from one token to the next.
        nbytes: bytes of KV moved.
        error: type name of the error that ended it; empty for none.
    """

    due: float
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    nbytes: int = 0
    error: str = ""

    def note(self, tokens: int, now: float) -> None:
        """Tokens have come together: the time since the last ones is shared among them."""
        if tokens and self.first is None:
            self.first = self.last = now
            self.tokens, tokens = 1, tokens - 1
        if tokens:
            self.gaps += [(now - self.last) / tokens] * tokens
            self.tokens += tokens
            self.last = now


Send = Callable[[int, Outcome, Callable[[], float]], Awaitable[None]]
"""Sends request `index`, filling in the outcome's `first` and `tokens` by the given clock."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load test found. Times in seconds; percentiles over requests that succeeded after the warm-up."""

    requests: int
    errors: dict[str, int]
    duration_s: float
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float] = field(default_factory=dict)
    itl_s: dict[str, float] = field(default_factory=dict)
    e2e_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float = 0.0


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Due times of a Poisson process."""
    generator = random.Random(seed)
    due = 0.0
    return [due := due + generator.expovariate(rate_per_s) for _ in range(count)]


def trace_arrivals(times_s: Sequence[float], time_scale: float = 1.0) -> list[float]:
    """Due times of a trace that begins at 0; a time scale of 2 replays it twice as fast."""
    begin = min(times_s, default=0.0)
    return [(time - begin) / time_scale for time in times_s]


async def open_loop(arrivals: Sequence[float], send: Send) -> list[Outcome]:
    """Starts each request when it is due."""
    begin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin

    async def one(index: int, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, due - clock()))
        return await _guarded(index, Outcome(due), send, clock)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, due)) for index, due in enumerate(arrivals)]
    return [task.result() for task in tasks]


async def closed_loop(concurrency: int, count: int, send: Send) -> list[Outcome]:
    """Keeps so many requests running until `count` have ended."""
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    indices = iter(range(count))

    def clock() -> float:
        return time.monotonic() - begin

    async def client() -> None:
        for index in indices:
            outcomes.append(await _guarded(index, Outcome(clock()), send, clock))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return outcomes


async def _guarded(index: int, outcome: Outcome, send: Send, clock: Callable[[], float]) -> Outcome:
    try:
        await send(index, outcome, clock)
    except MoonpoolError as error:
        outcome.error = type(error).__name__
    except grpc.RpcError as failure:  # of programs that call a service's methods directly
        outcome.error = type(from_rpc_error(failure)).__name__
    outcome.ended = clock()
    return outcome


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles and the mean; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] for share in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def summarize(
    outcomes: Sequence[Outcome], *, warmup: int = 0, ttft_slo_s: float = math.inf, tpot_slo_s: float = math.inf
) -> Summary:
    """Sums up all but the first `warmup` requests by due time; goodput counts those within both SLOs."""
    counted = sorted(outcomes, key=lambda outcome: outcome.due)[warmup:]
    good = [outcome for outcome in counted if not outcome.error and outcome.first is not None]
    duration = max((outcome.ended for outcome in counted), default=0.0) - min((o.due for o in counted), default=0.0)
    ttft = [outcome.first - outcome.due for outcome in good if outcome.first is not None]
    tpot = [(o.ended - o.first) / (o.tokens - 1) if o.tokens > 1 and o.first is not None else 0.0 for o in good]
    within = sum(a <= ttft_slo_s and b <= tpot_slo_s for a, b in zip(ttft, tpot, strict=True))
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(counted),
        errors=dict(Counter(outcome.error for outcome in counted if outcome.error)),
        duration_s=duration,
        tokens_per_s=sum(outcome.tokens for outcome in good) * per_second,
        requests_per_s=len(good) * per_second,
        goodput_per_s=within * per_second,
        ttft_s=percentiles(ttft),
        tpot_s=percentiles(tpot),
        itl_s=percentiles([gap for outcome in good for gap in outcome.gaps]),
        e2e_s=percentiles([outcome.ended - outcome.due for outcome in good]),
        bytes_per_s=sum(outcome.nbytes for outcome in good) * per_second,
    )
