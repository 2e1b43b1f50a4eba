"""What does the walk look like on paper, and where scripts do not run? The map of map.js and drawing.js, as a still picture."""

import html
import math
from typing import Any

import numpy as np

from ngpt_core.tools.theme import COLORS, FONT

__all__ = ["great_circle", "longitudes", "walk"]

INK = {"M": COLORS["teal"], "*": COLORS["magenta"], "E": COLORS["gold"]}
WIDTH, HEIGHT, RADIUS = 420, 350, 158
CENTER = (WIDTH / 2, 182.0)


def longitudes(to: list[float], turn: list[float]) -> np.ndarray:
    """The longitude of every state, in radians: each block's triangle with the pole has three true sides (see map.js)."""
    a, b, c = np.radians(to[:-1]), np.radians(to[1:]), np.radians(turn)
    cosine = (np.cos(c) - np.cos(a) * np.cos(b)) / np.maximum(np.sin(a) * np.sin(b), 1e-9)
    found = np.concatenate([[0.0], np.arccos(np.clip(cosine, -1, 1)).cumsum()])
    return np.pi / 2 + found[-1] / 2 - found


def great_circle(a: tuple[float, float], b: tuple[float, float], steps: int = 14) -> list[tuple[float, float]]:
    """Points (degrees from the pole, longitude) of the great circle between two."""
    polar = ((math.radians(angle), longitude) for angle, longitude in (a, b))
    ends = [np.array([math.sin(t) * math.cos(u), math.sin(t) * math.sin(u), math.cos(t)]) for t, u in polar]
    points = []
    for t in np.linspace(0, 1, steps + 1):
        x = (1 - t) * ends[0] + t * ends[1]  # on the chord; its direction is on the arc
        x = x / np.linalg.norm(x)
        points.append((math.degrees(math.acos(np.clip(x[2], -1, 1))), math.atan2(x[1], x[0])))
    return points


def walk(sight: dict[str, Any], pattern: str, alt: str) -> str:
    """The map around the most likely next byte, as SVG."""
    to, next_byte, last = sight["to"][0], sight["next"][0]["byte"], sight["bytes"][-1]
    far = max(96.0, max(to) + 6)
    states = list(zip(to, longitudes(to, sight["turn"])))

    def at(p: tuple[float, float]) -> tuple[float, float]:
        r = RADIUS * p[0] / far
        return round(CENTER[0] + r * math.cos(p[1]), 1), round(CENTER[1] - r * math.sin(p[1]), 1)

    rings = "".join(
        f'<circle cx="{CENTER[0]}" cy="{CENTER[1]}" r="{RADIUS * x / far:.1f}"/>' for x in range(30, int(far) + 1, 30)
    )
    marks = "".join(
        f'<text x="{CENTER[0]}" y="{CENTER[1] + RADIUS * x / far + 11:.1f}" text-anchor="middle">{x}°</text>'
        for x in range(30, int(far) + 1, 30)
    )
    legs = ""
    for letter, a, b in zip(pattern, states, states[1:]):
        line = " ".join("{},{}".format(*at(p)) for p in great_circle(a, b))
        legs += f'<polyline points="{line}" fill="none" stroke="{INK[letter]}" stroke-width="3.5" stroke-linecap="round"/>'
    badges = "".join(
        f'<circle cx="{x}" cy="{y}" r="12" fill="{fill}"/><text x="{x}" y="{y + 4.5}" text-anchor="middle" fill="white" '
        f'font-size="14">{html.escape(_glyph(byte))}</text>'
        for (x, y), byte, fill in ((CENTER, next_byte, COLORS["red"]), (at(states[0]), last, COLORS["grey"]))
    )
    x, y = at(states[-1])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'style="max-width:100%;height:auto" font-family="{html.escape(FONT)}" font-size="10" fill="currentColor" role="img" '
        f'aria-label="{html.escape(alt)}"><g fill="none" stroke="currentColor" stroke-opacity="0.25">{rings}</g>'
        f'<g opacity="0.7">{marks}</g>{legs}{badges}<circle cx="{x}" cy="{y}" r="5.5" fill="{COLORS["blue"]}"/></svg>'
    )


def _glyph(byte: int) -> str:
    return {9: "⇥", 10: "⏎", 32: "␣"}.get(byte) or (chr(byte) if 32 < byte < 127 else f"{byte:02X}")
