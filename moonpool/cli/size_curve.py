"""Hit share over the size of a kvstore: reading it at a size, and drawing it."""

import bisect
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 28, 40
GB = 1e9


class SizeCurve:
    """(bytes, hit share) points, ascending in bytes."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """A curve through points; none at all is a curve that is 0 everywhere."""
        self.points = list(points)
        self._sizes: list[float] = [nbytes for nbytes, _ in self.points]

    def at(self, nbytes: float) -> float:
        """The hit share of a store of so many bytes: that of the largest point that is not larger."""
        place = bisect.bisect_right(self._sizes, nbytes)
        return self.points[place - 1][1] if place else 0.0

    def picture(self, now_bytes: float, more_bytes: float) -> str:
        """An SVG of the curve, with lines where the store is and where it would be."""
        marks: list[tuple[float, str]] = [(now_bytes, "now"), (now_bytes + more_bytes, f"+{more_bytes / GB:g} GB")]
        widest = max([size for size, _ in marks] + self._sizes[-1:])
        highest = max([share for _, share in self.points] + [0.01])

        def place(nbytes: float, share: float) -> tuple[float, float]:
            x = LEFT + (WIDTH - LEFT - RIGHT) * nbytes / widest
            return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / highest, 1)

        corners, below = [place(0, 0)], 0.0
        for nbytes, share in self.points:  # a staircase
            corners += [place(nbytes, below), place(nbytes, share)]
            below = share
        corners.append(place(widest, self.at(widest)))
        lines = [
            f'<text x="{LEFT}" y="16">hit share over size; highest {highest:.1%}, widest {widest / GB:.2f} GB</text>'
        ]
        path = " ".join(f"{x},{y}" for x, y in corners)
        lines.append(f'<polyline points="{path}" fill="none" stroke="#1668a5" stroke-width="2"/>')
        for size, name in marks:
            x, y = place(size, 0)
            label = escape(f"{name}: {self.at(size):.1%}")
            lines.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{y}" stroke="#999" stroke-dasharray="4 3"/>')
            anchor = "end" if x > WIDTH / 2 else "start"
            lines.append(f'<text x="{x}" y="{HEIGHT - 14}" text-anchor="{anchor}">{label}</text>')
        x0, y0 = place(0, 0)
        axis = f'<polyline points="{x0},{TOP} {x0},{y0} {WIDTH - RIGHT},{y0}" fill="none" stroke="#333"/>'
        style = 'font-family="sans-serif" font-size="12"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
        return "\n".join([head, axis, *lines, "</svg>", ""])
