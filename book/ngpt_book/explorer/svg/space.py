"""How is a 3-D scene drawn as a still picture? Points, lines and surfaces seen from plotly's camera.

eye     the camera's position, in units in which the scene's box has sides of about 1 around the origin
depth   the distance along the line of sight: nearer things are drawn later
"""

import itertools

import numpy as np

from .pieces import each, line, marker, opacity, path, shades, text, tints
from .plane import Box, label

CELLS = 16  # of a surface along each side: a still picture needs no more


class Space:
    """A three-dimensional scene, seen from its camera."""

    def __init__(self, traces: list[dict], scene: dict, box: Box):
        self.traces, self.scene, self.box = traces, scene, box
        clouds = [np.stack([c.reshape(-1) for c in np.broadcast_arrays(*self._xyz(t))]) for t in traces]
        cloud = np.concatenate(clouds, 1) if clouds else np.zeros((3, 1))
        ends = [np.nanmin(cloud, 1), np.nanmax(cloud, 1)]
        for k, name in enumerate("xyz"):
            given = scene.get(f"{name}axis", {}).get("range")
            if given is not None:
                ends[0][k], ends[1][k] = given
        self.lo, self.hi = ends
        side = np.where(self.hi > self.lo, self.hi - self.lo, 1.0)
        ratio = side / side.max() if scene.get("aspectmode", "data") == "data" else np.ones(3)
        if scene.get("aspectmode") == "manual":
            ratio = np.array([scene["aspectratio"][name] for name in "xyz"], dtype=float)
        self.middle, self.scale = (self.lo + self.hi) / 2, ratio / side
        camera = scene.get("camera", {})
        eye = np.array([camera.get("eye", {}).get(k, v) for k, v in zip("xyz", (1.25, 1.05, 0.75))], dtype=float)
        ahead = -eye / np.linalg.norm(eye)
        right = np.cross(ahead, [0, 0, 1])
        right /= np.linalg.norm(right)
        self.eye, self.view = eye, np.stack([right, np.cross(right, ahead), ahead])

    def _xyz(self, trace: dict) -> list[np.ndarray]:
        z = np.asarray(trace["z"], dtype=float)
        if trace["type"] != "surface":
            return [np.asarray(trace["x"], dtype=float), np.asarray(trace["y"], dtype=float), z]
        given = zip((trace.get("x"), trace.get("y")), z.shape[::-1])
        x, y = (np.arange(n) if values is None else np.asarray(values, dtype=float) for values, n in given)
        return [x if x.ndim == 2 else x[None, :], y if y.ndim == 2 else y[:, None], z]

    def project(self, x, y, z) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(pixel x, pixel y, depth), in perspective."""
        points = np.stack(np.broadcast_arrays(x, y, z)) - self.middle.reshape(3, *[1] * np.ndim(z))
        points = points * self.scale.reshape(3, *[1] * np.ndim(z)) - self.eye.reshape(3, *[1] * np.ndim(z))
        across, up, depth = np.tensordot(self.view, points, 1)
        left, top, right, bottom = self.box
        zoom = 1.25 * min(right - left, bottom - top)  # plotly's field of view
        return (left + right) / 2 + zoom * across / depth, (top + bottom) / 2 - zoom * up / depth, depth

    def draw(self, colors: list[str]) -> str:
        """Surfaces first, then lines, then markers and texts, each from far to near."""
        layers = {"surface": [], "scatter3d": []}
        for trace, color in zip(self.traces, colors):
            layers[trace["type"]].append(self._surface(trace) if trace["type"] == "surface" else self._scatter(trace, color))
        marks = sorted((m for _, ms in layers["scatter3d"] for m in ms), key=lambda m: -m[0])
        strokes = "".join(stroke for stroke, _ in layers["scatter3d"])
        return self._frame() + "".join(layers["surface"]) + strokes + "".join(m for _, m in marks)

    def _frame(self) -> str:
        """The box and the axes' names and ends, unless the axes are switched off."""
        specs = [self.scene.get(f"{name}axis", {}) for name in "xyz"]
        if all(s.get("visible") is False for s in specs):
            return ""
        out = []
        for axis, (spec, name) in enumerate(zip(specs, "xyz")):
            others = [k for k in range(3) if k != axis]
            for sides in itertools.product((0, 1), repeat=2):
                corner = np.array([self.lo, self.lo])
                for k, side in zip(others, sides):
                    corner[:, k] = (self.lo, self.hi)[side][k]
                corner[1, axis] = self.hi[axis]
                px, py, _ = self.project(*corner.T)
                out.append(line(path(px, py), "currentColor", 1, share=0.25))
                if sides == (1, 0):
                    words = (f"{self.lo[axis]:.3g}", (spec.get("title") or {}).get("text") or name, f"{self.hi[axis]:.3g}")
                    for share, word in zip((0.1, 0.5, 0.9), words):  # not in the corners, where three axes meet
                        x, y = px[0] + share * (px[1] - px[0]), py[0] + share * (py[1] - py[0])
                        out.append(text(x - 14, y + 4, word) if axis == 2 else text(x + 10 * (1 - 2 * axis), y + 18, word))
        return "".join(out)

    def _surface(self, trace: dict) -> str:
        x, y, z = np.broadcast_arrays(*self._xyz(trace))
        shade = np.asarray(trace["surfacecolor"] if trace.get("surfacecolor") is not None else z, dtype=float)
        rows, columns = (np.unique(np.linspace(0, n - 1, min(n, CELLS + 1)).astype(int)) for n in z.shape)
        at = np.ix_(rows, columns)
        px, py, depth = self.project(x[at], y[at], z[at])
        first, second = slice(-1), slice(1, None)
        ring = ((first, first), (first, second), (second, second), (second, first))

        def corners(a: np.ndarray) -> np.ndarray:
            return np.stack([a[r].reshape(-1) for r in ring])

        quads = corners(px), corners(py)
        order = [i for i in np.argsort(-corners(depth).mean(0)) if np.isfinite(quads[0][:, i] + quads[1][:, i]).all()]
        tint = shades(corners(shade[at]).mean(0), trace.get("colorscale"), trace.get("cmin"), trace.get("cmax"))
        cells = [self._turned(quads[0][:, i], quads[1][:, i]) for i in order]
        if len(set(tint)) == 1:  # one color: its outline alone is seen
            inside = f'<path d="{"".join(cells)}" fill="{tint[0]}"/>'
        else:
            inside = "".join(f'<path d="{d}" fill="{tint[i]}" stroke="{tint[i]}"/>' for d, i in zip(cells, order))
        return f'<g stroke-width="0.5"{opacity(trace.get("opacity", 1.0))}>{inside}</g>'

    @staticmethod
    def _turned(x: np.ndarray, y: np.ndarray) -> str:
        """A closed path that always turns the same way: front and back of a surface must not cancel."""
        area = (x * np.roll(y, -1) - y * np.roll(x, -1)).sum()
        return path(x, y) + "Z" if area > 0 else path(x[::-1], y[::-1]) + "Z"

    def _scatter(self, trace: dict, color: str) -> tuple[str, list[tuple[float, str]]]:
        """(the line, [(depth, marker or text)])."""
        x, y, depth = self.project(*self._xyz(trace))
        n, mode = len(x), trace.get("mode") or "lines+markers"
        stroke, look, share = trace.get("line", {}), trace.get("marker", {}), trace.get("opacity", 1.0)
        tint = stroke["color"] if isinstance(stroke.get("color"), str) else color
        width = 0.55 * stroke.get("width", 2)  # plotly's 3-D widths are finer than pixels
        drawn = line(path(x, y), tint, max(width, 0.6), stroke.get("dash", "solid"), share) if "lines" in mode else ""
        seen = [i for i in range(n) if np.isfinite(x[i] + y[i])]
        marks = []
        if "markers" in mode:
            sizes, fills = each(look.get("size"), n, 4), tints(look, n, color)
            symbols, share = each(look.get("symbol"), n, "circle"), look.get("opacity", share)
            marks = [(depth[i], marker(x[i], y[i], 0.6 * sizes[i], fills[i], str(symbols[i]), share)) for i in seen]
        if "text" in mode:
            words, where = each(trace.get("text"), n, ""), str(trace.get("textposition", "top center"))
            ink = trace.get("textfont", {}).get("color", "")
            marks += [(depth[i] - 1e-3, label(x[i], y[i], words[i], where, ink)) for i in seen]
        return drawn, marks
