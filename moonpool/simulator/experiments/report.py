"""What a run found: quantiles in bounded memory, a summary of requests, and charts as SVG."""

import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.config import SloTargets
from moonpool.simulator.cluster.requests import DONE, Request

BUCKET_WIDTH = 1.002
_LOG_BUCKET_WIDTH = math.log(BUCKET_WIDTH)
LEAST_VALUE = 1e-9
"""Smaller values count as this value."""
LONGEST_SHARE = 10
"""A request's TBT is the mean over the longest 1 / `LONGEST_SHARE` of the request's intervals."""
_COLOURS = ("#2a6fdb", "#d9822b", "#2f9e44", "#c4262e", "#7048c6", "#555555", "#0b8a8f")
_TICKS = 5


@dataclass(slots=True)
class LatencyQuantiles:
    """Values of at least 0. Quantiles are by nearest rank, exact to 0.1 %; the mean is exact."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        bucket = math.floor(math.log(max(value, LEAST_VALUE)) / _LOG_BUCKET_WIDTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def at(self, share: float) -> float:
        """The value that `share` of all values do not exceed; 0 for no values."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self.most, float(BUCKET_WIDTH ** (bucket + 0.5)))
        return 0.0

    def summary(self) -> dict[str, float]:
        """Mean and percentiles, four digits; empty for no values."""
        if not self.count:
            return {}
        points = {f"p{share}": digits(self.at(share / 100)) for share in (50, 90, 99)}
        return {"mean": digits(self.total / self.count), **points}


def digits(value: float, count: int = 4) -> float:
    """Rounded to so many significant digits."""
    return float(f"{value:.{count}g}")


@dataclass(frozen=True, slots=True)
class Summary:
    """What requests went through. Seconds; shares are shares of all requests, refused requests included."""

    requests: int
    outcomes: dict[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float
    goodput_share: float
    reused_share: float
    """Share of prompt tokens that were not computed."""
    ttft_s: dict[str, float] = field(default_factory=dict)
    tbt_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float] = field(default_factory=dict)
    e2e_s: dict[str, float] = field(default_factory=dict)
    ttft_error: dict[str, float] = field(default_factory=dict)
    """|predicted - measured| / measured, for the TTFT."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Collector:
    """Sums over requests that have ended."""

    def __init__(self, slo: SloTargets) -> None:
        self._slo = slo
        self._outcomes: Counter[str] = Counter()
        self._ttft, self._tbt, self._tpot, self._e2e, self._error = (LatencyQuantiles() for _ in range(5))
        self._tokens = self._prompt_tokens = self._reused_tokens = self._good = 0
        self._begin: int | None = None
        self._end = 0

    def add(self, request: Request) -> None:
        """A request has ended."""
        self._outcomes[request.outcome] += 1
        self._begin = request.arrived if self._begin is None else min(self._begin, request.arrived)
        self._end = max(self._end, request.ended_at)
        if request.outcome != DONE:
            return
        self._tokens += request.made
        self._prompt_tokens += request.tokens
        self._reused_tokens += request.reused
        intervals = request.intervals
        ttft, tbt = (request.first_at - request.arrived) / PS, longest_mean(intervals) / PS
        e2e = (request.ended_at - request.arrived) / PS
        self._ttft.add(ttft)
        self._e2e.add(e2e)
        self._error.add(abs(request.predicted_ttft_s - ttft) / ttft)
        if intervals:
            self._tbt.add(tbt)
            self._tpot.add(sum(intervals) / len(intervals) / PS)
        self._good += ttft <= self._slo.ttft_s and tbt <= self._slo.tbt_s

    def summary(self) -> Summary:
        """The sums so far."""
        requests = self._outcomes.total()
        duration = (self._end - (self._begin or 0)) / PS
        each_s = 1 / duration if duration else 0.0
        return Summary(
            requests=requests,
            outcomes=dict(sorted(self._outcomes.items())),
            duration_s=digits(duration, 6),
            requests_per_s=digits(self._outcomes[DONE] * each_s),
            tokens_per_s=digits(self._tokens * each_s),
            goodput_per_s=digits(self._good * each_s),
            goodput_share=digits(self._good / requests if requests else 0.0),
            reused_share=digits(self._reused_tokens / self._prompt_tokens if self._prompt_tokens else 0.0),
            ttft_s=self._ttft.summary(),
            tbt_s=self._tbt.summary(),
            tpot_s=self._tpot.summary(),
            e2e_s=self._e2e.summary(),
            ttft_error=self._error.summary(),
        )


def longest_mean(intervals: Sequence[int]) -> float:
    """Mean over the longest tenth of intervals, at least one interval; 0 for none."""
    if not intervals:
        return 0.0
    longest = sorted(intervals)[-math.ceil(len(intervals) / LONGEST_SHARE) :]
    return sum(longest) / len(longest)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 64, 150, 40, 48
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common scale, or bars when the places have names.

    Attributes:
        title, x_label, y_label: for people.
        series: each line's points, ascending in x.
        names: names for the places 0, 1, 2, ... when they are no numbers: bars are drawn.
        log_x: the horizontal scale is logarithmic; all x are positive.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    names: Sequence[str] = ()
    log_x: bool = False

    def svg(self) -> str:
        """The picture."""
        axes = _Axes(self)
        body = [
            f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(self.title)}</text>',
            *axes.frame(),
            *(self._bars(axes) if self.names else self._lines(axes)),
            *self._legend(),
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
        )

    def _lines(self, axes: "_Axes") -> Iterator[str]:
        for colour, points in zip(_colours(), self.series.values(), strict=False):
            path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in points)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            yield from (f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="2.5" fill="{colour}"/>' for x, y in points)

    def _bars(self, axes: "_Axes") -> Iterator[str]:
        width = axes.slot * 0.8 / len(self.series)
        for place, (colour, points) in enumerate(zip(_colours(), self.series.values(), strict=False)):
            for x, y in points:
                left = axes.x(x) + (place - len(self.series) / 2) * width
                top = axes.y(y)
                yield (
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
                    f'fill="{colour}"/>'
                )

    def _legend(self) -> Iterator[str]:
        for line, (colour, name) in enumerate(zip(_colours(), self.series, strict=False)):
            y = TOP + 6 + 16 * line
            yield f'<path d="M{WIDTH - RIGHT + 14} {y}h16" stroke="{colour}" stroke-width="3"/>'
            yield f'<text x="{WIDTH - RIGHT + 36}" y="{y + 4}">{html.escape(name)}</text>'


def _colours() -> Iterator[str]:
    while True:
        yield from _COLOURS


class _Axes:
    """Values' places in the picture; all the chart's points fit, and 0 on the vertical scale."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        points = [point for series in chart.series.values() for point in series]
        xs = [self._scale(x) for x, _ in points] or [0.0]
        self._least_x, self._most_x = min(xs), max(xs)
        if chart.names:
            self._least_x, self._most_x = -0.5, len(chart.names) - 0.5
        self._span = (self._most_x - self._least_x) or 1.0
        self._most_y = max((y for _, y in points), default=1.0) or 1.0

    @property
    def slot(self) -> float:
        """Width for one named place."""
        return (WIDTH - LEFT - RIGHT) / self._span

    def _scale(self, x: float) -> float:
        return math.log(x) if self._chart.log_x else x

    def x(self, x: float) -> float:
        return round(LEFT + (self._scale(x) - self._least_x) / self._span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, y: float) -> float:
        return round(HEIGHT - BOTTOM - y / self._most_y * (HEIGHT - TOP - BOTTOM), 1)

    def frame(self) -> Iterator[str]:
        bottom, chart = HEIGHT - BOTTOM, self._chart
        yield f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>'
        for tick in range(_TICKS):
            value = self._most_y * tick / (_TICKS - 1)
            y = self.y(value)
            yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end">{value:.3g}</text>'
        for x, text in self._x_ticks():
            yield f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{html.escape(text)}</text>'
        middle = (LEFT + WIDTH - RIGHT) // 2
        yield f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{html.escape(chart.x_label)}</text>'
        yield f'<text x="{LEFT - 52}" y="{TOP - 10}">{html.escape(chart.y_label)}</text>'

    def _x_ticks(self) -> Iterator[tuple[float, str]]:
        if self._chart.names:
            yield from ((self.x(place), name) for place, name in enumerate(self._chart.names))
            return
        for tick in range(_TICKS):
            scaled = self._least_x + self._span * tick / (_TICKS - 1)
            value = math.exp(scaled) if self._chart.log_x else scaled
            yield self.x(value), f"{value:.3g}"
