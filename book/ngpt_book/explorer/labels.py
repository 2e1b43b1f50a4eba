"""Where does the name of a curve stand, so that no legend is needed?

``named(figure)`` takes the names of lines out of a flat figure's legend and returns a ``Labels``: an annotation for each, in
the color of its line. ``Labels.places`` finds places for them: beside their own curve, away from the others and from each
other, measured on the small figure of a phone, where there is the least room. An Explorer asks for every cell of its grid, so
that names follow their curves; a name prefers the place that it has at the defaults. Where there is no good place for all
names, the legend stays.
"""

import re
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from ..theme import TEMPLATE
from .svg.plane import Plane

__all__ = ["Labels", "named", "tightened"]

MOST = 6  # names in a figure; more have a legend
WIDE, HIGH, CHARACTER, HALF = 290.0, 250.0, 7.2, 6.0  # the plot on a phone, and its type
POINTS, MOST_POINTS, APART = 72, 800, 8.0  # of a curve that count as obstacles; a rough one has more, so many pixels apart
ANCHORS = 32  # of a curve, beside which its name may stand
CLOSE = 1.0  # pixels between a name and a curve
TOP = 16  # pixels above the plot where nothing stands
SOLIDS = ("scatter3d", "surface")
_COLORWAY = TEMPLATE.layout.colorway


@dataclass(frozen=True)
class Labels:
    """The names of a figure's lines: trace -> annotation, by their numbers."""

    traces: tuple[int, ...]
    annotations: tuple[int, ...]
    widths: tuple[float, ...]

    def places(self, tree: dict, like: np.ndarray | None = None) -> tuple[np.ndarray, bool]:
        """[n, 2] coordinates of the annotations, NaN for a curve out of sight; and whether every name stands free.

        tree: the figure (``binding.tree_of``). like: places to prefer, as shares of the axes."""
        curves, axes, placed = _curves(tree, self.traces)
        guides = [points for i, points in curves.items() if i not in self.traces and not _is_obstacle(tree["data"][i])]
        found, free = np.full((len(self.traces), 2), np.nan), True
        for k, (trace, width) in enumerate(zip(self.traces, self.widths, strict=True)):
            rest = [points for other, points in curves.items() if other != trace and _is_obstacle(tree["data"][other])]
            wanted = None if like is None else like[k]
            best = _best(curves[trace], rest, guides, axes[trace], width / 2, placed, wanted)
            if best is None:
                continue
            center, good = best
            free &= good
            placed.append((center, width / 2))
            for j, axis in enumerate(axes[trace]):
                low, high = axis.range
                found[k, j] = low + (center[j] - axis.start) / (axis.stop - axis.start) * (high - low)
        return found, free

    def depend_on(self, tree: dict) -> bytes:
        """What the places depend on: while it is the same, they are."""
        parts = [np.asarray(axis.get("range", ()), float) for name, axis in tree["layout"].items() if "axis" in name]
        for i, trace in enumerate(tree["data"]):
            if i in self.traces or _is_line_of(trace) or _has_text(trace):
                parts += [np.asarray(trace[key]) for key in "xy" if trace.get(key) is not None]
        parts += [np.asarray([note["x"], note["y"]], dtype=object) for note in _notes(tree)]
        return b"".join(part.astype("U" if part.dtype == object else part.dtype).tobytes() for part in parts)

    def shares(self, tree: dict, places: np.ndarray) -> np.ndarray:
        """The places as shares of their axes."""
        axes = _curves(tree, self.traces)[1]
        ends = np.array([[axis.range for axis in axes[trace]] for trace in self.traces])
        return (places - ends[..., 0]) / (ends[..., 1] - ends[..., 0])


def named(figure: go.Figure, tree: dict) -> Labels | None:
    """Give the lines of a figure their names in the plot instead of in the legend, if there is room for all of them."""
    if figure.layout.showlegend is False or any(t.type in SOLIDS for t in figure.data):
        return None
    listed = [t.name is not None and t.visible in (None, True) and t.showlegend is not False for t in figure.data]
    lines = [i for i, t in enumerate(figure.data) if listed[i] and t.type == "scatter" and _is_line(t)]
    drawn = _curves(tree, tuple(lines))[0] if lines else {}
    chosen = tuple(i for i in lines if len(drawn[i]))  # a line without points is only an entry of the legend
    if not chosen or len(chosen) > MOST or (sum(listed) == 1 and not figure.data[chosen[0]].showlegend):
        return None
    first = len(figure.layout.annotations)
    widths = tuple(CHARACTER * len(re.sub(r"<[^>]*>", "", figure.data[i].name)) for i in chosen)
    labels = Labels(chosen, tuple(range(first, first + len(chosen))), widths)
    _, free = labels.places(tree)
    if not free:
        return None
    for i in chosen:
        trace = figure.data[i]
        color = trace.line.color if isinstance(trace.line.color, str) else _COLORWAY[i % len(_COLORWAY)]
        figure.add_annotation(
            x=0.0, y=0.0, xref=trace.xaxis or "x", yref=trace.yaxis or "y", text=f"<b>{trace.name}</b>", showarrow=False,
            font={"color": color, "size": 12}, name="label",
        )  # fmt: skip
        trace.showlegend = False
    figure.layout.showlegend = any(t.showlegend is not False for t, seen in zip(figure.data, listed, strict=True) if seen)
    return labels


def tightened(figure: go.Figure) -> None:
    """Take away the room above a flat figure if it has neither a legend nor a title."""
    layout, listed = figure.layout, [t for t in figure.data if t.showlegend is not False]
    without = layout.showlegend is False or (layout.showlegend is None and len(listed) < 2)
    titled = layout.title.text or any(n.yref == "paper" and (n.y or 0) > 0.95 for n in layout.annotations)
    if without and not titled and layout.margin.t is None and not any(t.type in SOLIDS for t in figure.data):
        figure.update_layout(margin_t=TOP)


def _is_line(trace: go.Scatter) -> bool:
    return "lines" in (trace.mode or "lines") and (trace.line.width is None or trace.line.width > 0)


def _is_line_of(trace: dict) -> bool:
    return trace["type"] == "scatter" and "lines" in (trace.get("mode") or "lines")


def _is_obstacle(trace: dict) -> bool:
    """Must names keep away from it? From lines, but not from points. From lines that only guide the eye, if they can."""
    points = trace["y"] if trace.get("y") is not None else trace.get("x", ())
    return _is_line_of(trace) and len(points) > 2


def _has_text(trace: dict) -> bool:
    return trace["type"] == "scatter" and "text" in (trace.get("mode") or "") and trace.get("text") is not None


def _notes(tree: dict) -> list[dict]:
    """The figure's own annotations that stand at a place of the plot."""
    own = [note for note in tree["layout"].get("annotations") or [] if note.get("name") != "label" and note.get("text")]
    return [
        note
        for note in own
        if note.get("showarrow") is False and None not in (note.get("x"), note.get("y"))
        and all(re.fullmatch(rf"{letter}\d*", note.get(f"{letter}ref") or letter) for letter in "xy")
    ]  # fmt: skip


def _texts(trace: dict, points: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The centers of the texts at the points of a trace, and half their widths."""
    texts = [trace["text"]] * len(points) if isinstance(trace["text"], str) else trace["text"]
    up, _, side = (trace.get("textposition") or "middle center").partition(" ")
    found = []
    for point, text in zip(points, texts):
        half = CHARACTER * len(re.sub(r"<[^>]*>", "", str(text))) / 2
        move = [{"left": -half - 4, "right": half + 4}.get(side, 0.0), {"top": -HALF - 4, "bottom": HALF + 4}.get(up, 0.0)]
        if half and np.isfinite(point).all():
            found.append((point + move, half))
    return found


def _curves(
    tree: dict, wanted: tuple[int, ...]
) -> tuple[dict[int, np.ndarray], dict[int, tuple], list[tuple[np.ndarray, float]]]:
    """Of each wanted line, and of each other: [m, 2] pixels along it, and its two axes; and the texts at points."""
    seen = {i: t for i, t in enumerate(tree["data"]) if t.get("visible", True) is True}
    flat = {i: t for i, t in seen.items() if t["type"] in ("scatter", "bar", "heatmap")}
    plane = Plane(list(flat.values()), tree["layout"], (0.0, 0.0, WIDE, HIGH))
    curves, axes, texts = {}, {}, []
    for i, trace in flat.items():
        if i not in wanted and not _is_line_of(trace) and not _has_text(trace):
            continue
        axes[i] = plane.pair(trace)
        x, y = (axis.at(v) for axis, v in zip(axes[i], plane.values(trace), strict=True))
        points = np.stack([x[: len(y)], y[: len(x)]], 1)
        if _has_text(trace):
            texts += _texts(trace, points)
        if i in wanted or _is_line_of(trace):
            curves[i] = _spread(_stairs(points, (trace.get("line") or {}).get("shape")))
    for note in _notes(tree):
        at = []
        for letter in "xy":
            axis = plane.axis(note.get(f"{letter}ref") or letter)
            (value,) = axis.numbers([note[letter]])
            at.append(float(axis.at(np.array([10.0**value if axis.log else value]))[0]))
        shift = [note.get("xshift") or 0, -(note.get("yshift") or 0)]
        texts += _texts(note, np.add([at], shift))
    return curves, axes, texts


def _stairs(points: np.ndarray, shape: str | None) -> np.ndarray:
    """The corners of a line that runs in steps."""
    if shape not in ("hv", "vh"):
        return points
    x, y = np.repeat(points, 2, axis=0).T
    return np.stack((x[1:], y[:-1]) if shape == "hv" else (x[:-1], y[1:]), 1)


def _spread(points: np.ndarray) -> np.ndarray:
    """Points at even distances along a line; a gap is not crossed."""
    steps = np.hypot(*np.diff(points, axis=0).T)
    length = np.concatenate([[0.0], np.cumsum(np.nan_to_num(np.minimum(steps, 2 * (WIDE + HIGH))))])
    if not length[-1] > 0:
        return points[np.isfinite(points).all(1)]
    count = int(np.clip(length[-1] / APART, POINTS, MOST_POINTS))
    at = np.interp(np.linspace(0, length[-1], count), length, np.arange(len(points)))
    low = np.minimum(at.astype(int), len(points) - 2)
    found = points[low] + (at - low)[:, None] * (points[low + 1] - points[low])
    return found[np.isfinite(found).all(1)]


def _gap(center: np.ndarray, half: float, points: np.ndarray) -> np.ndarray:
    """[c] distances from boxes around centers to the nearest point; 0 inside."""
    away = np.abs(center[:, None] - points[None]) - [half, HALF]
    return np.hypot(*np.maximum(away, 0.0).transpose(2, 0, 1)).min(1)


def _best(curve, others, guides, axes, half: float, placed: list, wanted) -> tuple[np.ndarray, bool] | None:
    """The center of a name, and whether it stands free; None if the curve is out of sight. A name on a guide is still free."""
    (left, right), (top, bottom) = (sorted((axis.start, axis.stop)) for axis in axes)
    seen = curve[
        (curve[:, 0] >= left - 1) & (curve[:, 0] <= right + 1) & (curve[:, 1] >= top - 1) & (curve[:, 1] <= bottom + 1)
    ]
    if not len(seen):
        return None
    anchors = seen[np.linspace(0, len(seen) - 1, min(ANCHORS, len(seen))).round().astype(int)]
    up, side = HALF + 4, half + 6
    moves = np.array([[0, -up], [0, up], [side, 0], [-side, 0], [side, -up], [-side, -up], [side, up], [-side, up]])
    centers = (anchors[:, None] + moves[None]).reshape(-1, 2)
    inside = np.clip(centers, [left + half + 1, top + HALF], [max(right - half - 1, left + half + 1), bottom - HALF])
    mine = _gap(inside, half, seen)
    rest, guide = (
        _gap(inside, half, np.concatenate(x)) if any(map(len, x)) else np.full(len(inside), 99.0) for x in (others, guides)
    )
    clash = np.zeros(len(inside))
    for center, reach in placed:
        clash += (np.abs(inside - center) < [half + reach + 3, 2 * HALF]).all(1)
    cost = 400 * clash + 150 * (mine < CLOSE) + 200 * (rest < CLOSE) + 40 * (guide < CLOSE)
    cost += 1.5 * mine - 0.7 * np.minimum(rest, 30)
    cost += np.where(rest < mine, 25.0, 0.0)  # nearer to another curve than to its own
    if wanted is not None and np.isfinite(wanted).all():
        ends = np.array([[axis.start, axis.stop] for axis in axes])
        cost += 0.15 * np.hypot(*(inside - (ends[:, 0] + wanted * (ends[:, 1] - ends[:, 0]))).T)
    k = int(cost.argmin())
    return inside[k], bool(clash[k] == 0 and mine[k] >= CLOSE and rest[k] >= CLOSE)
