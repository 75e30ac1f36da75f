"""The hit curve as an SVG file: hit share over the store's size in bytes, and what a larger store would add."""

import html
import math
from collections.abc import Iterator

from services.kvstore.operate.reuse import Curve, hit_share

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 24, 48, 44
_LINE, _NOW, _MORE = "#2a6fdb", "#333333", "#d9822b"
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: float) -> str:
    """Bytes with a unit, three digits."""
    power = min(int(math.log10(nbytes)) // 3, len(_UNITS) - 1) if nbytes >= 1 else 0
    return f"{nbytes / 1000**power:.3g} {_UNITS[power]}"


def answer(curve: Curve, now_bytes: int, more_bytes: int) -> str:
    """The advice in one sentence."""
    before, after = hit_share(curve, now_bytes), hit_share(curve, now_bytes + more_bytes)
    return (
        f"{size_text(now_bytes)} hit {100 * before:.1f} %; another {size_text(more_bytes)} would add "
        f"{100 * (after - before):.1f} points; no size hits more than {100 * _most(curve):.1f} %"
    )


def picture(curve: Curve, now_bytes: int, more_bytes: int) -> str:
    """Hit share over bytes (logarithmic), with the present and the larger size marked; both are positive."""
    axes = _Axes(curve, now_bytes, now_bytes + more_bytes)
    body = [
        f'<text x="{LEFT}" y="18" font-weight="bold">Hit share over size (LRU, estimated from a sample)</text>',
        f'<text x="{LEFT}" y="34">{html.escape(answer(curve, now_bytes, more_bytes))}</text>',
        *axes.frame(),
        f'<polyline points="{" ".join(axes.stairs(curve))}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>',
        *axes.mark(now_bytes, "now", _NOW),
        *axes.mark(now_bytes + more_bytes, f"+{size_text(more_bytes)}", _MORE),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _most(curve: Curve) -> float:
    return curve[-1][1] if curve else 0.0


class _Axes:
    """Places of sizes (logarithmic) and hit shares in the picture; all of `curve` and both sizes fit."""

    def __init__(self, curve: Curve, least: int, greatest: int) -> None:
        sizes = [max(1, size) for size in (least, greatest, *(size for size, _ in curve))]
        self._low = math.log(min(sizes))
        self._span = max(math.log(max(sizes)) - self._low, 1e-6)
        self._most = max(_most(curve), 0.01)

    def _x(self, size: float) -> float:
        return round(LEFT + (math.log(max(size, 1)) - self._low) / self._span * (WIDTH - LEFT - RIGHT), 1)

    def _y(self, share: float) -> float:
        return round(HEIGHT - BOTTOM - share / self._most * (HEIGHT - TOP - BOTTOM), 1)

    def frame(self) -> Iterator[str]:
        yield f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>'
        for part in (0.0, 0.25, 0.5, 0.75, 1.0):
            y, size = self._y(part * self._most), math.exp(self._low + part * self._span)
            yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end">{100 * part * self._most:.1f} %</text>'
            x, y = self._x(size), HEIGHT - BOTTOM + 14
            yield f'<text x="{x}" y="{y}" text-anchor="middle">{size_text(size)}</text>'

    def stairs(self, curve: Curve) -> Iterator[str]:
        last = 0.0
        for size, share in curve:
            x = self._x(size)
            yield f"{x},{self._y(last)}"
            yield f"{x},{self._y(share)}"
            last = share
        yield f"{WIDTH - RIGHT},{self._y(last)}"

    def mark(self, size: int, text: str, colour: str) -> Iterator[str]:
        x = self._x(size)
        yield f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="4 3"/>'
        anchor, shift = ("end", -4) if x > WIDTH / 2 else ("start", 4)
        yield f'<text x="{x + shift}" y="{TOP + 10}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'
