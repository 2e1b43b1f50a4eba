"""What does a reader draw a curve on? Axes, the curve that is given, the true one and a place for the reader's own, as SVG.

The true curve is part of the picture from the start, so that paper and pages without JavaScript show it; questions.css hides
it on a screen until the reader has committed to a curve.
"""

import html
import re
from typing import Any

import numpy as np

from .forms import Axis, Curve

WIDTH, HEIGHT = 640, 412
LEFT, RIGHT, TOP, BOTTOM = 78, 622, 16, 338  # of the plot inside the picture
WIDE = 12.5  # a character, as on a phone, where the type is largest
MARGIN = 14  # around the plot, where a stroke may begin and end too


def across(u: Any) -> Any:
    return LEFT + u * (RIGHT - LEFT)


def up(v: Any) -> Any:
    return BOTTOM - v * (BOTTOM - TOP)


def path(heights: np.ndarray) -> str:
    """A curve from the left to the right side through these heights, from 0 to 1."""
    places = zip(np.linspace(0, 1, len(heights)), heights, strict=True)
    return "M" + "L".join(f"{across(u):.1f} {up(v):.1f}" for u, v in places)


def ticks(axis: Axis) -> dict[float, str]:
    """The axis's own ticks, or five even ones; of a logarithmic axis the powers of ten."""
    if axis.ticks:
        return dict(axis.ticks)
    if axis.log:
        first, last = np.ceil(np.log10(axis.low) - 1e-9), np.floor(np.log10(axis.high) + 1e-9)
        powers = np.arange(first, last + 1, max(1, round((last - first) / 4)))
        shown = {10.0**p: f"{int(p)}".replace("-", "−") for p in powers}
        return {value: f'10<tspan dy="-6" font-size="75%">{p}</tspan>' for value, p in shown.items()}
    return {v: f"{v:.3g}".replace("-", "−") for v in np.linspace(axis.low, axis.high, 5).tolist()}


def _points(heights: np.ndarray) -> np.ndarray:
    """[200, 2] places along a curve."""
    u = np.linspace(0, 1, 200)
    v = np.interp(u, np.linspace(0, 1, len(heights)), heights)
    return np.stack([across(u), up(v)], 1)


def _gap(box: tuple[float, float, float, float], points: np.ndarray) -> float:
    """The distance from a box to the nearest of some points; 0 inside."""
    (x0, y0, x1, y1), (x, y) = box, points.T
    return float(np.hypot(np.maximum(np.maximum(x0 - x, x - x1), 0), np.maximum(np.maximum(y0 - y, y - y1), 0)).min())


def name_of(heights: np.ndarray, others: list[np.ndarray], text: str, kind: str, taken: list[tuple]) -> str:
    """A curve's name, near the curve and away from the others and from the names before it (whose boxes are ``taken``)."""
    mine, rest = _points(heights), np.concatenate([_points(o) for o in others] or [np.full((1, 2), 1e4)])
    width, best = WIDE * len(text), None
    for x, y in mine[8:-8:6]:
        for dx, dy in ((d, e) for d in (8, -width / 2, -8 - width) for e in (-10, -26, 28, 44)):
            box = (x + dx, y + dy - 19, x + dx + width, y + dy + 5)
            if box[0] < LEFT + 3 or box[2] > RIGHT - 3 or box[1] < TOP or box[3] > BOTTOM - 3:
                continue
            near, far = _gap(box, mine), _gap(box, rest)
            clash = any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)
            cost = 200 * clash + 90 * (near < 3) + 90 * (far < 3) + near - min(far, 80)
            if best is None or cost < best[0]:
                best = (cost, box, y + dy)
    _, box, y = best or (0, (across(0.5), 0, across(0.5), 0), up(0.5))
    taken.append(box)
    return f'<text class="{kind}" x="{(box[0] + box[2]) / 2:.0f}" y="{y:.0f}" text-anchor="middle">{text}</text>'


def svg(curve: Curve) -> str:
    """The picture."""
    parts = []
    for value, text in ticks(curve.x).items():
        x = across(float(curve.x.place(value)))
        inside = min(x, WIDTH - WIDE * len(re.sub("<[^>]*>", "", text)) / 2)  # the last one would be cut off on a phone
        parts.append(f'<path class="ngq-grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{inside:.1f}" y="{BOTTOM}" dy="1.35em" text-anchor="middle">{text}</text>')
    for value, text in ticks(curve.y).items():
        y = f"{up(float(curve.y.place(value))):.1f}"
        parts.append(f'<path class="ngq-grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y}" dy=".35em" text-anchor="end">{text}</text>')
    parts.append(f'<path class="ngq-axes" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text x="{across(0.5):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{curve.x.title}</text>')
    truth = curve.drawn(curve.truth)
    others: list[np.ndarray] = []
    taken: list[tuple[float, float, float, float]] = []
    if curve.given:
        name, values = curve.given
        others = [curve.drawn(values)]
        title = name_of(others[0], [truth], name, "ngq-given-name", taken)
        parts.append(f'<path class="ngq-given" d="{path(others[0])}"/>{title}')
    invited = next(y for y in map(up, (0.5, 0.7, 0.3)) if not any(t[1] - 25 < y < t[3] + 25 for t in taken))
    title = name_of(truth, others, "the true curve", "ngq-true ngq-true-name", taken)
    parts.append(f'<path class="ngq-true" d="{path(truth)}"/>{title}')
    parts.append('<path class="ngq-mine" d=""/><text class="ngq-mine-name" hidden>yours</text>')
    parts.append(f'<text class="ngq-invite" x="{across(0.5):.0f}" y="{invited:.0f}" text-anchor="middle"></text>')
    size = f'width="{RIGHT - LEFT + 2 * MARGIN}" height="{BOTTOM - TOP + 2 * MARGIN}"'
    pad = f'<rect class="ngq-pad" data-margin="{MARGIN}" x="{LEFT - MARGIN}" y="{TOP - MARGIN}" {size}/>'
    alt = html.escape("Axes: " + ", ".join(f"{a.title} from {a.low:g} to {a.high:g}" for a in (curve.x, curve.y)) + ".")
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">{"".join(parts)}{pad}</svg>'
    return f'<p class="ngq-yname">{curve.y.title}</p>{picture}'
