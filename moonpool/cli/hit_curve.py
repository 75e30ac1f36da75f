"""What `moonpool kvstore advise` says and draws: LRU's hit share over the size of a store."""

import bisect
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 696, 48, 316
"""Size of the picture, and the edges of the curve in it."""
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")

Curve = Sequence[tuple[int, float]]
"""(bytes, share of block uses that would be hits), ascending in both."""


def hit_share(curve: Curve, size: float) -> float:
    """The hit share at a size; between two points of the curve that of the smaller."""
    place = bisect.bisect_right(curve, size, key=lambda point: point[0])
    return curve[place - 1][1] if place else 0.0


def size_text(nbytes: float) -> str:
    """Bytes with a unit, three digits."""
    power = min(int(math.log10(nbytes)) // 3, len(_UNITS) - 1) if nbytes >= 1 else 0
    return f"{nbytes / 1000**power:.3g} {_UNITS[power]}"


def advice(curve: Curve, now_bytes: int, more_bytes: int) -> str:
    """What a larger store would bring, in one sentence."""
    before, after, most = (hit_share(curve, size) for size in (now_bytes, now_bytes + more_bytes, math.inf))
    return (
        f"{size_text(now_bytes)} hit {100 * before:.1f} %; another {size_text(more_bytes)} would add "
        f"{100 * (after - before):.1f} points; no size hits more than {100 * most:.1f} %"
    )


def draw(curve: Curve, now_bytes: int, more_bytes: int) -> str:
    """An SVG file: hit share over bytes (logarithmic), the present and the larger size marked; both are positive."""
    larger = now_bytes + more_bytes
    low, high = (math.log(max(1, most(now_bytes, larger, *(size for size, _ in curve)))) for most in (min, max))
    span, top = max(high - low, 1e-6), max(hit_share(curve, math.inf), 0.01)

    def x(size: float) -> float:
        return round(LEFT + (math.log(max(size, 1)) - low) / span * (RIGHT - LEFT), 1)

    def y(share: float) -> float:
        return round(BOTTOM - share / top * (BOTTOM - TOP), 1)

    body = [
        _text(LEFT, 18, "Hit share over size (LRU, estimated from a sample)", 'font-weight="bold"'),
        _text(LEFT, 34, advice(curve, now_bytes, more_bytes)),
        _line(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", "#333"),
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        share, size = part * top, math.exp(low + part * span)
        body.append(_line(f"M{LEFT} {y(share)}H{RIGHT}", "#ddd"))
        body.append(_text(LEFT - 4, y(share) + 4, f"{100 * share:.1f} %", 'text-anchor="end"'))
        body.append(_text(x(size), BOTTOM + 14, size_text(size), 'text-anchor="middle"'))
    steps = "".join(f"H{x(size)}V{y(share)}" for size, share in curve)
    body.append(_line(f"M{LEFT} {BOTTOM}{steps}H{RIGHT}", "#2a6fdb", 'stroke-width="1.5" class="curve"'))
    for at, text, colour in ((now_bytes, "now", "#333333"), (larger, f"+{size_text(more_bytes)}", "#d9822b")):
        anchor, shift = ("end", -4) if x(at) > WIDTH / 2 else ("start", 4)
        body.append(_line(f"M{x(at)} {TOP}V{BOTTOM}", colour, 'stroke-dasharray="4 3"'))
        body.append(_text(x(at) + shift, TOP + 10, text, f'text-anchor="{anchor}" fill="{colour}"'))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">{paper}', *body, "</svg>\n"])


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'


def _line(path: str, colour: str, style: str = "") -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" {style}/>'
