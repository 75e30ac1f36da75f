"""Predicted against measured times as a picture: one dot per request, both axes logarithmic, in SVG."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_SIDE, _GAP, _LEFT, _TOP, _BOTTOM, _RIGHT = 360, 70, 64, 56, 52, 110
_COLOURS = ("#2a6fdb", "#d9822b", "#c4262e", "#2f9e44", "#7048c6")

Dots = Mapping[str, Sequence[tuple[float, float]]]
"""Seconds (predicted, measured) by what the dots are called."""


class Panel(NamedTuple):
    """Some dots, and the error wanted at most, as a share."""

    dots: Dots
    wanted: float


def picture(title: str, panels: Mapping[str, Panel]) -> str:
    """One square per panel, side by side; lines mark equality and the error wanted at most."""
    width = _LEFT + len(panels) * (_SIDE + _GAP) + _RIGHT - _GAP
    height = _TOP + _SIDE + _BOTTOM
    body = [f'<text x="{_LEFT}" y="20" font-weight="bold">{html.escape(title)}</text>']
    for place, (name, panel) in enumerate(panels.items()):
        body += _Square(_LEFT + place * (_SIDE + _GAP), panel.dots).draw(name, panel.wanted)
    names = dict.fromkeys(name for panel in panels.values() for name in panel.dots)
    body += _legend(width - _RIGHT + 14, list(names))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _legend(left: int, names: Sequence[str]) -> Iterator[str]:
    for line, name in enumerate(names):
        y = _TOP + 8 + 16 * line
        yield f'<circle cx="{left}" cy="{y}" r="4" fill="{_COLOURS[line % len(_COLOURS)]}"/>'
        yield f'<text x="{left + 10}" y="{y + 4}">{html.escape(name)}</text>'


class _Square:
    """A square whose axes have the same scale, so that equal times lie on its diagonal."""

    def __init__(self, left: int, dots: Dots) -> None:
        self._left = left
        self._dots = dots
        values = [value for points in dots.values() for point in points for value in point if value > 0] or [1.0]
        self._least = math.log10(min(values)) - 0.05
        self._most = math.log10(max(values)) + 0.05

    def draw(self, name: str, error: float) -> Iterator[str]:
        bottom, right = _TOP + _SIDE, self._left + _SIDE
        yield f'<path d="M{self._left} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>'
        yield f'<text x="{self._left}" y="{_TOP - 10}">{html.escape(name)}: measured, seconds</text>'
        yield (f'<text x="{self._left + _SIDE // 2}" y="{bottom + 32}" text-anchor="middle">predicted, seconds</text>')
        yield from self._ticks(bottom)
        for factor, dash in ((1.0, "none"), (1 - error, "4 3"), (1 + error, "4 3")):
            yield self._line(factor, dash)
        for colour, points in zip(_COLOURS, self._dots.values(), strict=False):
            for predicted, measured in points:
                if predicted > 0 < measured:
                    yield f'<circle cx="{self._x(predicted)}" cy="{self._y(measured)}" r="2.5" fill="{colour}"/>'

    def _line(self, factor: float, dash: str) -> str:
        """Where predicted / measured is this factor, cut to the square."""
        shift = math.log10(factor)
        low, high = max(self._least, self._least - shift), min(self._most, self._most - shift)  # of log measured
        ends = [(10 ** (place + shift), 10**place) for place in (low, high)]
        (x1, y1), (x2, y2) = [(self._x(predicted), self._y(measured)) for predicted, measured in ends]
        return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#999" stroke-dasharray="{dash}"/>'

    def _ticks(self, bottom: int) -> Iterator[str]:
        for exponent in range(math.floor(self._least), math.ceil(self._most) + 1):
            for step in (1, 2, 5):
                value = step * 10.0**exponent
                if self._least <= math.log10(value) <= self._most:
                    yield f'<text x="{self._x(value)}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
                    yield f'<text x="{self._left - 4}" y="{self._y(value) + 4}" text-anchor="end">{value:g}</text>'

    def _share(self, value: float) -> float:
        return (math.log10(value) - self._least) / (self._most - self._least)

    def _x(self, value: float) -> float:
        return round(self._left + self._share(value) * _SIDE, 1)

    def _y(self, value: float) -> float:
        return round(_TOP + _SIDE - self._share(value) * _SIDE, 1)
