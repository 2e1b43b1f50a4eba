"""How are paths, markers, texts and colors written as SVG? The pieces of the still pictures."""

import base64
import html
import re
import struct
import zlib

import numpy as np
from plotly.colors import get_colorscale, hex_to_rgb, sample_colorscale

from ...theme import SEQUENTIAL
from ...theme import words as in_color
from ..binding import numeric

_DASH = {"dash": "8 5", "dot": "2 4", "dashdot": "8 4 2 4", "longdash": "12 6"}
_TAGS = {
    "i": '<tspan font-style="italic">{}</tspan>',
    "b": '<tspan font-weight="bold">{}</tspan>',
    "sub": '<tspan dy="3" font-size="75%">{}</tspan><tspan dy="-3">&#8203;</tspan>',
    "sup": '<tspan dy="-4" font-size="75%">{}</tspan><tspan dy="4">&#8203;</tspan>',
}


def num(x: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{x + 0.0:.1f}".removesuffix(".0")


def path(x, y) -> str:
    """'M0,0L1,1...', broken at NaN; a point equal to the one before is omitted."""
    parts, last = [], None
    for a, b in zip(x, y):
        here = f"{num(a)},{num(b)}" if np.isfinite(a) and np.isfinite(b) else None
        if here and here != last:
            parts.append(("L" if last else "M") + here)
        last = here
    return "".join(parts)


def opacity(share: float) -> str:
    return f' opacity="{share:g}"' if isinstance(share, (int, float)) and share < 1 else ""


def line(d: str, color: str, width: float = 2, dash: str = "solid", share: float = 1.0) -> str:
    dashes = f' stroke-dasharray="{_DASH[dash]}"' if dash in _DASH else ""
    return f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashes}{opacity(share)}/>' if d else ""


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: float = 12, turn: float = 0, color: str = "") -> str:
    """Words with plotly's few tags (i, b, sub, sup, br)."""
    rows = [_tagged(row) for row in re.split(r"<br\s*/?>", str(words))]
    if len(rows) > 1:
        rows = [f'<tspan x="{num(x)}" dy="{1.2 * size * (k > 0):g}">{row}</tspan>' for k, row in enumerate(rows)]
    turned = f' transform="rotate({turn:g} {num(x)} {num(y)})"' if turn else ""
    tint = f" {in_color(color)}" if isinstance(color, str) and color else ""
    return f'<text x="{num(x)}" y="{num(y)}" text-anchor="{anchor}" font-size="{size:g}"{turned}{tint}>{"".join(rows)}</text>'


def _tagged(row: str) -> str:
    safe = html.escape(html.unescape(row), quote=False)
    for tag, form in _TAGS.items():
        safe = re.sub(rf"&lt;{tag}&gt;(.*?)&lt;/{tag}&gt;", lambda m, form=form: form.format(m[1]), safe)
    return re.sub(r"&lt;/?\w+[^&]*&gt;", "", safe)  # any other tag


def marker(x: float, y: float, r: float, color: str, symbol: str = "circle", share: float = 1.0) -> str:
    fill = f'fill="none" stroke="{color}" stroke-width="1.5"' if symbol.endswith("-open") else f'fill="{color}"'
    shape = symbol.removesuffix("-open")
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle-up": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
        "triangle-down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
        "triangle-right": ((1.2, 0), (-0.8, 1.1), (-0.8, -1.1)),
    }
    strokes = {"x": ((-1, -1, 1, 1), (-1, 1, 1, -1)), "cross": ((-1, 0, 1, 0), (0, -1, 0, 1)), "line-ns": ((0, -1, 0, 1),)}
    if arms := strokes.get(shape):
        d = "".join(path([x + a * r, x + c * r], [y + b * r, y + e * r]) for a, b, c, e in arms)
        return line(d, color, 1.8, share=share)
    if shape in corners:
        d = path(*zip(*((x + a * r, y + b * r) for a, b in corners[shape])))
        return f'<path d="{d}Z" {fill}{opacity(share)}/>'
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(r)}" {fill}{opacity(share)}/>'


def rectangle(x0: float, y0: float, x1: float, y1: float, look: str, kind: str = "rect") -> str:
    (left, right), (top, bottom) = sorted((x0, x1)), sorted((y0, y1))
    return f'<{kind} x="{num(left)}" y="{num(top)}" width="{num(right - left)}" height="{num(bottom - top)}" {look}/>'


def shades(values, scale=None, lo: float | None = None, hi: float | None = None) -> list[str]:
    """Numbers as colors "#rrggbb" on a plotly color scale."""
    values = np.asarray(values, dtype=float).reshape(-1)
    lo = np.nanmin(values) if lo is None else lo
    hi = np.nanmax(values) if hi is None else hi
    share = np.clip((np.nan_to_num(values, nan=lo) - lo) / ((hi - lo) or 1.0), 0, 1)
    scale = SEQUENTIAL if scale is None else scale
    if isinstance(scale, str):
        scale = get_colorscale(scale)
    stops = [[s, f"rgb{hex_to_rgb(c)}" if c.startswith("#") else c] for s, c in scale]
    found = sample_colorscale(stops, share.tolist(), colortype="tuple")
    return ["#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in found]


def each(value, n: int, default) -> list:
    """A plotly attribute that may be one value or one per point."""
    return [default if value is None else value] * n if value is None or isinstance(value, (str, int, float)) else list(value)


def tints(look: dict, n: int, default: str) -> list[str]:
    """The colors of n markers or bars: one, a list, or numbers on a color scale."""
    numbers = numeric(look.get("color"))
    if numbers is None or not numbers.ndim:
        return each(look.get("color"), n, default)
    return shades(numbers, look.get("colorscale"), look.get("cmin"), look.get("cmax"))


def png(pixels: np.ndarray) -> str:
    """An RGBA image [h, w, 4] as a data URL; a heat map of rectangles would be a hundred times as long."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(np.uint8))
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()
