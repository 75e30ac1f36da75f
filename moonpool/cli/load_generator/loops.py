"""Sends requests in an open loop, in a closed loop, or as a trace says.

Open loop: requests start when due, whatever the others do, and latency counts from the due time, so a stalled server
cannot hide the stall (no coordinated omission). Closed loop: a fixed number of clients, each starting a request after
the client's last has ended. A trace is both: requests come at their times, and an agent's turns when the turn before
has ended.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.simulator.traces.mooncake import TraceRequest


@dataclass(slots=True)
class RequestOutcome:
    """One request. Times are seconds since the test began.

    Attributes:
        due: planned start.
        first: first token's time; None before.
        ended: end time.
        last: last tokens' time.
        tokens: tokens received.
        gaps: seconds from one token to the next.
        nbytes: KV bytes moved.
        error: type name of the error that ended the request; empty for none.
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
        """Note tokens that came together: they share the time since the last tokens."""
        if tokens and self.first is None:
            self.first = self.last = now
            self.tokens, tokens = 1, tokens - 1
        if tokens:
            self.gaps += [(now - self.last) / tokens] * tokens
            self.tokens += tokens
            self.last = now


SendRequest = Callable[[int, RequestOutcome, Callable[[], float]], Awaitable[None]]
"""Sends request `index`, filling in the outcome's `first` and `tokens` by the given clock."""


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Draw due times from a Poisson process."""
    generator = random.Random(seed)
    due = 0.0
    return [due := due + generator.expovariate(rate_per_s) for _ in range(count)]


async def open_loop(arrivals: Sequence[float], send: SendRequest) -> list[RequestOutcome]:
    """Start each request when due."""
    begin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin

    async def send_one(index: int, due: float) -> RequestOutcome:
        await asyncio.sleep(max(0.0, due - clock()))
        return await _send_guarded(index, RequestOutcome(due), send, clock)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(index, due)) for index, due in enumerate(arrivals)]
    return [task.result() for task in tasks]


async def closed_loop(concurrency: int, numbers: Iterable[int], send: SendRequest) -> list[RequestOutcome]:
    """Keep `concurrency` requests running until `numbers`, which names the requests, is at an end."""
    begin = time.monotonic()
    outcomes: list[RequestOutcome] = []
    indices = iter(numbers)

    def clock() -> float:
        return time.monotonic() - begin

    async def client() -> None:
        for index in indices:
            outcomes.append(await _send_guarded(index, RequestOutcome(clock()), send, clock))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return outcomes


async def trace_loop(requests: Sequence[TraceRequest], time_scale: float, send: SendRequest) -> list[RequestOutcome]:
    """Start each request of a trace when due; a time scale of 2 replays the trace twice as fast."""
    begin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin

    schedule = TraceSchedule(requests, time_scale, clock)

    async def send_one(index: int, request: TraceRequest) -> RequestOutcome:
        outcome = await _send_guarded(index, RequestOutcome(await schedule.due(request)), send, clock)
        schedule.ended(request)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(index, request)) for index, request in enumerate(requests)]
    return [task.result() for task in tasks]


class TraceSchedule:
    """When a trace's requests are due: at their times, or after the requests they wait for. The first comes at 0.

    Args:
        requests: the trace's requests.
        time_scale: trace seconds that pass in one second, delays for tools and people included.
        clock: seconds since the first request was due.
    """

    def __init__(self, requests: Sequence[TraceRequest], time_scale: float, clock: Callable[[], float]) -> None:
        self._begin = min((request.timestamp for request in requests if not request.wait_for), default=0.0)
        self._per_ms, self._clock = 0.001 / time_scale, clock
        self._over = {request.name: asyncio.Event() for request in requests if request.name}

    async def due(self, request: TraceRequest) -> float:
        """Wait until a request is due; return that time."""
        for name in request.wait_for:
            await self._over[name].wait()
        since = self._clock() if request.wait_for else 0.0
        due = since + self._per_ms * (request.delay if request.wait_for else request.timestamp - self._begin)
        await asyncio.sleep(max(0.0, due - self._clock()))
        return due

    def ended(self, request: TraceRequest) -> None:
        """Note a request's end, also by an error: requests that wait for this request may come."""
        if request.name:
            self._over[request.name].set()


def numbers_until(ended: Callable[[], bool]) -> Iterator[int]:
    """Number requests until `ended` says that no further request is wanted."""
    return itertools.takewhile(lambda _: not ended(), itertools.count())


async def _send_guarded(
    index: int, outcome: RequestOutcome, send: SendRequest, clock: Callable[[], float]
) -> RequestOutcome:
    try:
        await send(index, outcome, clock)
    except MoonpoolError as error:
        outcome.error = type(error).__name__
    except grpc.RpcError as failure:  # of programs that call a service's methods directly
        outcome.error = type(from_rpc_error(failure)).__name__
    outcome.ended = clock()
    return outcome
