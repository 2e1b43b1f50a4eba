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
from . import evidence, hypersphere, left_open, lgp, mamba_moe, planning, schedules
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


def silu() -> str:
    """SiLU, and its inputs at a width of 1,024 without s_mamba and with the recipe's."""
    x = (mamba_moe.INPUTS + 4) / 8
    y = (mamba_moe.INPUTS / (1 + np.exp(-mamba_moe.INPUTS)) + 0.6) / 4.8
    out = axes("what SiLU receives, from -4 to 4", "what SiLU gives")
    for s_mamba, color in ((1, "grey"), (16, "blue")):
        density = mamba_moe.silu_inputs(s_mamba, 1024)["density"]
        out += curve(x, 0.02 + 0.62 * density, COLORS[color], 2.5)
    out += curve(x, y, COLORS["red"], 3)
    out += text(222, 78, "without s_mamba", COLORS["grey"], "end", weight="600")
    out += text(176, 150, "with s_mamba", COLORS["blue"], "end", weight="600")
    return out + text(376, 78, "SiLU", COLORS["red"], "end", weight="600")


def experts() -> str:
    """A token between eight experts on a circle; the two nearest get it."""
    center, radius = (150, 118), 88
    place = lambda turn: (center[0] + radius * np.cos(turn), center[1] - radius * np.sin(turn))  # noqa: E731
    turns = np.radians([12, 50, 104, 141, 188, 233, 281, 322])
    token = np.radians(72)
    nearest = set(np.argsort(-np.cos(turns - token))[:2])
    tx, ty = place(token)
    out = [f'<circle cx="{center[0]}" cy="{center[1]}" r="{radius}" fill="none" stroke="{INK}" stroke-width="1.5"/>']
    for i, turn in enumerate(turns):
        (x, y), color = place(turn), COLORS["blue"] if i in nearest else INK
        if i in nearest:
            out.append(path(f"M{tx:.1f},{ty:.1f}L{x:.1f},{y:.1f}", COLORS["blue"], 3))
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{color}"/>')
    out.append(f'<circle cx="{tx:.1f}" cy="{ty:.1f}" r="9" fill="{COLORS["gold"]}"/>')
    rows = ((60, "a token", "gold"), (96, "the experts that get it:", "blue"), (116, "the nearest addresses", "blue"))
    out += [text(268, y, words, COLORS[color], "start", weight="600") for y, words, color in rows]
    return "".join(out) + text(268, 152, "the other experts", INK, "start", weight="600")


def step() -> str:
    """The order of a step."""
    names = (
        "gradient", "tangent projection", "growth clipping", "moments",
        "gate and update", "noise", "cap on the angle", "Norm",
    )  # fmt: skip
    out = []
    for i, name in enumerate(names):
        column, row = divmod(i, 4)
        x, y = 14 + 238 * column, 10 + 56 * row
        color = COLORS["blue"] if i else INK
        out.append(f'<rect x="{x}" y="{y}" width="214" height="38" rx="5" fill="{color}" fill-opacity=".14" stroke="{color}"/>')
        out.append(text(x + 107, y + 25, f"{i + 1}  {name}", size=17, weight="600"))
        if row < 3:
            out.append(path(f"M{x + 107},{y + 38}v16m-5,-7l5,7l5,-7"))
    return "".join(out) + path("M121,216v12H240V29H250m-7,-5l7,5l-7,5")


def verdict() -> str:
    """The token ratios with numbers B, in words; one line marks the paper's half, another GPT itself."""
    left, right, low, high = 236, 426, 0.45, 1.02
    across = lambda ratio: left + (right - left) * (ratio - low) / (high - low)  # noqa: E731
    groups = {"hybrid": "Hybrid models", "dense": "Dense models"}
    y, out, rows = 62, [], []
    for kind, title in groups.items():
        out.append(text(8, y, title, anchor="start", weight="600"))
        y += 22
        for f in evidence.COMPARISONS.values():
            if f["round"] and f["model"].startswith(kind):
                rows.append((y, f))
                words = f"{f['model'].split('-')[1]} parameters, {f['tokens'] / 1e6:.1f}M tokens"
                out.append(text(8, y, words, anchor="start"))
                y += 22
        y += 4
    bottom = y - 14
    for ratio, color in ((0.5, COLORS["magenta"]), (1.0, COLORS["red"])):
        out.append(path(f"M{across(ratio):.1f},44V{bottom}", color, 1.5, 'stroke-dasharray="4 3"'))
    out.append(text(across(0.5) - 8, 18, "50%: the paper's 30B", COLORS["magenta"], weight="600"))
    out.append(text(WIDTH - 4, 18, "100%: GPT", COLORS["red"], "end", weight="600"))
    out.append(text(across(0.75), 40, "← better", weight="600"))
    for at, f in rows:
        a, b, c = (across(min(f[key], high)) for key in ("low", "ratio", "high"))
        out.append(path(f"M{a:.1f},{at - 5}H{c:.1f}", COLORS["blue"], 2.5))
        out.append(f'<circle cx="{b:.1f}" cy="{at - 5}" r="6" fill="{COLORS["blue"]}"/>')
        out.append(text(WIDTH - 4, at, f"{100 * f['ratio']:.0f}%", COLORS["blue"], "end", weight="600"))
    return "".join(out) + text(WIDTH / 2, bottom + 24, "nGPT's tokens as a share of GPT's, with 95% intervals")


def best_C() -> str:
    """The hybrids' best C over the length of their runs, and the rule for a width of 64."""
    place = lambda x, lo, hi: np.log(np.asarray(x) / lo) / np.log(hi / lo)  # noqa: E731
    steps = np.geomspace(330, 16_000, 60)
    out = axes("steps of the run (log scale)", "best C (log scale)")
    out += curve(place(steps, 200, 20_000), place(evidence.rule(64, steps), 0.04, 0.32), COLORS["grey"], 3)
    for p in evidence.DATA["peaks"]:
        if p["side"] == "ngpt" and p["model"].startswith("hybrid") and p["best"]:
            x, y = place(p["steps"], 200, 20_000), place(p["best"], 0.04, 0.32)
            out += (
                f'<circle cx="{LEFT + (RIGHT - LEFT) * x:.1f}" cy="{BOTTOM - (BOTTOM - TOP) * y:.1f}" r="6.5" '
                f'fill="{COLORS["blue"]}"/>'
            )
    for number in (500, 2000, 8000):
        out += text(LEFT + (RIGHT - LEFT) * place(number, 200, 20_000), BOTTOM - 6, f"{number:,}")
    for C in (0.06, 0.12, 0.24):
        out += text(LEFT + 6, BOTTOM - (BOTTOM - TOP) * place(C, 0.04, 0.32) + 5, str(C), anchor="start")
    out += text(250, 46, "the rule, for a width of 64", COLORS["grey"], "start", weight="600")
    return out + text(250, 70, "small hybrid models", COLORS["blue"], "start", weight="600")


def silent() -> str:
    """What some of the switches changed in the small runs, in words."""
    left, right, low, high = 246, 460, -0.045, 0.1
    across = lambda gap: left + (right - left) * (gap - low) / (high - low)  # noqa: E731
    out = [path(f"M{across(0):.1f},30V222", INK, 1.5, 'stroke-dasharray="4 3"')]
    out.append(text(left, 20, "← better", anchor="start", weight="600"))
    out.append(text(right, 20, "worse →", anchor="end", weight="600"))
    for i, (name, words) in enumerate(left_open.WORDS.items()):
        y, (gap, deviation) = 50 + 28 * i, left_open.DIFFERENCES[name]
        told = abs(gap) > max(0.005, 2 * deviation)
        color = COLORS["red" if gap > 0 else "blue"] if told else COLORS["grey"]
        out.append(text(8, y, words, anchor="start"))
        out.append(path(f"M{across(0):.1f},{y - 5}H{across(gap):.1f}", color, 2.5))
        out.append(f'<circle cx="{across(gap):.1f}" cy="{y - 5}" r="6.5" fill="{color}"/>')
    return "".join(out)


KEPT = (("none", "keeps every activation"), ("selective", "keeps only products"), ("full", "keeps only the blocks' inputs"))


HELD = {"blue": ("parameters", "gradients", "moments"), "magenta": ("gathered",), "gold": ("activations", "loss")}


def memory() -> str:
    """What one of 64 GPUs holds in a step of the 30B model, for three ways to keep activations, against its memory."""
    room, out = planning.GPUS["h100-80gb"].room / planning.GIB, []

    def across(gib: float) -> float:
        return LEFT + (RIGHT - LEFT) * gib / 80

    for i, (how, words) in enumerate(KEPT):
        y, left, held = 42 + 58 * i, 0.0, planning.layout("30B", 64, 1, how, 1)
        assert held is not None
        out.append(text(LEFT, y - 6, f"{words}: {sum(held['memory'].values()):.0f} GiB", anchor="start"))
        for color, parts in HELD.items():
            size = sum(held["memory"][part] for part in parts)
            box = f'x="{across(left):.1f}" y="{y}" width="{across(size) - LEFT:.1f}" height="24"'
            out.append(f'<rect {box} fill="{COLORS[color]}"/>')
            left += size
    out.append(path(f"M{across(room):.1f},14V190", width=2.5, more='stroke-dasharray="6 4"'))
    out.append(text(across(room) - 6, 176, "what a run can use of an H100", anchor="end"))
    for x, words, color in (
        (LEFT, "weights, moments", "blue"),
        (190, "gathered weights", "magenta"),
        (352, "activations", "gold"),
    ):
        out.append(text(x, 222, words, COLORS[color], "start", weight="600"))
    return "".join(out)


PICTURES: dict[str, tuple[Callable[[], str], str]] = {
    "opening_walk": (walk, "A hidden state walks on the sphere from is towards beautiful, in small steps."),
    "opening_scaling": (scales, "The hidden state runs past attention, MLP and output layer; each has a learned scale."),
    "opening_lgp": (gradient, "The gradient grows under ordinary backpropagation and shrinks slowly with LGP."),
    "opening_decay": (decay, "Logarithmic decay falls at once and has a long tail; cosine, linear and WSD fall later."),
    "opening_mamba2": (silu, "SiLU's inputs: a narrow peak without s_mamba, wide with it."),
    "opening_experts": (experts, "A token and eight experts on a circle; the two nearest experts get the token."),
    "opening_recipe": (step, "The order of a step: gradient, projection, clipping, moments, update, noise, cap, Norm."),
    "opening_verdict": (verdict, "The share of GPT's tokens that nGPT needs in ten comparisons, with intervals."),
    "opening_scaled": (best_C, "The best C falls as runs get longer; the rule follows it."),
    "opening_memory": (memory, "The memory of one of 64 GPUs in a step of the 30B model, with three ways to keep activations."),
    "opening_open": (silent, "What some switches change in small runs: most nothing that can be seen, some a loss."),
}
HEIGHTS = {walk: 330, verdict: 348}


def drawn(name: str) -> str:
    """A picture as SVG."""
    draw, alt = PICTURES[name]
    height = HEIGHTS.get(draw, HEIGHT)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    look = f'font-family="{escape(FONT)}" role="img" aria-label="{escape(alt)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{draw()}</svg>\n'


if __name__ == "__main__":
    for name in PICTURES:
        (ASSETS / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(f"wrote {ASSETS / name}.svg")
