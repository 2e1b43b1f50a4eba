"""What happens during training? The animations of the chapters: a run of GPT, one of nGPT, and chapter 3's, frame by frame.

    race()      chapter 9     the held-out losses of both               spread()    chapter 5     sqrt(v_hat) and the gate
    rows()      chapter 6     rows of a matrix under the cap            experts()   chapter 8.1   who gets the tokens
    growth()    chapter 3     s_z, and the logarithm fitted so far      writing()   chapter 11    what both write

``run()`` has the numbers behind them (data/make_motion.py), for the claims that the chapters assert.
"""

from functools import cache
from typing import Any

import numpy as np

from ngpt_core.tools.theme import COLORS

from ..data import stored
from ..motion import Animation, Axis, Bars, Curve, Panel, Ring, Shape, Words
from ..motion.codec import decode
from . import lgp

__all__ = ["experts", "growth", "race", "rows", "run", "spread", "writing"]

SOURCE = "Hybrid nGPT and GPT, 0.2M active parameters, Python source, seed 1"
NGPT = SOURCE.replace(" and GPT", "")
EPS_GATE, SHARPNESS = 1e-8, 0.5


@cache
def run() -> dict[str, Any]:
    """motion.json, decoded: arrays over the frames of ``at``, degrees, shares. Its docstring: data/make_motion.py."""
    found = stored("motion")
    for name in ("load", "start", "end", "turn", "cap"):
        found[name] = decode(found[name])
    scales = found["scales"]
    edges = np.array(scales["edges"])
    found["share"], found["exponent"] = decode(scales["share"]), (edges[1:] + edges[:-1]) / 2  # log10 of sqrt(v_hat)
    cumulated = np.concatenate([np.zeros((len(found["share"]), 1)), found["share"].cumsum(1)], 1)
    found["median"] = np.array([np.interp(row[-1] / 2, row, edges) for row in cumulated])
    d = 10.0 ** found["exponent"]
    found["gate"] = found["share"] @ (d**SHARPNESS / (d**SHARPNESS + EPS_GATE**SHARPNESS))
    found["at"] = {name: np.array(steps) for name, steps in found["at"].items()}
    for which in ("gpt", "ngpt"):
        found[which]["loss"] = np.array(found[which]["loss"])
    return found


def _labels(steps: Any, total: int) -> list[str]:
    return [f"step {t:,} of {total:,}" for t in steps]


def _moving(value: Any) -> np.ndarray:
    """[frames] as [frames, 1]."""
    return np.asarray(value, dtype=float)[:, None]


# ---- chapter 9 -------------------------------------------------------------------------------------------------------
def race(height: float = 270) -> Animation:
    r = run()
    steps, gpt, ngpt = r["at"]["loss"], r["gpt"]["loss"], r["ngpt"]["loss"]
    read, counts = steps * r["about"]["bytes"] / 1000, np.arange(1, len(steps) + 1)
    top = 3.4

    def curve(loss: np.ndarray, color: str, label: str, drop: float) -> Curve:
        low = loss < top  # it enters the picture from above
        return Curve(read[low], loss[low], COLORS[color], counts - (~low).sum(), label, drop=drop)

    bytes_read = Axis(0, 540, "kB of text read", (0, 128, 256, 384, 512))
    losses = Panel(
        bytes_read, Axis(1.42, top, "held-out loss, nats per byte", (1.5, 2, 2.5, 3), log=True),
        [curve(gpt, "red", "GPT", -3), curve(ngpt, "blue", "nGPT", 13)],
        share=1.6, right=44, heights=(height, 230),
    )  # fmt: skip
    apart = Panel(
        bytes_read, Axis(-0.3, 1.05, "GPT minus nGPT", ((-0.2, "−0.2"), 0, 0.2, 0.4, 0.6, 0.8, 1)),
        [
            Shape([0, 540], [0, 0], "currentColor", width=1, opacity=0.6),
            Curve(read, gpt - ngpt, COLORS["magenta"], counts),
        ],
        heights=(height, 130),
    )  # fmt: skip

    def words(kb: float, a: float, b: float) -> str:
        ahead = "they are level" if abs(a - b) < 0.005 else f"{'nGPT' if b < a else 'GPT'} is ahead by {abs(a - b):.2f}"
        return f"After {kb:.0f} kB: GPT {a:.2f}, nGPT {b:.2f}; {ahead}."

    return Animation(
        "ngpt-race", "The race on text that neither trains on", _labels(steps, r["about"]["steps"]), [losses, apart],
        [words(*x) for x in zip(read, gpt, ngpt)],
        "Held-out loss of GPT and nGPT against the text that they have read, and the difference of the two.",
        SOURCE + ", rates tuned for each", 11,
    )  # fmt: skip


# ---- chapter 6 -------------------------------------------------------------------------------------------------------
EVERY = 4  # of the rows, so that paths can be told apart
RIM = 75.0


def _paths(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row on a map around its own start: (x, y), both [frames, rows], in degrees from the center.

    The start, the end and the row at a frame are a triangle of known sides; the spherical law of cosines gives its angle
    at the start. So the distances from the start (the center) and from the end are both true. The ends point in all directions.
    """
    a, b, c = np.radians(start), np.radians(end), np.radians(start[-1])
    cosine = (np.cos(b) - np.cos(a) * np.cos(c)) / np.maximum(np.sin(a) * np.sin(c), 1e-9)
    bearing = np.where(start > 0.1, np.arccos(cosine.clip(-1, 1)), np.pi / 2) + 2 * np.pi * np.arange(len(c)) / len(c)
    return start * np.cos(bearing), start * np.sin(bearing)


def rows() -> Animation:
    r = run()
    steps, start, end, cap, turn = r["at"]["start"], r["start"], r["end"], r["cap"], r["turn"]
    xs, ys = _paths(start[:, ::EVERY], end[:, ::EVERY])
    counts = np.arange(1, len(steps) + 1)
    allowed = np.concatenate([[0.0], np.cumsum(cap)])[steps]
    side = Axis(-RIM - 4, RIM + 4)
    rings = [Ring(0, 0, [angle], "currentColor", opacity=0.25) for angle in (25, 50, RIM)]
    names = [Words(0, -q - 9, [[f"{q}°"]], size=11, anchor="middle") for q in (25, 50)]
    sphere = Panel(
        side, side,
        [
            *rings,
            Ring(0, 0, np.minimum(allowed, RIM), COLORS["gold"], width=2, fill=0.09),
            *(Curve(x, y, COLORS["blue"], counts, width=1.5, head=3.2, opacity=0.7) for x, y in zip(xs.T, ys.T)),
            *names,
        ],
        square=True, left=8, right=8, bottom=4,
    )  # fmt: skip
    ten = np.arange(0, len(turn), 10)
    most = np.array([turn[i : i + 10].max() for i in ten])
    speed = Panel(
        Axis(0, 2000, "step", (0, 500, 1000, 1500, 2000)), Axis(0, 1.15, "degrees per step", (0, 0.25, 0.5, 0.75, 1)),
        [
            Curve(np.arange(1, len(cap) + 1)[::20], cap[::20], COLORS["gold"], width=2.5, head=0),
            Words(40, 1.04, [["the cap"]], COLORS["gold"], bold=True),
            Curve(ten + 5, most, COLORS["blue"], (steps / 10).clip(0, len(ten))),
            Words(60, 0.12, [["the fastest row"]], COLORS["blue"], bold=True),
        ],
        heights=(250, 150),
    )  # fmt: skip

    def words(t: int, angles: np.ndarray) -> str:
        if t == 0:
            return "Every row is where it started."
        return (
            f"Rows are {angles.mean():.0f}° from their start on average, the farthest {angles.max():.0f}°. "
            f"In this step the fastest turned {turn[t - 1]:.3f}°; the cap is {cap[t - 1]:.3f}°."
        )

    return Animation(
        "ngpt-rows", "Rows of a matrix, seen from their start", _labels(steps, r["about"]["steps"]), [sphere, speed],
        [words(t, a) for t, a in zip(steps, start)],
        "Paths of 16 rows of a matrix away from where they started, inside a growing circle that the cap allows; beside it, "
        "the largest turn of a row in one step, and the cap.",
        NGPT, 12,
    )  # fmt: skip


# ---- chapter 3 -------------------------------------------------------------------------------------------------------
FIT_START = 200


def growth() -> Animation:
    r = lgp.small_runs()["log decay"]
    step, s_z = np.array(r["step"]), np.array(r["seen"])
    frames = np.flatnonzero((step == 1) | (step % 10 == 0))
    grid = np.geomspace(FIT_START, 1000, 12)
    fits, sentences, ahead = [], [], []
    for i in frames:
        t, y = step[: i + 1], s_z[: i + 1]
        words = f"The mean of s_z is {y[-1]:.1f}."
        if t[-1] < FIT_START + 20:
            fits.append([(t[-1], y[-1])] * len(grid))
        else:
            a, b, _ = lgp.log_fit(t, y, FIT_START)
            fits.append(list(zip(grid, a + b * np.log(grid))))
            ahead.append((t[-1], a + b * np.log(1000)))
            fit = f"{b:.1f} ln t {'−' if a < 0 else '+'} {abs(a):.1f}"
            words += f" The fit so far is {fit}: for step 1,000 it predicts {ahead[-1][1]:.1f}."
        sentences.append(words)
    lines, forecast = np.array(fits), np.array(ahead)
    before = len(frames) - len(forecast)
    top = 12.0
    curve = Panel(
        Axis(1, 1150, "step t (logarithmic)", (1, 10, 100, 1000), log=True), Axis(0, top, "mean of s_z", (0, 3, 6, 9, 12)),
        [
            Curve(step, s_z, COLORS["blue"], frames + 1),
            Shape(lines[..., 0], lines[..., 1], COLORS["gold"], width=2.2, dash="6 4"),
            Words(1.4, 0.93 * top, [["dashed: the fit from step 200 on"]], COLORS["gold"], bold=True),
        ],
        share=1.2,
    )  # fmt: skip
    predictions = Panel(
        Axis(200, 1000, "step at which the fit is made", (200, 400, 600, 800, 1000)),
        Axis(0, top, "what the fit predicts for step 1,000", (0, 3, 6, 9, 12)),
        [
            Shape([200, 1000], [s_z[-1], s_z[-1]], COLORS["blue"], width=1.5, dash="2 4"),
            Words(990, s_z[-1] - 1.1, [["what it became"]], COLORS["blue"], anchor="end"),
            Curve(*forecast.T, COLORS["gold"], np.concatenate([np.zeros(before), np.arange(1, len(forecast) + 1)])),
        ],
        heights=(250, 150),
    )  # fmt: skip
    return Animation(
        "ngpt-s_z", "s_z grows, and a logarithm is fitted", _labels(step[frames].astype(int), 1000), [curve, predictions],
        sentences,
        "The mean of s_z on a logarithmic axis of steps, with the logarithm fitted to what has been seen; beside it, the value "
        "that each fit predicts for the last step.",
        "Dense nGPT, 0.18M parameters, bytes that occur, Python source, seed 0", 10,
    )  # fmt: skip


# ---- chapter 5 -------------------------------------------------------------------------------------------------------
def spread() -> Animation:
    r = run()
    steps, share, exponent, median = r["at"]["scales"], r["share"], r["exponent"], r["median"]
    shown = exponent > -10.3
    gate = np.linspace(-10.5, -0.5, 60)
    d = 10.0**gate
    top = 0.25
    open_ = top * d**SHARPNESS / (d**SHARPNESS + EPS_GATE**SHARPNESS)
    powers = [(-10, "10⁻¹⁰"), (-8, "10⁻⁸"), (-6, "10⁻⁶"), (-4, "10⁻⁴"), (-2, "10⁻²")]
    line = _moving(median) * np.ones((1, 2))
    histogram = Panel(
        Axis(-10.5, -0.5, "√v̂ of a coordinate", powers),
        Axis(0, top, "share of coordinates", ((0, "0"), (0.1, "10%"), (0.2, "20%"))),
        [
            Bars(exponent[shown], share[:, shown], COLORS["blue"], 0.23),
            Shape(gate, open_, COLORS["gold"], width=2.5),
            Words(-2.9, 0.225, [["gate γ"]], COLORS["gold"], bold=True),
            Shape([-8, -8], [0, top], COLORS["gold"], width=1.5, dash="4 4"),
            Words(-8.1, 0.19, [["ε"]], COLORS["gold"], anchor="end", bold=True),
            Shape(line, np.array([0, top]), COLORS["red"], width=1.8),
        ],
        share=1.5,
    )  # fmt: skip
    fall = Panel(
        Axis(0, 2000, "step", (0, 1000, 2000)),
        Axis(-8.2, -3.8, "median of √v̂ (the red line)", [(-8, "ε = 10⁻⁸"), (-6, "10⁻⁶"), (-4, "10⁻⁴")]),
        [
            Shape([0, 2000], [-8, -8], COLORS["gold"], width=1.5, dash="4 4"),
            Curve(steps, median, COLORS["red"], np.arange(1, len(steps) + 1)),
        ],
        left=62, heights=(250, 140),
    )  # fmt: skip
    words = [
        f"The median is {1e6 * 10**m:.0f} millionths; the gate multiplies steps by {g:.2f} on average."
        for m, g in zip(median, r["gate"])
    ]
    return Animation(
        "ngpt-gate", "√v̂ slides toward the gate", _labels(steps, r["about"]["steps"]), [histogram, fall], words,
        "Histogram of the second-moment scale over all unit rows, moving to the left under the curve of the gate; beside it, "
        "its median over the steps.",
        NGPT, 10,
    )  # fmt: skip


# ---- chapter 8 -------------------------------------------------------------------------------------------------------
def experts() -> Animation:
    r = run()
    steps, load = r["at"]["load"], r["load"]
    panels, expert = [], np.arange(1, load.shape[2] + 1)
    for i, block in enumerate((2, 4, 7)):
        busiest = [[f"busiest: {x:.2f}"] for x in load[:, i].max(1)]
        marks = [
            Bars(expert, load[:, i], COLORS["teal"], 0.75),
            Shape([0.4, 8.6], [1, 1], COLORS["red"], width=1.5, dash="5 4"),
            Words(8.5, 2.4, busiest, anchor="end"),
        ]
        y = Axis(0, 3, f"block {block}: load / mean", (0, 1, 2, 3))
        panels.append(Panel(Axis(0.4, 8.6, "expert", tuple(expert)), y, marks, left=30, right=8, heights=(210, 100)))
    words = [f"The busiest expert gets {now.max():.1f} times its share, the idlest {now.min():.1f} times." for now in load]
    return Animation(
        "ngpt-experts", "Who gets the tokens?", _labels(steps, r["about"]["steps"]), panels, words,
        "Bars: the load of each of eight experts in three layers, as multiples of the mean, between two frames of training.",
        NGPT, 10,
    )  # fmt: skip


# ---- chapter 11 ------------------------------------------------------------------------------------------------------
COLUMNS, LINES = 50, 8


def _printed(text: str) -> list[str]:
    """The text as lines of the picture: bytes that are no letters are dots, long lines wrap."""
    clean = "".join(c if c == "\n" or " " <= c <= "~" else "·" for c in text)
    lines = [line[i : i + COLUMNS] for line in clean.split("\n") for i in range(0, max(1, len(line)), COLUMNS)]
    return [line.rstrip() for line in lines[:LINES]]


def writing() -> Animation:
    r = run()
    steps = r["at"]["sample"]
    panels = []
    losses = {which: [r[which]["loss"][int(np.abs(r["at"]["loss"] - t).argmin())] for t in steps] for which in ("gpt", "ngpt")}
    for which, name, color in (("gpt", "GPT", "red"), ("ngpt", "nGPT", "blue")):
        head = [[f"{name}, held-out loss {x:.2f}"] for x in losses[which]]
        texts = [_printed(text) for text in r[which]["sample"]]
        marks = [
            Words(0, 0.98, head, COLORS[color], size=13, bold=True),
            Words(0, 0.83, texts, size=10.5, mono=True),
        ]
        panels.append(Panel(Axis(0, 1), Axis(0, 1), marks, left=4, right=4, bottom=0, heights=(150, 150)))
    words = [f"Held-out loss: GPT {a:.2f}, nGPT {b:.2f}." for a, b in zip(losses["gpt"], losses["ngpt"])]
    return Animation(
        "ngpt-writing", "What both write after “def ”", _labels(steps, r["about"]["steps"]), panels, words,
        "Text that GPT and nGPT write at 26 points of training, with the same random numbers each time.",
        SOURCE + ", temperature 0.7", 20,
    )  # fmt: skip
