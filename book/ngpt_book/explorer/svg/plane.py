"""How is a 2-D figure drawn as a still picture? Axes, lines, markers, bars and heat maps, in any arrangement of subplots."""

import numpy as np

from .axis import Axis
from .pieces import each, line, marker, num, opacity, path, png, rectangle, shades, text, tints

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


class Plane:
    """A pair of axes and the traces on them."""

    def __init__(self, traces: list[dict], layout: dict, box: Box):
        self.traces, self.layout, self.box = traces, layout, box
        self.axes: dict[str, Axis] = {}
        self.bases = self._bar_bases()
        for trace in traces:
            self._measure(trace)

    def axis(self, name: str) -> Axis:
        """The axis "x", "y2", ..."""
        if name not in self.axes:
            spec = self.layout.get(f"{name[0]}axis{name[1:]}", {})
            left, top, right, bottom = self.box
            start, stop = (left, right) if name[0] == "x" else (bottom, top)
            a, b = spec.get("domain", (0, 1))
            self.axes[name] = Axis(spec, start + a * (stop - start), start + b * (stop - start))
        return self.axes[name]

    def pair(self, trace: dict) -> tuple[Axis, Axis]:
        return self.axis(trace.get("xaxis", "x")), self.axis(trace.get("yaxis", "y"))

    def values(self, trace: dict) -> tuple[np.ndarray, np.ndarray]:
        """x and y of a trace as numbers; what is missing counts 0, 1, 2, ..."""
        (ax, ay), x, y = self.pair(trace), trace.get("x"), trace.get("y")
        n = len(y if y is not None else x)
        return (ax.numbers(np.arange(n) if x is None else x), ay.numbers(np.arange(n) if y is None else y))

    def _edges(self, trace: dict) -> list[np.ndarray]:
        """The outer edges of a heat map along x and y; its coordinates are the centers of the cells."""
        edges = []
        for axis, key, n in zip(self.pair(trace), "xy", np.shape(trace["z"])[::-1]):
            middle = axis.numbers(np.arange(n) if trace.get(key) is None else trace[key])
            half = (middle[1] - middle[0]) / 2 if n > 1 else 0.5
            edges.append(np.array([middle[0] - half, middle[-1] + half]))
        return edges

    def _bar_bases(self) -> dict[int, np.ndarray]:
        """Where each bar starts: at zero, or in a stack on top of the bars before it."""
        tops: dict[tuple, float] = {}
        bases = {}
        for trace in (t for t in self.traces if t["type"] == "bar"):
            places, heights = self.values(trace)[:: -1 if trace.get("orientation") == "h" else 1]
            base = np.zeros(len(places))
            if self.layout.get("barmode") == "stack":
                for i, (place, height) in enumerate(zip(places, np.nan_to_num(heights))):
                    at = (trace.get("xaxis"), trace.get("yaxis"), place)
                    base[i] = tops.get(at, 0.0)
                    tops[at] = base[i] + height
            bases[id(trace)] = base
        return bases

    def _measure(self, trace: dict) -> None:
        """Tell the axes what must fit."""
        ax, ay = self.pair(trace)
        if trace["type"] == "heatmap":
            for axis, edges in zip((ax, ay), self._edges(trace)):
                axis.fit(edges)
                axis.tight = True
            return
        x, y = self.values(trace)
        ax.fit(x)
        ay.fit(y)
        if trace["type"] == "bar":
            along, up, places = (ay, ax, y) if trace.get("orientation") == "h" else (ax, ay, x)
            half = _spacing(places) / 2
            along.fit(np.array([places.min() - half, places.max() + half]))
            up.fit(np.append(0.0, self.bases[id(trace)] + (x if along is ay else y)))
        elif trace.get("fill") == "tozeroy":
            ay.fit(np.zeros(1))

    def place(self, item: dict, key: str) -> float:
        """The pixel of a coordinate of an annotation or a shape."""
        ref = str(item.get(f"{key[0]}ref") or (key[0] if key[0] in self.axes else "paper"))
        left, top, right, bottom = self.box
        if ref == "paper":
            return left + item[key] * (right - left) if key[0] == "x" else bottom + item[key] * (top - bottom)
        axis = self.axis(ref.split()[0])
        if ref.endswith("domain"):
            return axis.start + item[key] * (axis.stop - axis.start)
        value = 10.0 ** item[key] if axis.log and "text" in item else item[key]  # plotly: log10 in annotations, not in shapes
        return float(axis.at([value])[0])

    def draw(self, colors: list[str]) -> str:
        """Everything inside the frame; ``colors`` are the traces' default colors."""
        out, before = self._draw_axes(), ""
        bars = [id(t) for t in self.traces if t["type"] == "bar"]
        for trace, color in zip(self.traces, colors):
            if trace["type"] == "heatmap":
                out.append(self._heatmap(trace))
            elif trace["type"] == "bar":
                out.append(self._bars(trace, color, bars.index(id(trace)), len(bars)))
            else:
                drawn, before = self._scatter(trace, color, before)
                out.append(drawn)
        return "".join(out)

    def _draw_axes(self) -> list[str]:
        out = []
        for name, axis in list(self.axes.items()):
            if axis.spec.get("visible") is False:
                continue
            anchor = str(axis.spec.get("anchor") or ("y" if name[0] == "x" else "x"))
            across = self.axis(anchor) if anchor[0] in "xy" else self.axis("y" if name[0] == "x" else "x")
            flat, base, middle = name[0] == "x", across.start, (axis.start + axis.stop) / 2
            ends = (axis.start, axis.stop)
            out.append(line(path(ends, (base, base)) if flat else path((base, base), ends), "currentColor", 1, share=0.5))
            for p, label in axis.ticks():
                if axis.spec.get("showgrid", True):
                    rule = f"M{num(p)},{num(base)}V{num(across.stop)}" if flat else f"M{num(base)},{num(p)}H{num(across.stop)}"
                    out.append(line(rule, "currentColor", 1, share=0.13))
                if axis.spec.get("showticklabels", True):
                    at = (p, base + 17, label) if flat else (base - 7, p + 4, label)
                    out.append(text(*at, anchor="middle" if flat else "end", size=11))
            if axis.title:
                at = (middle, base + 36) if flat else (base - 42, middle)
                out.append(text(*at, axis.title, size=13, turn=0 if flat else -90))
        return out

    def _scatter(self, trace: dict, color: str, before: str) -> tuple[str, str]:
        """(the drawing, its outline for a later fill to it)."""
        ax, ay = self.pair(trace)
        raw_x, raw_y = self.values(trace)
        x, y, n = ax.at(raw_x), ay.at(raw_y), len(raw_x)
        stroke, look, share = trace.get("line", {}), trace.get("marker", {}), trace.get("opacity", 1.0)
        mode = trace.get("mode") or ("lines+markers" if n < 20 else "lines")
        if stroke.get("shape") in ("hv", "vh"):
            first = stroke["shape"] == "hv"
            outline = path(np.repeat(x, 2)[first : 2 * n - 1 + first], np.repeat(y, 2)[1 - first : 2 * n - first])
        else:
            outline = path(x, y)
        out = []
        if outline and trace.get("fill") in ("tozeroy", "tonexty", "toself"):
            points = [p for p in outline.replace("M", "L").split("L") if p]
            ends = points[-1].split(",")[0], points[0].split(",")[0]
            back = [f"{end},{num(ay.zero())}" for end in ends]
            if trace["fill"] == "tonexty" and before:
                back = [p for p in before.replace("M", "L").split("L") if p][::-1]
            area = "L".join([*points, *(back if trace["fill"] != "toself" else [])])
            tint = trace.get("fillcolor")
            out.append(f'<path d="M{area}Z" fill="{tint or stroke.get("color", color)}"{"" if tint else opacity(0.25)}/>')
        tint = stroke.get("color") or (look["color"] if isinstance(look.get("color"), str) else color)
        if "lines" in mode and stroke.get("width", 2) > 0:
            out.append(line(outline, tint, stroke.get("width", 2), stroke.get("dash", "solid"), share))
        whiskers = ("error_x", ax, raw_x, y, "M{b},{a}H{c}"), ("error_y", ay, raw_y, x, "M{a},{b}V{c}")
        for key, axis, raw, across, word in whiskers:
            if (error := trace.get(key, {})).get("array") is not None:
                up, down = np.asarray(error["array"]), np.asarray(error.get("arrayminus", error["array"]))
                ends = [e for e in zip(across, axis.at(raw - down), axis.at(raw + up)) if np.isfinite(sum(e))]
                shade, width = error.get("color", tint), error.get("thickness", 1.5)
                out += [line(word.format(a=num(a), b=num(b), c=num(c)), shade, width) for a, b, c in ends]
        seen = np.isfinite(x) & np.isfinite(y)
        if "markers" in mode:
            looks = zip(x, y, each(look.get("size"), n, 6), tints(look, n, tint), each(look.get("symbol"), n, "circle"), seen)
            share = look.get("opacity", share)
            out += [marker(a, b, size / 2, c, str(symbol), share) for a, b, size, c, symbol, ok in looks if ok]
        if "text" in mode:
            words = zip(x, y, each(trace.get("text"), n, ""), seen)
            where = str(trace.get("textposition", "middle center"))
            out += [label(a, b, t, where, trace.get("textfont", {}).get("color", "")) for a, b, t, ok in words if ok]
        return "".join(out), outline

    def _bars(self, trace: dict, color: str, number: int, count: int) -> str:
        flat, look = trace.get("orientation") == "h", trace.get("marker", {})
        (along, up), (places, heights) = self.pair(trace), self.values(trace)
        if flat:
            along, up, places, heights = up, along, heights, places
        beside = self.layout.get("barmode", "group") == "group"
        width = 0.85 * _spacing(places) / (count if beside else 1)
        offset = (number - (count - 1) / 2) * width if beside else 0.0
        left, right = along.at(places + offset - width / 2), along.at(places + offset + width / 2)
        out, bases = [], self.bases[id(trace)]
        starts = up.at(bases) if bases.any() else np.full(len(places), up.zero())
        for a, b, base, top, tint in zip(left, right, starts, up.at(bases + heights), tints(look, len(places), color)):
            if np.isfinite(top):
                corners = (base, a, top, b) if flat else (a, base, b, top)
                out.append(rectangle(*corners, f'fill="{tint}"'))
        return f"<g{opacity(trace.get('opacity', look.get('opacity', 1.0)))}>{''.join(out)}</g>"

    def _heatmap(self, trace: dict) -> str:
        z, middle = np.asarray(trace["z"], dtype=float), trace.get("zmid")
        reach = None if middle is None else float(np.nanmax(np.abs(z - middle)))
        lo = trace.get("zmin", None if middle is None else middle - reach)
        hi = trace.get("zmax", None if middle is None else middle + reach)
        rgb = np.frombuffer(bytes.fromhex("".join(shades(z, trace.get("colorscale"), lo, hi)).replace("#", "")), dtype=np.uint8)
        pixels = np.concatenate([rgb.reshape(*z.shape, 3), np.where(np.isnan(z), 0, 255)[..., None]], -1)
        (x0, x1), (y0, y1) = (axis.at(edges) for axis, edges in zip(self.pair(trace), self._edges(trace)))
        pixels = pixels[:: 1 if y1 > y0 else -1, :: 1 if x1 > x0 else -1]
        look = f'preserveAspectRatio="none" style="image-rendering:pixelated" href="{png(pixels)}"'
        return rectangle(x0, y0, x1, y1, look, "image")


def label(x: float, y: float, words: str, where: str, color: str = "") -> str:
    """A text beside a point, placed as plotly's textposition says."""
    lift = -9 if "top" in where else 16 if "bottom" in where else 4
    anchor, shift = ("start", 8) if "right" in where else ("end", -8) if "left" in where else ("middle", 0)
    return text(x + shift, y + lift, words, anchor=anchor, color=color)


def _spacing(values: np.ndarray) -> float:
    gaps = np.diff(np.unique(values))
    return float(gaps.min()) if gaps.size else 1.0
