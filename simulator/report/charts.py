"""Charts as SVG, of points, lines and text, written without a library."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 64, 150, 40, 48
_COLOURS = ("#2a6fdb", "#d9822b", "#2f9e44", "#c4262e", "#7048c6", "#555555", "#0b8a8f")
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common scale, or bars when the places have names.

    Attributes:
        title, x_label, y_label: for people.
        series: points of each line, ascending in x.
        names: of the places 0, 1, 2, ... when they are no numbers: bars are drawn.
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
    """Places of values in the picture; all points of the chart fit, and 0 on the vertical scale."""

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
        """Width of one named place."""
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
