"""What does a figure look like where no script runs: without JavaScript, on paper, in the preview of a notebook?

``to_svg(figure)`` draws a plotly figure as inline SVG. It supports what the book draws: lines, markers, texts, fills, bars and
heat maps on linear, logarithmic and category axes in any subplots (``plane.py``), points, lines and surfaces of 3-D scenes
(``space.py``), annotations and shapes. Text and axes are in ``currentColor``, so that the picture is readable on light and dark
pages. It shows the same data in the same frame as plotly, without plotly's finer typography.
"""

import html

import numpy as np
import plotly.graph_objects as go

from ...theme import COLORS, FONT, TEMPLATE
from ..binding import tree_of
from .pieces import line, marker, num, rectangle, text
from .plane import Plane
from .space import Space

__all__ = ["to_svg"]

WIDTH = 720
FLAT, SOLID = ("scatter", "scattergl", "bar", "heatmap"), ("scatter3d", "surface")
_COLORWAY = [color for name, color in COLORS.items() if name != "grey"]


def to_svg(figure: go.Figure, alt: str = "") -> str:
    """The figure as ``<svg>``, 720 wide and with the figure's height; ``alt`` is for screen readers."""
    tree = tree_of(figure)
    layout, traces = tree["layout"], [t for t in tree["data"] if t.get("visible", True) is True]
    unknown = sorted({t["type"] for t in traces} - {*FLAT, *SOLID})
    if unknown:
        raise ValueError(f"The still picture cannot draw {', '.join(unknown)}; it supports {', '.join((*FLAT, *SOLID))}.")
    standard = TEMPLATE.layout
    height = layout.get("height") or standard.height
    margin = {side: layout.get("margin", {}).get(side, standard.margin[side]) for side in "lrtb"}
    box = (margin["l"], margin["t"], WIDTH - margin["r"], height - margin["b"])
    colors = [_COLORWAY[i % len(_COLORWAY)] for i in range(len(traces))]

    flat = [(t, c) for t, c in zip(traces, colors) if t["type"] in FLAT]
    plane = Plane([t for t, _ in flat], layout, box)
    body = [plane.draw([c for _, c in flat])]
    for name in dict.fromkeys(t.get("scene", "scene") for t in traces if t["type"] in SOLID):
        scene, (left, top, right, bottom) = layout.get(name, {}), box
        (x0, x1), (y0, y1) = (scene.get("domain", {}).get(k, (0, 1)) for k in "xy")
        (x0, x1), (y0, y1) = (left + np.array([x0, x1]) * (right - left)), (bottom + np.array([y0, y1]) * (top - bottom))
        inside = [(t, c) for t, c in zip(traces, colors) if t["type"] in SOLID and t.get("scene", "scene") == name]
        body.append(Space([t for t, _ in inside], scene, (x0, y1, x1, y0)).draw([c for _, c in inside]))
    body += [_shape(s, plane) for s in layout.get("shapes", ())]
    notes = [a for a in layout.get("annotations", ()) if a.get("visible", True)]
    body += [_annotation(a, plane) for a in notes if np.isfinite([a["x"], a["y"]]).all()]
    if layout.get("showlegend", len(traces) > 1):
        body.append(_legend(traces, colors, box))
    title = layout.get("title") or {}
    title = title if isinstance(title, str) else title.get("text") or ""
    if title:
        body.append(text(WIDTH / 2, 18, title, size=15))
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" style="max-width:100%;height:auto"'
    look = f'fill="currentColor" font-family="{html.escape(FONT)}" role="img" aria-label="{html.escape(alt)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{"".join(body)}</svg>'


def _legend(traces: list[dict], colors: list[str], box) -> str:
    """One row above the frame (more if needed), as in the book's template."""
    out, x, y = [], box[0], box[1] - 12
    for trace, color in zip(traces, colors):
        if not trace.get("name") or not trace.get("showlegend", trace["type"] not in ("heatmap", "surface")):
            continue
        stroke, look = trace.get("line", {}), trace.get("marker", {})
        tint = next((c for c in (stroke.get("color"), look.get("color")) if isinstance(c, str)), color)
        width = 44 + 6.6 * len(trace["name"])
        if x > box[0] and x + width > box[2]:
            x, y = box[0], y - 17
        if trace["type"] == "bar":
            out.append(rectangle(x + 8, y - 5, x + 18, y + 5, f'fill="{tint}"'))
        elif "lines" in (trace.get("mode") or "lines"):
            out.append(line(f"M{num(x)},{num(y)}h24", tint, min(stroke.get("width", 2), 3), stroke.get("dash", "solid")))
        if "markers" in (trace.get("mode") or ""):
            symbol = look.get("symbol", "circle")
            out.append(marker(x + 12, y, 3, tint, symbol if isinstance(symbol, str) else "circle"))
        out.append(text(x + 30, y + 4, trace["name"], anchor="start"))
        x += width
    return "".join(out)


def _annotation(item: dict, plane: Plane) -> str:
    x, y = plane.place(item, "x"), plane.place(item, "y")
    anchor = {"left": "start", "right": "end"}.get(item.get("xanchor"), "middle")
    tint = (item.get("font") or {}).get("color", "")
    size = (item.get("font") or {}).get("size", 12)
    if item.get("showarrow", True):
        tx, ty = x + item.get("ax", -10), y + item.get("ay", -30)
        arrow = line(f"M{num(tx)},{num(ty)}L{num(x)},{num(y)}", item.get("arrowcolor", "currentColor"), 1.2, share=0.7)
        return arrow + text(tx, ty - 4 if ty <= y else ty + 12, item.get("text", ""), size=size, color=tint, anchor=anchor)
    drop = {"bottom": -4, "top": 12}.get(item.get("yanchor"), 4)
    x, y = x + (item.get("xshift") or 0), y - (item.get("yshift") or 0)
    return text(x, y + drop, item.get("text", ""), size=size, color=tint, anchor=anchor, turn=item.get("textangle") or 0)


def _shape(item: dict, plane: Plane) -> str:
    x0, y0, x1, y1 = (plane.place(item, key) for key in ("x0", "y0", "x1", "y1"))
    stroke = item.get("line", {})
    color, width, share = stroke.get("color", "currentColor"), stroke.get("width", 1.5), item.get("opacity", 1.0)
    if item.get("type") == "line":
        return line(f"M{num(x0)},{num(y0)}L{num(x1)},{num(y1)}", color, width, stroke.get("dash", "solid"), share)
    look = f'fill="{item.get("fillcolor", "none")}" stroke="{color}" stroke-width="{width:g}" opacity="{share:g}"'
    if item.get("type") == "circle":
        rx, ry = abs(x1 - x0) / 2, abs(y1 - y0) / 2
        return f'<ellipse cx="{num((x0 + x1) / 2)}" cy="{num((y0 + y1) / 2)}" rx="{num(rx)}" ry="{num(ry)}" {look}/>'
    return rectangle(x0, y0, x1, y1, look)
