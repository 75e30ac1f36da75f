"""A value over time as an SVG file, with lines at constant values."""

import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 320, 64, 40, 16, 44
_COLOURS = ("#2a6fdb", "#d9822b", "#c4262e", "#4a8f3c")
_TICKS = 4

Point = tuple[float, float]


def nice(most: float) -> float:
    """The next number among 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most * (1 - 1e-9))


def picture(title: str, unit: str, points: Sequence[Point], lines: Sequence[tuple[str, float]]) -> str:
    """The drawing.

    Args:
        title: title above the chart.
        unit: the values' unit.
        points: (seconds, value), ascending in time.
        lines: names of constant values, and the values.
    """
    last_s = max((at for at, _ in points), default=0.0) or 1.0
    most = max([value for _, value in points] + [value for _, value in lines], default=0.0) or 1.0
    step = nice(most / _TICKS)
    top = math.ceil(most / step) * step

    def place(at: float, value: float) -> tuple[float, float]:
        x = LEFT + at / last_s * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    body = [f'<text x="{LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>']
    for tick in range(round(top / step) + 1):
        x, y = place(0.0, tick * step)
        body.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        body.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick * step:g} {html.escape(unit)}</text>')
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(part * last_s, 0.0)
        body.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{part * last_s:.3g} s</text>')
    for number, (name, value) in enumerate(lines):
        x, y = place(0.0, value)
        colour = _COLOURS[1 + number % (len(_COLOURS) - 1)]
        body.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="{colour}" stroke-dasharray="5 3"/>')
        label = html.escape(f"{name}: {value:.0f} {unit}")
        body.append(f'<text x="{WIDTH - RIGHT}" y="{y - 4}" text-anchor="end" fill="{colour}">{label}</text>')
    path = " ".join("{},{}".format(*place(at, value)) for at, value in points)
    body.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[0]}" stroke-width="1.5"/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"
