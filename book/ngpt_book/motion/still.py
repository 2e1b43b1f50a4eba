"""How does a frame look as SVG? Header, axes and marks, for a desktop and for a phone.

The page has the last frame, twice: the style sheet shows the layout that fits. motion.js moves the same elements; whatever a
mark looks like here, it must look like there (tests/test_browser_motion.py compares them).
"""

import html
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngpt_core.tools.theme import FONT

from ..theme import words
from .codec import decode
from .marks import Panel

__all__ = ["LAYOUTS", "Box", "Layout", "mark", "picture"]

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
LEADING = 1.42  # of lines of text
TOP, GAP = 26.0, 18.0  # above a panel, for its title; between panels


@dataclass(frozen=True)
class Layout:
    """name: its class in the style sheet; header: the height above the panels; stacked: panels one above the other."""

    name: str
    width: float
    header: float
    stacked: bool


LAYOUTS = (Layout("wide", 700.0, 34.0, False), Layout("narrow", 350.0, 50.0, True))


@dataclass(frozen=True)
class Box:
    """The pixels between the axes of a panel."""

    left: float
    top: float
    width: float
    height: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + x * self.width, self.top + (1 - y) * self.height


def boxes(panels: list[Panel], layout: Layout) -> tuple[list[Box], float]:
    """(the box of every panel, the height of the picture)."""
    found, x, y, below = [], 0.0, layout.header, layout.header
    room = layout.width - GAP * (len(panels) - 1)
    for panel in panels:
        outer = layout.width if layout.stacked else room * panel.share / sum(p.share for p in panels)
        width = outer - panel.left - panel.right
        height = width if panel.square else panel.heights[layout.stacked]
        found.append(Box(x + panel.left, y + TOP, width, height))
        below = max(below, y + TOP + height + panel.bottom)
        x, y = (0.0, below) if layout.stacked else (x + outer + GAP, y)
    return found, below


# ---- marks: one function per kind, as in motion.js -------------------------------------------------------------------
def _between(array: np.ndarray, frame: float) -> np.ndarray:
    """The places of a frame, between two if it is a fraction; an array of one frame does not move."""
    if len(array) == 1:
        return array[0]
    i = min(int(frame), len(array) - 2)
    return array[i] + (frame - i) * (array[i + 1] - array[i])


def _points(box: Box, xs: np.ndarray, ys: np.ndarray) -> str:
    return " ".join("{:.1f},{:.1f}".format(*box.at(x, y)) for x, y in zip(xs, ys))


def _curve(spec: dict[str, Any], box: Box, frame: float) -> str:
    xs, ys = decode(spec["x"])[0], decode(spec["y"])[0]
    shown = float(_between(np.array(spec["upto"], dtype=float), frame))
    n = max(1, min(len(xs), int(shown)))
    rest = shown - n if n < len(xs) else 0.0
    xs, ys = (np.append(a[:n], a[n - 1] + rest * (a[n] - a[n - 1])) if rest > 0 else a[:n] for a in (xs, ys))
    hidden = ' visibility="hidden"' if shown < 1 else ""
    look = f'stroke="{spec["color"]}" stroke-width="{spec["width"]}" stroke-opacity="{spec["opacity"]}"'
    found = (
        f'<polyline points="{_points(box, xs, ys)}" fill="none" stroke-linejoin="round" stroke-linecap="round" {look}{hidden}/>'
    )
    x, y = box.at(xs[-1], ys[-1])
    if spec["head"]:
        found += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{spec["head"]}" fill="{spec["color"]}"{hidden}/>'
    if spec["label"]:
        found += (
            f'<text x="{x + 8:.1f}" y="{y + spec["drop"]:.1f}" {words(spec["color"])} font-weight="650"{hidden}>'
            f"{html.escape(spec['label'])}</text>"
        )
    return found


def _shape(spec: dict[str, Any], box: Box, frame: float) -> str:
    points = _points(box, _between(decode(spec["x"]), frame), _between(decode(spec["y"]), frame))
    dash = f' stroke-dasharray="{spec["dash"]}"' if spec["dash"] else ""
    return f'<polyline points="{points}" stroke-linejoin="round" {_line(spec)}{dash}/>'


def _line(spec: dict[str, Any]) -> str:
    fill = f'fill="{spec["color"]}" fill-opacity="{spec["fill"]}"' if spec["fill"] else 'fill="none"'
    return f'{fill} stroke="{spec["color"]}" stroke-width="{spec["width"]}" stroke-opacity="{spec["opacity"]}"'


def _ring(spec: dict[str, Any], box: Box, frame: float) -> str:
    (x, y), r = box.at(spec["x"], spec["y"]), _between(decode(spec["r"]), frame)[0] * box.width
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" {_line(spec)}/>'


def _bars(spec: dict[str, Any], box: Box, frame: float) -> str:
    found, wide = "", spec["wide"] * box.width
    for x, y in zip(_between(decode(spec["x"]), frame), _between(decode(spec["y"]), frame)):
        middle, top = box.at(x, y)
        found += f'<rect x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{y * box.height:.1f}"/>'
    return f'<g fill="{spec["color"]}" fill-opacity="{spec["opacity"]}">{found}</g>'


def _words(spec: dict[str, Any], box: Box, frame: float) -> str:
    lines, (x, y) = spec["lines"][min(int(frame), len(spec["lines"]) - 1)], box.at(spec["x"], spec["y"])
    texts = "".join(
        f'<text x="{x:.1f}" y="{y + i * LEADING * spec["size"]:.1f}" xml:space="preserve">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    family = f' font-family="{html.escape(MONO)}"' if spec["mono"] else ""
    weight = ' font-weight="650"' if spec["bold"] else ""
    look = f'{words(spec["color"])} font-size="{spec["size"]}" text-anchor="{spec["anchor"]}"'
    return f"<g {look}{family}{weight}>{texts}</g>"


KINDS = {"curve": _curve, "shape": _shape, "ring": _ring, "bars": _bars, "words": _words}


def mark(spec: dict[str, Any], box: Box, frame: float) -> str:
    """One mark at a frame, as SVG."""
    return f'<g class="ngm-mark">{KINDS[spec["kind"]](spec, box, frame)}</g>'


def spelled(text: str) -> str:
    """Text for SVG; s_z gets its index."""
    index = r'\1<tspan dy="3" font-size="10.5">\2</tspan><tspan dy="-3">&#8203;</tspan>'
    return re.sub(r"\b([a-z])_([a-z]+)\b", index, html.escape(text))


# ---- the picture -----------------------------------------------------------------------------------------------------
def _axes(panel: Panel, box: Box) -> str:
    right, bottom = box.left + box.width, box.top + box.height
    lines = texts = ""
    for place, text in panel.x.labeled():
        x = box.left + place * box.width
        lines += f'<path d="M{x:.1f} {bottom:.1f}v4" stroke-opacity="0.7"/>'
        texts += f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{html.escape(text)}</text>'
    for place, text in panel.y.labeled():
        y = bottom - place * box.height
        lines += f'<path d="M{box.left:.1f} {y:.1f}H{right:.1f}" stroke-opacity="0.18"/>'
        texts += f'<text x="{box.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
    if panel.x.ticks:
        lines += f'<path d="M{box.left:.1f} {bottom:.1f}H{right:.1f}" stroke-opacity="0.7"/>'
    if panel.x.title:
        middle = box.left + box.width / 2
        texts += f'<text x="{middle:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">{spelled(panel.x.title)}</text>'
    if panel.y.title:
        start = max(4.0, box.left - panel.left + 4) if panel.y.ticks else box.left
        texts += f'<text x="{start:.1f}" y="{box.top - 12:.1f}">{spelled(panel.y.title)}</text>'
    return f'<g stroke="currentColor" fill="none">{lines}</g><g font-size="12" fill-opacity="0.85">{texts}</g>'


def picture(panels: list[Panel], title: str, labels: list[str], source: str, alt: str, layout: Layout, frame: int) -> str:
    """A frame as SVG; ``labels``: one per frame, such as "step 100"; ``source``: the small print, at the bottom."""
    places, height = boxes(panels, layout)
    step = (layout.width - 6, 19) if not layout.stacked else (4, 39)
    anchor = "start" if layout.stacked else "end"
    head = (
        f'<text x="4" y="19" font-size="15" font-weight="650">{spelled(title)}</text>'
        f'<text class="ngm-step" x="{step[0]:g}" y="{step[1]}" text-anchor="{anchor}" font-size="14">{labels[frame]}</text>'
    )
    inside = ""
    for panel, box in zip(panels, places):
        marks = "".join(mark(spec, box, frame) for spec in panel.specs)
        place = f"{box.left:g} {box.top:g} {box.width:g} {box.height:g}"
        inside += f'{_axes(panel, box)}<g class="ngm-panel" data-box="{place}" font-size="12.5">{marks}</g>'
    small = textwrap.wrap(source, 58) if layout.stacked else [source]
    foot = "".join(
        f'<text x="4" y="{height + 12 + 15 * i:g}" font-size="11" fill-opacity="0.75">{html.escape(line)}</text>'
        for i, line in enumerate(small)
    )
    full = height + 5 + 15 * len(small)
    hidden = ' style="display:none"' if layout.stacked else ""
    return (
        f'<svg class="ngm-{layout.name}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:g} {full:g}" '
        f'width="{layout.width:g}" height="{full:g}" font-family="{html.escape(FONT)}" fill="currentColor" role="img" '
        f'aria-label="{html.escape(alt)}"{hidden}>{head}{inside}{foot}</svg>'
    )
