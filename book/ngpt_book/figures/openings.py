"""What does a chapter open with? One small picture that carries its message, drawn before any script runs.

    python -m ngpt_book.figures.openings         (writes book/_assets/opening_*.svg; a test compares them with this file)

The numbers come from the functions and stored runs of the chapter itself. Every text is at least 15 of 480 units high, so that
a phone shows it in a readable size.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np

from ..explorer.svg import to_svg
from ..theme import COLORS, FONT
from . import hypersphere, lgp, schedules
from .architecture import INK

ASSETS = Path(__file__).parents[2] / "_assets"
WIDTH, HEIGHT = 480, 236
LEFT, RIGHT, TOP, BOTTOM = 14, 466, 26, 202  # of a plot


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "middle", size: int = 15, weight: str = "400") -> str:
    """One line of words; ``_x`` in them is a subscript of one or two letters, as in ``s_qk``."""
    name, _, low = words.partition("_")
    low = f'<tspan dy="4" font-size="{size - 4}">{escape(low)}</tspan>' if low else ""
    look = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(name)}{low}</text>'


def path(d: str, color: str = INK, width: float = 1.5, more: str = "") -> str:
    """A line."""
    return f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{width:g}" {more}/>'


def curve(x: np.ndarray, y: np.ndarray, color: str, width: float = 3, more: str = "") -> str:
    """A curve in a plot; x and y run from 0 to 1."""
    across, up = LEFT + (RIGHT - LEFT) * np.asarray(x), BOTTOM - (BOTTOM - TOP) * np.asarray(y)
    return path("M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True)), color, width, more)


def axes(across: str, up: str) -> str:
    """Two axes with their names: what grows to the right, what grows upward."""
    lines = path(f"M{LEFT},{TOP - 8}V{BOTTOM}H{RIGHT}", more='stroke-opacity=".6"')
    return lines + text(RIGHT, BOTTOM + 24, across, anchor="end") + text(LEFT + 4, TOP - 10, up, anchor="start")


def walk() -> str:
    """The walk of chapter 1 with five layers, from above: the README's picture, with larger names."""
    arrays = {key: np.asarray(value) for key, value in hypersphere.forward_pass(0.2, 0.2, 5).items()}
    figure = hypersphere.forward_pass_figure(arrays).update_layout(showlegend=False)
    globe = (
        to_svg(figure)
        .replace("currentColor", INK)
        .partition(">")[2]
        .removesuffix("</svg>")
        .replace('font-size="12"', 'font-size="16"')
    )
    names = (("the hidden state", "gold"), ("attention suggests", "teal"), ("the MLP suggests", "red"))
    labels = (text(8, 20 + 21 * i, words, COLORS[color], "start", weight="600") for i, (words, color) in enumerate(names))
    return f'<svg width="{WIDTH}" height="330" viewBox="60 78 440 355" fill="{INK}">{globe}</svg>' + "".join(labels)


def scales() -> str:
    """Three boxes beside the line of the hidden state, each with the learned scale that gives it a size."""
    line = 62
    out = [path(f"M{line},12V222", COLORS["blue"], 3)]
    out.append(text(76, 18, "the hidden state, always of length 1", COLORS["blue"], "start"))
    rows = (
        ("attention", "s_qk", "how sharply it looks", "α_A"),
        ("MLP", "s_u", "what the activation sees", "α_M"),
        ("output", "s_z", "how sure the model can be", ""),
    )
    for i, (name, scale, use, step) in enumerate(rows):
        y = 34 + 66 * i
        out.append(f'<rect x="150" y="{y}" width="316" height="50" rx="5" fill="{INK}" fill-opacity=".12" stroke="{INK}"/>')
        out.append(text(164, y + 20, name, anchor="start", weight="600"))
        out.append(text(164, y + 41, use, anchor="start"))
        out.append(text(452, y + 32, scale, COLORS["magenta"], "end", 22, "600"))
        out.append(path(f"M{line},{y + 14}H148m-8,-4l8,4l-8,4"))
        if step:
            out.append(path(f"M150,{y + 38}H{line + 8}m8,-4l-8,4l8,4"))
            out.append(f'<circle cx="{line}" cy="{y + 38}" r="6" fill="{COLORS["gold"]}"/>')
            out.append(text(44, y + 44, step, COLORS["magenta"], "end", 22, "600"))
    return "".join(out)


def gradient() -> str:
    """The stored run of chapter 3: the norm of its gradient, and what plain backpropagation would have made of it."""
    run = lgp.small_runs()["log decay"]
    keep = np.array(run["step"]) >= 20
    smooth = np.ones(7) / 7  # a running mean, so that the trend is seen
    step, with_lgp, mean = (
        np.convolve(np.array(run[key], float)[keep], smooth, "valid") for key in ("step", "gradient", "mean")
    )
    without = with_lgp * mean
    low, high = np.log(with_lgp.min()), np.log(without.max())
    place = lambda y: 0.03 + 0.94 * (np.log(y) - low) / (high - low)  # noqa: E731
    return (
        axes("training step, 20 to 1,000", "length of the gradient (log scale)")
        + curve(step / 1000, place(without), COLORS["red"])
        + curve(step / 1000, place(with_lgp), COLORS["blue"], more='stroke-dasharray="9 4"')
        + text(RIGHT - 6, 86, "ordinary backpropagation", COLORS["red"], "end", weight="600")
        + text(RIGHT - 6, 160, "with LGP", COLORS["blue"], "end", weight="600")
    )


def decay() -> str:
    """The schedules of chapter 4 from the same peak, without a warmup."""
    r = np.linspace(0, 1, 121)
    eta = {name: plan(r) for name, plan in schedules.family(rho=0.05).items()}
    dashes = {"log": "", "cosine": "9 4", "linear": "2 4", "WSD": "12 4 2 4"}
    names = {
        "log": (56, 172, "logarithmic decay"),
        "cosine": (186, 62, "cosine"),
        "linear": (110, 98, "linear"),
        "WSD": (404, 46, "WSD"),
    }
    out = axes("share of training", "learning rate, as a share of its peak")
    for name, y in reversed(eta.items()):
        color = COLORS[schedules.NAMES[name]]
        out += curve(r, y, color, 4 if name == "log" else 2.5, f'stroke-dasharray="{dashes[name]}"' if dashes[name] else "")
        x, up, words = names[name]
        out += text(x, up, words, color, "start", weight="600")
    return out


PICTURES: dict[str, tuple[Callable[[], str], str]] = {
    "opening_walk": (walk, "A hidden state walks on the sphere from is towards beautiful, in small steps."),
    "opening_scaling": (scales, "The hidden state runs past attention, MLP and output layer; each has a learned scale."),
    "opening_lgp": (gradient, "The gradient grows under ordinary backpropagation and shrinks slowly with LGP."),
    "opening_decay": (decay, "Logarithmic decay falls at once and has a long tail; cosine, linear and WSD fall later."),
}


def drawn(name: str) -> str:
    """A picture as SVG."""
    draw, alt = PICTURES[name]
    height = 330 if draw is walk else HEIGHT
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    look = f'font-family="{escape(FONT)}" role="img" aria-label="{escape(alt)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{draw()}</svg>\n'


if __name__ == "__main__":
    for name in PICTURES:
        (ASSETS / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(f"wrote {ASSETS / name}.svg")
