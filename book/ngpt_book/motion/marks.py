"""What can move in an animation? Curves that grow, shapes, rings, bars, words; on a panel with two axes.

    Panel(x=Axis(0, 2000, "step"), y=Axis(1, 5, "loss"), marks=[Curve(x, y, COLORS["blue"], upto=counts, label="nGPT")])

A mark takes data and turns it into places in its panel, 0 to 1 from left to right and from bottom to top, of which the page
gets sixteen bits. So the page knows no axes: one affine map per panel draws every width. Arrays over frames have the frames
first; with a single frame a mark does not move.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .codec import encode

__all__ = ["Axis", "Bars", "Curve", "Mark", "Panel", "Ring", "Shape", "Words"]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel, linear or logarithmic. Without ticks it is not drawn.

    ticks: numbers, or pairs of a number and its text.
    """

    lo: float
    hi: float
    title: str = ""
    ticks: Sequence[Any] = ()
    log: bool = False

    def fraction(self, x: Any) -> np.ndarray:
        """The place of x: 0 at lo, 1 at hi."""
        lo, hi, x = np.float64(self.lo), np.float64(self.hi), np.asarray(x, dtype=np.float64)
        if self.log:
            lo, hi, x = np.log10(lo), np.log10(hi), np.log10(x)
        return (x - lo) / (hi - lo)

    def labeled(self) -> list[tuple[float, str]]:
        """(place, text) of every tick."""
        pairs = [tick if isinstance(tick, tuple) else (tick, f"{tick:,g}") for tick in self.ticks]
        return [(float(self.fraction(value)), text) for value, text in pairs]


class Mark(Protocol):
    def spec(self, x: Axis, y: Axis) -> dict[str, Any]: ...


def _places(axis: Axis, values: Any) -> dict[str, Any]:
    found = np.asarray(values, dtype=np.float64)
    return encode(axis.fraction(found if found.ndim > 1 else found[None]), 0.0, 1.0)


@dataclass(frozen=True)
class Curve:
    """A line through fixed points, of which a frame shows the first ``upto``; a dot at its end, and a label beside the dot.

    upto: how many points each frame shows, fractions included; None: all of them in every frame.
    drop: how far the label is lowered, in pixels.
    """

    x: Any
    y: Any
    color: str
    upto: Any = None
    label: str = ""
    width: float = 2.2
    head: float = 4.0
    opacity: float = 1.0
    drop: float = 4.0

    def spec(self, x: Axis, y: Axis) -> dict[str, Any]:
        n = len(np.asarray(self.x))
        upto = [n] if self.upto is None else [round(float(u), 2) for u in self.upto]
        look = {
            "color": self.color,
            "width": self.width,
            "head": self.head,
            "opacity": self.opacity,
            "label": self.label,
            "drop": self.drop,
        }
        return {"kind": "curve", "x": _places(x, self.x), "y": _places(y, self.y), "upto": upto, **look}


@dataclass(frozen=True)
class Shape:
    """A line whose points move, x and y [frames, points]; with ``fill`` between 0 and 1, the area that it encloses."""

    x: Any
    y: Any
    color: str
    width: float = 2.0
    dash: str = ""
    fill: float = 0.0
    opacity: float = 1.0

    def spec(self, x: Axis, y: Axis) -> dict[str, Any]:
        look = {"color": self.color, "width": self.width, "dash": self.dash, "fill": self.fill, "opacity": self.opacity}
        return {"kind": "shape", "x": _places(x, self.x), "y": _places(y, self.y), **look}


@dataclass(frozen=True)
class Ring:
    """A circle around a point of a square panel, with a radius [frames] in units of x."""

    x: float
    y: float
    radius: Any
    color: str
    width: float = 1.0
    fill: float = 0.0
    opacity: float = 1.0

    def spec(self, x: Axis, y: Axis) -> dict[str, Any]:
        r = encode(np.asarray(self.radius, dtype=np.float64)[:, None] / (x.hi - x.lo), 0.0, 1.0)
        place = {"x": round(float(x.fraction(self.x)), 4), "y": round(float(y.fraction(self.y)), 4)}
        look = {"color": self.color, "width": self.width, "fill": self.fill, "opacity": self.opacity}
        return {"kind": "ring", **place, "r": r, **look}


@dataclass(frozen=True)
class Bars:
    """Bars from the bottom of the panel: their middles x [bars], their tops y [frames, bars], their width in units of x."""

    x: Any
    y: Any
    color: str
    width: float
    opacity: float = 0.85

    def spec(self, x: Axis, y: Axis) -> dict[str, Any]:
        wide = round(float(self.width / (x.hi - x.lo)), 5)
        look = {"color": self.color, "wide": wide, "opacity": self.opacity}
        return {"kind": "bars", "x": _places(x, self.x), "y": _places(y, self.y), **look}


@dataclass(frozen=True)
class Words:
    """Lines of text at a place of the panel (in its axes' units): one list of lines per frame, or one for all frames."""

    x: float
    y: float
    lines: Sequence[Sequence[str]]
    color: str = "currentColor"
    size: float = 12.5
    anchor: str = "start"
    mono: bool = False
    bold: bool = False

    def spec(self, x: Axis, y: Axis) -> dict[str, Any]:
        count = max(map(len, self.lines))
        lines = [[*frame, *[""] * (count - len(frame))] for frame in self.lines]
        place = {"x": round(float(x.fraction(self.x)), 4), "y": round(float(y.fraction(self.y)), 4)}
        look = {"color": self.color, "size": self.size, "anchor": self.anchor, "mono": self.mono, "bold": self.bold}
        return {"kind": "words", **place, "lines": lines, **look}


@dataclass(frozen=True)
class Panel:
    """A part of the picture with axes of its own.

    share: of the width, where panels stand side by side.
    heights: of what the axes enclose, in pixels: where panels stand side by side, and on a phone, where they are stacked.
    left, right, bottom: room around that for labels.
    square: as high as it is wide; ``heights`` is not used.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    share: float = 1.0
    heights: tuple[float, float] = (250.0, 210.0)
    left: float = 44.0
    right: float = 20.0
    bottom: float = 42.0
    square: bool = False
    specs: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", [mark.spec(self.x, self.y) for mark in self.marks])
