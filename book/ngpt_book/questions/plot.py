"""What does a reader draw a curve on? Axes, the curve that is given, the true one and a place for the reader's own, as SVG.

The true curve is part of the picture from the start, so that paper and pages without JavaScript show it; questions.css hides
it on a screen until the reader has committed to a curve.
"""

import html

import numpy as np

from .forms import Axis, Curve

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 622, 16, 338  # of the plot inside the picture
MARGIN = 14  # around the plot, where a stroke may begin and end too


def across(u: float) -> float:
    return LEFT + u * (RIGHT - LEFT)


def up(v: float) -> float:
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
        return {10.0**p: f'10<tspan dy="-6" font-size="75%">{p:.0f}</tspan>'.replace(">-", ">−") for p in powers}
    return {v: f"{v:.3g}".replace("-", "−") for v in np.linspace(axis.low, axis.high, 5).tolist()}


def name_of(heights: np.ndarray, others: list[np.ndarray], text: str, kind: str, avoid: float = -1.0) -> tuple[str, float]:
    """A curve's name, where it is far from the other curves and from the place ``avoid``; and that place."""
    n = len(heights)
    columns = np.arange(n // 6, n - n // 6)
    room = np.min([np.abs(heights - other) for other in others] or [np.ones(n)], axis=0)[columns]
    room = np.minimum(room, 0.3) - (np.abs(columns / (n - 1) - avoid) < 0.3)
    i = int(columns[np.argmax(room)])
    above = heights[i] < 0.1 or (heights[i] < 0.88 and bool(others) and bool(heights[i] > others[0][i]))
    rising = heights[min(i + 2, n - 1)] - heights[max(i - 2, 0)]
    y = up(float(heights[i])) + (-12 if above else 28)
    side = i < n / 2 if abs(rising) < 0.02 else (rising < 0) == above  # a steep curve must not run through its name
    anchor = "start" if side else "end"
    return f'<text class="{kind}" x="{across(i / (n - 1)):.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>', i / (n - 1)


def svg(curve: Curve) -> str:
    """The picture."""
    parts = []
    for value, text in ticks(curve.x).items():
        x = f"{across(float(curve.x.place(value))):.1f}"
        parts.append(f'<path class="ngq-grid" d="M{x} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{BOTTOM}" dy="1.35em" text-anchor="middle">{text}</text>')
    for value, text in ticks(curve.y).items():
        y = f"{up(float(curve.y.place(value))):.1f}"
        parts.append(f'<path class="ngq-grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y}" dy=".35em" text-anchor="end">{text}</text>')
    parts.append(f'<path class="ngq-axes" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text x="{across(0.5):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{curve.x.title}</text>')
    truth, taken = curve.drawn(curve.truth), -1.0
    others = []
    if curve.given:
        name, values = curve.given
        others = [curve.drawn(values)]
        title, taken = name_of(others[0], [truth], name, "ngq-given-name")
        parts.append(f'<path class="ngq-given" d="{path(others[0])}"/>{title}')
    title, _ = name_of(truth, others, "the true curve", "ngq-true ngq-true-name", taken)
    parts.append(f'<path class="ngq-true" d="{path(truth)}"/>{title}')
    parts.append('<path class="ngq-mine" d=""/><text class="ngq-mine-name" hidden>yours</text>')
    parts.append(f'<text class="ngq-invite" x="{across(0.5):.0f}" y="{up(0.5):.0f}" text-anchor="middle"></text>')
    size = f'width="{RIGHT - LEFT + 2 * MARGIN}" height="{BOTTOM - TOP + 2 * MARGIN}"'
    pad = f'<rect class="ngq-pad" data-margin="{MARGIN}" x="{LEFT - MARGIN}" y="{TOP - MARGIN}" {size}/>'
    alt = html.escape("Axes: " + ", ".join(f"{a.title} from {a.low:g} to {a.high:g}" for a in (curve.x, curve.y)) + ".")
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">{"".join(parts)}{pad}</svg>'
    return f'<p class="ngq-yname">{curve.y.title}</p>{picture}'
