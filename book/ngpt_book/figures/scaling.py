"""What does chapter 2 draw? Where the scales are, attention weights, activations at an input scale, how a scale learns.

Symbols: d_k head dimension; s_qk scale of queries and keys; s_u of the inner activations; s_eff = s_a s_init / s_scale.
"""

import math
import re

import numpy as np
import plotly.graph_objects as go
import torch
import torch.nn.functional as F

from ngpt_core import sphere
from ngpt_core.nn.model import LanguageModel
from ngpt_core.nn.scale import Scale
from ngpt_core.optim.gated_adamw import GatedAdamW

from ..theme import COLORS, powers


def _line(color: str, dash: str = "solid") -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 2.5, "dash": dash}}


# ---- where the scales are --------------------------------------------------------------------------------------------

LEFT, BOX = 1.5, (3.9, 10.0)  # the state's line, and the boxes beside it
PARTS = (  # top of the box, its lines (the third is the scale's), the eigen learning rate of its step
    (9.3, ("<b>attention</b>", "Norm(q), Norm(k)", "⊙ s<sub>qk</sub>", "softmax(√d<sub>k</sub> q·k)"), "α<sub>A</sub>"),
    (6.0, ("<b>MLP</b>", "u = W<sub>up</sub> h", "⊙ s<sub>u</sub>", "activation, W<sub>down</sub>"), "α<sub>M</sub>"),
    (2.7, ("<b>output layer</b>", "cosines W h", "⊙ s<sub>z</sub>", "softmax"), ""),
)


def scales_figure() -> go.Figure:
    """The hidden state runs down the left side past an attention block, an MLP and the output layer, with every scale."""
    figure = go.Figure()

    def arrow(x: float, y: float, to: float) -> None:
        back = 0.22 if to < x else -0.22
        figure.add_scatter(
            x=[x, to, to + back, to, to + back], y=[y, y, y + 0.12, y, y - 0.12], hoverinfo="skip", mode="lines",
            line={"color": COLORS["grey"], "width": 2},
        )  # fmt: skip

    def write(x: float, y: float, text: str, color: str = "") -> None:
        font = {"size": 19, "color": COLORS[color]} if color else {"size": 14}
        text = f"<b>{text}</b>" if color else text
        figure.add_annotation(x=x, y=y, text=text, font=font, showarrow=False, xref="x", yref="y")

    figure.add_scatter(x=[LEFT, LEFT], y=[9.9, 1.5], hoverinfo="skip", **_line("blue"))
    write(LEFT, 10.2, "h, |h| = 1")
    for top, lines, alpha in PARTS:
        figure.add_shape(
            type="rect", x0=BOX[0], x1=BOX[1], y0=top - 2.5, y1=top, xref="x", yref="y", fillcolor="rgba(127,135,148,0.12)",
            line={"color": COLORS["grey"], "width": 1},
        )  # fmt: skip
        for k, words in enumerate(lines):
            write(sum(BOX) / 2, top - 0.4 - 0.58 * k, words, "magenta" if k == 2 else "")
        if alpha:
            arrow(LEFT, top - 0.4, BOX[0])
            arrow(BOX[0], top - 2.1, LEFT + 0.12)
            write((LEFT + BOX[0]) / 2, top - 1.8, "Norm")
            write(LEFT - 0.85, top - 2.1, alpha, "magenta")
    arrow(LEFT, 1.5, BOX[0])
    nodes = [top - 2.1 for top, _, alpha in PARTS if alpha]
    look = {"size": 13, "color": COLORS["gold"]}
    figure.add_scatter(x=[LEFT] * len(nodes), y=nodes, hoverinfo="skip", mode="markers", marker=look)
    figure.update_xaxes(visible=False, range=[0, 10.1], fixedrange=True)
    figure.update_yaxes(visible=False, range=[0, 10.5], fixedrange=True)
    figure.update_layout(height=500, showlegend=False, margin={"l": 8, "r": 8, "t": 8, "b": 8})
    return figure


# ---- attention weights -----------------------------------------------------------------------------------------------

KEYS = 64
SOFTMAX = {"1/√dₖ": lambda d_k: d_k**-0.5, "1": lambda d_k: 1.0, "√dₖ": lambda d_k: d_k**0.5, "dₖ": float}


def normalized_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_qk: torch.Tensor) -> torch.Tensor:
    """One head without a mask, q, k and v [T, d_k] (eqs. qkscaling1, 2, item 3): what the chapter's exercise asks for."""
    q, k = sphere.unit(q) * s_qk, sphere.unit(k) * s_qk
    return F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** 0.5)


def attention_weights(d_k: int, softmax: str, s_qk: float, match: float) -> dict:
    """One query, 63 random keys and one with the cosine ``match``; all unit vectors times s_qk (eqs. qkscaling1, 2)."""
    draw = torch.Generator().manual_seed(d_k)
    q = sphere.random(d_k, generator=draw, dtype=torch.float64)
    keys = sphere.random(KEYS, d_k, generator=draw, dtype=torch.float64)
    side = sphere.unit(sphere.tangent(keys[0], q))
    keys[0] = match * q + math.sqrt(1 - match**2) * side
    weights = torch.softmax(SOFTMAX[softmax](d_k) * (keys * s_qk) @ (q * s_qk), 0)
    return {
        "weights": torch.cat([weights[:1], weights[1:].sort(descending=True).values]),
        "entropy": torch.special.entr(weights).sum() / math.log(KEYS),  # 0 log 0 = 0
        "own": weights[0],
    }


def attention_weights_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    place = np.arange(KEYS)
    figure.add_bar(x=place, y=v["weights"], marker_color=[COLORS["blue"]] + [COLORS["grey"]] * (KEYS - 1), showlegend=False)
    figure.add_scatter(x=[-0.5, KEYS - 0.5], y=[1 / KEYS] * 2, name="all equal", **_line("magenta", "dash"))
    figure.update_xaxes(title="keys: the match, then the others by weight", range=[-1, KEYS])
    figure.update_yaxes(title="attention weight", type="log", range=[-4.1, 0.15], **powers(-4, -3, -2, -1, 0))
    return figure


# ---- what a scale does to a nonlinearity -----------------------------------------------------------------------------

SIGMAS = np.linspace(-3, 3, 61)
ACTIVATIONS = {"squared ReLU": lambda x: F.relu(x).square(), "SiLU": F.silu, "GELU": F.gelu}


def activation(name: str, d: int, multiplier: float) -> dict:
    """The activation over the inputs that it sees: cosines in d dimensions, N(0, 1/d), times a multiplier.

    Drawn in units of its size. ``bend`` is the share of its variance over these inputs that no straight line explains.
    """
    sigma = multiplier / math.sqrt(d)
    fine = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    p = torch.exp(-fine.square() / 2)
    p = p / p.sum()
    f = ACTIVATIONS[name](sigma * fine)
    mean, slope = (p * f).sum(), (p * f * fine).sum()  # the best straight line mean + slope x: x has mean 0, variance 1
    variance = (p * (f - mean).square()).sum()
    size = (p * f.square()).sum().sqrt()
    x = torch.tensor(SIGMAS)
    return {
        "curve": ACTIVATIONS[name](sigma * x) / size,
        "line": (mean + slope * x) / size,
        "bend": 100 * (1 - slope.square() / variance).clamp_min(0),
        "sigma": sigma,
    }


def activation_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(x=SIGMAS, y=v["line"], name="best straight line", **_line("grey", "dash"))
    figure.add_scatter(x=SIGMAS, y=v["curve"], name="activation", **_line("blue"))
    figure.update_xaxes(title="input, in units of its standard deviation", range=[-3, 3])
    figure.update_yaxes(title="output, in units of its size", range=[-3.2, 5.5])
    return figure


# ---- s_scale as a learning-rate dial ---------------------------------------------------------------------------------

STEPS = 60


def scale_path(s_scale: float, lr: float, s_init: float = 1.0, steps: int = STEPS, **options) -> np.ndarray:
    """s_eff over the steps of GatedAdamW on (s_eff - 3 s_init)^2 / 2 with noisy gradients: the mean of eight entries."""
    scale = Scale(8, s_init, s_scale).double()
    optimizer = GatedAdamW(scale.parameters(), lr=lr, a=1.0, **options)
    noise = torch.randn(steps, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    path = [scale().mean().item()]
    for t in range(steps):
        gradient = scale().detach() - s_init * (3 + noise[t])
        scale.weight.grad = gradient * (s_init / s_scale)  # the chain rule through s_eff
        optimizer.step()
        path.append(scale().mean().item())
    return np.array(path)


def scale_paths(s_scale: float, lr: float) -> dict:
    """The path at this s_scale, and the path at s_scale = 1 with the same lr; both with s_init = 1."""
    return {"path": scale_path(s_scale, lr), "reference": scale_path(1.0, lr), "effective": lr / s_scale}


def scale_paths_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    t = np.arange(STEPS + 1)
    figure.add_scatter(x=[0, STEPS], y=[3, 3], name="optimum", **_line("grey", "dot"))
    figure.add_scatter(x=t, y=v["reference"], name="s<sub>scale</sub> = 1", **_line("red", "dash"))
    figure.add_scatter(x=t, y=v["path"], name="this s<sub>scale</sub>", **_line("blue"))
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="s<sub>eff</sub>", range=[0, 6.5])
    return figure


# ---- through a model -------------------------------------------------------------------------------------------------


@torch.no_grad()
def walk(model: LanguageModel, tokens: torch.Tensor, norm_suggestion: bool = True, norm_state: bool = True) -> dict:
    """For each block: the length of its raw output, the angle to the suggestion and the angle that h turns (degrees), |h|.

    The two switches omit one or the other Norm of eqs. ATTNnew2 and MLPnew2.
    """
    h, kept = model.embedding(tokens), {"raw": [], "away": [], "turned": [], "length": []}
    for block in model.blocks:
        out = block.mixer(h)
        out = out[0] if isinstance(out, tuple) else out
        alpha = block.alpha().abs()
        new = h + alpha * ((sphere.unit(out) if norm_suggestion else out) - h)
        new = sphere.unit(new) if norm_state else new
        kept["raw"].append(out.norm(dim=-1).mean().item())
        kept["away"].append(math.degrees(sphere.angle(h, out - h).mean()))
        kept["turned"].append(math.degrees(sphere.angle(h, new - h).mean()))
        kept["length"].append(new.norm(dim=-1).mean().item())
        h = new
    return kept


def walk_figure(pattern: str, walks: dict[str, dict]) -> go.Figure:
    """The angle that each block turns the hidden state, for several walks."""
    figure = go.Figure()
    names = [f"{i + 1} {letter}" for i, letter in enumerate(pattern)]
    for (name, steps), color in zip(walks.items(), ("blue", "red", "teal"), strict=False):
        figure.add_bar(x=names, y=steps["turned"], name=name, marker_color=COLORS[color])
    figure.update_xaxes(title="block: M Mamba-2, E experts, * attention")
    figure.update_yaxes(title="degrees turned")
    return figure


def moved_figure(moved: dict[str, torch.Tensor]) -> go.Figure:
    """For each kind of scale its smallest entry, its largest and the mean, all in units of the initial value."""
    figure = go.Figure()
    low, mean, high = (np.array([float(f(entries)) for entries in moved.values()]) for f in (torch.min, torch.mean, torch.max))
    spread = {"type": "data", "symmetric": False, "array": high - mean, "arrayminus": mean - low, "thickness": 3, "width": 7}
    names = [{"alpha": "α"}.get(name, re.sub(r"_(.*)", r"<sub>\1</sub>", name)) for name in moved]
    figure.add_scatter(x=names, y=[1] * len(names), name="start", **_line("grey", "dash"))
    figure.add_scatter(
        x=names, y=mean, error_y=spread, name="after training", mode="markers", marker={"size": 11, "color": COLORS["blue"]}
    )
    figure.update_yaxes(title="entries / start", rangemode="tozero")
    return figure
