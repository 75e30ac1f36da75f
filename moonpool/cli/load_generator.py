"""Load generator: open-loop and closed-loop arrivals, latency summary, and a latency chart (SVG).

Open loop: requests start when due, whatever the others do, and latency counts from the due time, so a stalled server
cannot hide the stall (no coordinated omission). Closed loop: a fixed number of clients, each starting a request after
the client's last has ended. A trace is both: requests come at their times, and an agent's turns when the turn before
has ended.
"""

import asyncio
import html
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
        """Notes tokens that came together: they share the time since the last tokens."""
        if tokens and self.first is None:
            self.first = self.last = now
            self.tokens, tokens = 1, tokens - 1
        if tokens:
            self.gaps += [(now - self.last) / tokens] * tokens
            self.tokens += tokens
            self.last = now


SendRequest = Callable[[int, RequestOutcome, Callable[[], float]], Awaitable[None]]
"""Sends request `index`, filling in the outcome's `first` and `tokens` by the given clock."""


@dataclass(frozen=True, slots=True)
class LoadSummary:
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
    """Due times from a Poisson process."""
    generator = random.Random(seed)
    due = 0.0
    return [due := due + generator.expovariate(rate_per_s) for _ in range(count)]


class TraceSchedule:
    """When a trace's requests are due: at their times, or after the requests they wait for. The first comes at 0.

    Args:
        requests: the trace's requests.
        time_scale: trace seconds that pass in one second, delays for tools and people included.
        clock: seconds since the first request was due.
    """

    def __init__(self, requests: Sequence[TraceRequest], time_scale: float, clock: Callable[[], float]) -> None:
        self._begin = min((one.timestamp for one in requests if not one.wait_for), default=0.0)
        self._per_ms, self._clock = 0.001 / time_scale, clock
        self._over = {one.name: asyncio.Event() for one in requests if one.name}

    async def due(self, request: TraceRequest) -> float:
        """Wait until a request is due; return that time."""
        for name in request.wait_for:
            await self._over[name].wait()
        since = self._clock() if request.wait_for else 0.0
        due = since + self._per_ms * (request.delay if request.wait_for else request.timestamp - self._begin)
        await asyncio.sleep(max(0.0, due - self._clock()))
        return due

    def ended(self, request: TraceRequest) -> None:
        """Notes a request's end, also by an error: requests that wait for this request may come."""
        if request.name:
            self._over[request.name].set()


async def trace_loop(requests: Sequence[TraceRequest], time_scale: float, send: SendRequest) -> list[RequestOutcome]:
    """Starts each trace request when due; a time scale of 2 replays the trace twice as fast."""
    begin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin

    schedule = TraceSchedule(requests, time_scale, clock)

    async def one(index: int, request: TraceRequest) -> RequestOutcome:
        outcome = await _send_guarded(index, RequestOutcome(await schedule.due(request)), send, clock)
        schedule.ended(request)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, request)) for index, request in enumerate(requests)]
    return [task.result() for task in tasks]


async def open_loop(arrivals: Sequence[float], send: SendRequest) -> list[RequestOutcome]:
    """Starts each request when due."""
    begin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin

    async def one(index: int, due: float) -> RequestOutcome:
        await asyncio.sleep(max(0.0, due - clock()))
        return await _send_guarded(index, RequestOutcome(due), send, clock)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, due)) for index, due in enumerate(arrivals)]
    return [task.result() for task in tasks]


async def closed_loop(concurrency: int, count: int, send: SendRequest) -> list[RequestOutcome]:
    """Keeps so many requests running until `count` have ended."""
    begin = time.monotonic()
    outcomes: list[RequestOutcome] = []
    indices = iter(range(count))

    def clock() -> float:
        return time.monotonic() - begin

    async def client() -> None:
        for index in indices:
            outcomes.append(await _send_guarded(index, RequestOutcome(clock()), send, clock))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return outcomes


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


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles and the mean; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] for share in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def summarize(
    outcomes: Sequence[RequestOutcome], *, warmup: int = 0, ttft_slo_s: float = math.inf, tpot_slo_s: float = math.inf
) -> LoadSummary:
    """Sums up all but the first `warmup` requests by due time; goodput counts requests within both SLOs."""
    counted = sorted(outcomes, key=lambda outcome: outcome.due)[warmup:]
    good = [outcome for outcome in counted if not outcome.error and outcome.first is not None]
    duration = max((outcome.ended for outcome in counted), default=0.0) - min((o.due for o in counted), default=0.0)
    ttft = [outcome.first - outcome.due for outcome in good if outcome.first is not None]
    tpot = [(o.ended - o.first) / (o.tokens - 1) if o.tokens > 1 and o.first is not None else 0.0 for o in good]
    within = sum(a <= ttft_slo_s and b <= tpot_slo_s for a, b in zip(ttft, tpot, strict=True))
    per_second = 1 / duration if duration > 0 else 0.0
    return LoadSummary(
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


WIDTH, HEIGHT, MARGIN = 860, 320, 48
_LEFT_SHARE = 0.62  # of the width that the left half takes
_CHART_COLOURS = {"first": "#2a6fdb", "end": "#d9822b", "error": "#c4262e"}


def latency_chart(title: str, outcomes: Sequence[RequestOutcome]) -> str:
    """Left: seconds to the first answer and to the end, by due time. Right: share of requests within that time."""
    good = [outcome for outcome in outcomes if not outcome.error]
    first = [(o.due, o.first - o.due) for o in good if o.first is not None]
    end = [(o.due, o.ended - o.due) for o in good]
    failed = [(o.due, o.ended - o.due) for o in outcomes if o.error]
    last_s = max((o.due for o in outcomes), default=0.0) or 1.0
    most_s = rounded_up(max((seconds for _, seconds in (*first, *end, *failed)), default=0.0) or 1.0)
    left = _Axes(MARGIN, int(WIDTH * _LEFT_SHARE), last_s, most_s)
    right = _Axes(int(WIDTH * _LEFT_SHARE) + MARGIN, WIDTH - 12, 1.0, most_s)
    body = [
        f'<text x="{MARGIN}" y="18" font-weight="bold">{html.escape(title)}</text>',
        *left.frame("due, s", last_s, most_s),
        *right.frame("share of requests", 1.0, most_s),
    ]
    for name, points in (("end", end), ("first", first), ("error", failed)):
        colour = _CHART_COLOURS[name]
        body += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in map(left.place, points)]
        body += _svg_curve(right, sorted(seconds for _, seconds in points), colour)
    body += _svg_legend(first, end, len(failed))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def rounded_up(most: float) -> float:
    """The next number among 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most * (1 - 1e-9))


class _Axes:
    """A rectangle with a horizontal scale from 0 to `most_x` and a vertical scale from 0 to `most_y`."""

    def __init__(self, x0: int, x1: int, most_x: float, most_y: float) -> None:
        self._x0, self._x1, self._y0, self._y1 = x0, x1, HEIGHT - MARGIN, MARGIN
        self._most_x, self._most_y = most_x, most_y

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        x = self._x0 + point[0] / self._most_x * (self._x1 - self._x0)
        y = self._y0 + point[1] / self._most_y * (self._y1 - self._y0)
        return round(x, 1), round(y, 1)

    def frame(self, label: str, most_x: float, most_y: float) -> Iterator[str]:
        x0, x1, y0, y1 = self._x0, self._x1, self._y0, self._y1
        yield f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#333"/>'
        for part in (0.0, 0.5, 1.0):
            x, y = self.place((part * most_x, part * most_y))
            yield f'<text x="{x}" y="{y0 + 14}" text-anchor="middle">{part * most_x:.3g}</text>'
            yield f'<text x="{x0 - 4}" y="{y + 4}" text-anchor="end">{part * most_y:.3g} s</text>'
            yield f'<path d="M{x0} {y}H{x1}" stroke="#ddd"/>'
        yield f'<text x="{(x0 + x1) // 2}" y="{y0 + 30}" text-anchor="middle">{label}</text>'


def _svg_curve(axes: _Axes, ordered: Sequence[float], colour: str) -> Iterator[str]:
    if ordered:
        points = (axes.place(((rank + 1) / len(ordered), seconds)) for rank, seconds in enumerate(ordered))
        path = " ".join(f"{x},{y}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _svg_legend(first: Sequence[tuple[float, float]], end: Sequence[tuple[float, float]], failed: int) -> Iterator[str]:
    for line, (name, points) in enumerate((("first", first), ("end", end))):
        found = percentiles([seconds for _, seconds in points])
        text = ", ".join(f"{point} {1e3 * seconds:.1f}" for point, seconds in found.items() if point != "mean")
        words = {"first": "to the first answer", "end": "to the end"}[name]
        head = f'<text x="{WIDTH - 12}" y="{14 + 13 * line}" text-anchor="end" fill="{_CHART_COLOURS[name]}">'
        yield f"{head}{words}, ms: {text or 'none'}</text>"
    if failed:
        yield f'<text x="{WIDTH - 12}" y="40" text-anchor="end" fill="{_CHART_COLOURS["error"]}">{failed} failed</text>'
