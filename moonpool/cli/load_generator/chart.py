"""The latency chart of a load, an SVG picture."""

import html
import math
from collections.abc import Iterator, Sequence

from moonpool.cli.load_generator.loops import RequestOutcome
from moonpool.cli.load_generator.summary import percentiles

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
