"""What does chapter 8 draw? The scan's decay matrix, SiLU's inputs under s_mamba, a router under s_moe, and its bias at work.

Symbols: T tokens, d d_model, E experts, k chosen of them; L_ts = a_{s+1} ... a_t the decay between tokens s < t.
"""

import math
from collections.abc import Callable
from functools import wraps

import numpy as np
import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from plotly.subplots import make_subplots
from torch import Tensor

from ngpt_core import sphere
from ngpt_core.config import ModelConfig
from ngpt_core.nn.moe import Router
from ngpt_core.nn.ssd import ssd_chunked, ssd_recurrent

from ..theme import COLORS


def _line(color: str, dash: str = "solid") -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 2.5, "dash": dash}}


# ---- the scan as a matrix --------------------------------------------------------------------------------------------

TOKENS, BURST = 16, 6


def decay_matrix(dt: Tensor, A: float) -> Tensor:
    """L [T, T] for one head: the scan of unit impulses with B = C = 1, each divided by its dt."""
    return scan_matrix(dt, A) / dt


def with_gradient(decay: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor | None]:
    """``decay`` with an extra row below its matrix: the gradient of the sum of the entries with respect to dt."""

    @wraps(decay)
    def both(dt: Tensor, A: float) -> Tensor | None:
        dt = dt.clone().requires_grad_()
        L = decay(dt, A)
        return L if L is None else torch.vstack([L.detach(), *torch.autograd.grad(L.sum(), dt)])

    return both


def scan_matrix(dt: Tensor, A: float, chunk: int | None = None) -> Tensor:
    """M with y = M x for B = C = 1, column by column: channel s of the head carries an impulse at token s."""
    T = len(dt)
    x, ones = torch.eye(T, dtype=dt.dtype).view(1, T, 1, T), torch.ones(1, T, 1, 1, dtype=dt.dtype)
    arguments = x, dt.view(1, T, 1), torch.tensor([A], dtype=dt.dtype), ones, ones
    y, _ = ssd_recurrent(*arguments) if chunk is None else ssd_chunked(*arguments, chunk=chunk)
    return y[0, :, 0]


def decay(A: float, dt: float, burst: float, chunk: int) -> dict:
    """The decay matrix of 16 tokens, and the part that reaches a token through the state at the start of its chunk."""
    steps = torch.full((TOKENS,), dt, dtype=torch.float64)
    steps[BURST] *= burst
    L = decay_matrix(steps, -A)
    of = torch.arange(TOKENS) // chunk
    below = torch.ones(TOKENS, TOKENS).tril().bool()
    through = below & (of[:, None] != of)
    return {
        "L": torch.where(below, L, torch.nan),
        "state": torch.where(through, L, torch.nan),
        "a": math.exp(-A * dt),
        "half": math.log(2) / (A * dt),
        "states": TOKENS // chunk - 1,
    }


def decay_figure(v: dict) -> go.Figure:
    titles = ["L", "its part through states"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.06, shared_yaxes=True, subplot_titles=titles)
    t = np.arange(1, TOKENS + 1)
    for col, key in ((1, "L"), (2, "state")):
        figure.add_heatmap(x=t, y=t, z=v[key], zmin=0, zmax=1, showscale=col == 2, xgap=1, ygap=1, row=1, col=col)
    figure.update_yaxes(autorange="reversed", dtick=4, showgrid=False)
    figure.update_yaxes(title="read at token t", row=1, col=1)
    figure.update_xaxes(title="written at s", dtick=4, showgrid=False)
    return figure


# ---- what SiLU sees --------------------------------------------------------------------------------------------------

INPUTS = np.linspace(-4, 4, 161)
BEND = 2 * math.atanh(0.1)  # |x| below this: SiLU(x) is within 10% of the line x/2


def cosine_density(c: np.ndarray, d: int) -> np.ndarray:
    """The density of the cosine between a unit vector and a random one in d dimensions."""
    constant = math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)
    return constant * np.clip(1 - c**2, 0, None) ** ((d - 3) / 2)


def silu_inputs(s_mamba: float, d: int) -> dict:
    """SiLU's inputs s_mamba * cosine for random unit rows: density (peak 1), size, and the share in SiLU's nonlinear range."""
    density = cosine_density(INPUTS / s_mamba, d)
    c = np.linspace(-1, 1, 40001)
    p = cosine_density(c, d)
    linear = p[np.abs(s_mamba * c) < BEND].sum() / p.sum()
    return {"density": density / density.max(), "std": s_mamba / math.sqrt(d), "linear": 100 * linear}


def silu_inputs_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.55, 0.45])
    figure.add_scatter(x=INPUTS, y=F.silu(torch.tensor(INPUTS)), name="SiLU", **_line("red"), row=1, col=1)
    figure.add_scatter(x=INPUTS, y=INPUTS / 2, name="x/2", **_line("grey", "dash"), row=1, col=1)
    figure.add_scatter(x=INPUTS, y=v["density"], name="its inputs", fill="tozeroy", **_line("blue"), row=2, col=1)
    figure.add_vrect(x0=-BEND, x1=BEND, fillcolor=COLORS["grey"], opacity=0.25, line_width=0)
    figure.update_yaxes(title="SiLU(x)", range=[-2.1, 4.1], row=1, col=1)
    figure.update_yaxes(title="density", range=[0, 1.08], showticklabels=False, ticks="", row=2, col=1)
    figure.update_xaxes(title="x = s<sub>mamba</sub> · cosine", range=[-4, 4], row=2, col=1)
    figure.update_layout(height=480)
    return figure


# ---- a router --------------------------------------------------------------------------------------------------------


def router(E: int, d: int, k: int, rate: float = 1e-3) -> Router:
    """The package's router with E unit rows drawn by a fixed seed, and weights that sum to 1."""
    config = ModelConfig(
        vocab_size=256, d_model=d, pattern="E", n_experts=E, top_k=k, expert_ff=1, routed_scaling=1.0, router_bias_rate=rate
    )
    made = Router(config)
    with torch.no_grad():
        made.weight.copy_(sphere.random(E, d, generator=torch.Generator().manual_seed(1)))
    return made


EDGES = np.linspace(0, 1, 51)
MOST = 8


def router_scores(ratio: float, k: int, d: int = 256, E: int = 128) -> dict:
    """Scores of 128 experts for random tokens at s_moe = ratio * sqrt(d), and the weights of the chosen, largest first."""
    h = sphere.random(1, 256, d, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        scores, _, weights = router(E, d, k)(ratio * math.sqrt(d) * h)
    share = np.histogram(scores.numpy(), EDGES)[0] / scores.numel()
    ranked = weights[0].sort(-1, descending=True).values.mean(0).numpy()
    return {
        "share": share / share.max(),
        "weights": np.pad(k * ranked, (0, MOST - k), constant_values=np.nan),
        "low": scores.quantile(0.05),
        "high": scores.quantile(0.95),
        "times": ranked[0] / ranked[-1],
    }


def router_scores_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.22)
    middle = (EDGES[1:] + EDGES[:-1]) / 2
    figure.add_bar(x=middle, y=v["share"], name="scores", marker_color=COLORS["blue"], width=0.018, row=1, col=1)
    figure.add_bar(x=list(range(1, MOST + 1)), y=v["weights"], name="weights", marker_color=COLORS["red"], row=2, col=1)
    figure.add_scatter(x=[0.5, MOST + 0.5], y=[1, 1], name="equal weights", **_line("grey", "dash"), row=2, col=1)
    figure.update_xaxes(title="score σ(s<sub>moe</sub> · cosine)", range=[0, 1], row=1, col=1)
    figure.update_xaxes(title="chosen experts, largest weight first", dtick=1, row=2, col=1)
    figure.update_yaxes(title="share", showticklabels=False, ticks="", range=[0, 1.08], row=1, col=1)
    figure.update_yaxes(title="k × mean weight", range=[0, 1.2], row=2, col=1)
    figure.update_layout(height=500)
    return figure


# ---- its bias at work ------------------------------------------------------------------------------------------------

STEPS, BATCH, BUSY, WIDTH = 160, 128, 8, 32


def balancing(rate: float, skew: float) -> dict:
    """Load of 8 experts (2 chosen) over 160 steps, as multiples of the mean: tokens lean toward one direction by ``skew``."""
    draw = torch.Generator().manual_seed(4)
    made, lean = router(BUSY, WIDTH, 2, rate), sphere.random(WIDTH, generator=draw)
    loads = []
    for _ in range(STEPS):
        h = sphere.unit(sphere.random(1, BATCH, WIDTH, generator=draw) + skew * lean)
        with torch.no_grad():
            _, chosen, _ = made(0.5 * math.sqrt(WIDTH) * h)  # item 6's s_moe
        load = torch.bincount(chosen.flatten(), minlength=BUSY).double()
        made.update(load)
        loads.append(load / load.mean())
    load = torch.stack(loads, 1)
    smooth = F.avg_pool1d(F.pad(load[None], (4, 4), mode="replicate"), 9, 1)[0]  # the eye's average, over nine steps
    first, last = load[:, :20], load[:, -20:]
    return {"load": smooth, "first": first.mean(1).max(), "last": last.mean(1).max(), "single": last.max()}


def _expert(i: int) -> dict:
    line = {"color": list(COLORS.values())[i % 6], "width": 2, "dash": "solid" if i < 6 else "dot"}
    return {"name": f"expert {i + 1}", "mode": "lines", "line": line, "showlegend": False}


def balancing_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    t = np.arange(1, STEPS + 1)
    for i in range(BUSY):
        figure.add_scatter(x=t, y=v["load"][i], **_expert(i))
    figure.add_scatter(x=[1, STEPS], y=[1, 1], name="equal load", **_line("grey", "dash"))
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="load / mean, nine steps", range=[0, 4.1])
    return figure


def loads_figure(loads: Tensor) -> go.Figure:
    """Loads [steps, layers, E] of a run, as multiples of the mean: one panel per layer."""
    steps, layers, E = loads.shape
    t = np.arange(1, steps + 1)
    share = loads / loads.mean(-1, keepdim=True)
    titles = [f"layer {layer + 1}" for layer in range(layers)]
    figure = make_subplots(rows=1, cols=layers, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    for layer in range(layers):
        for i in range(E):
            figure.add_scatter(x=t, y=share[:, layer, i], **_expert(i), row=1, col=layer + 1)
        equal = {"name": "equal load", "showlegend": False, **_line("grey", "dash")}
        figure.add_scatter(x=[1, steps], y=[1, 1], **equal, row=1, col=layer + 1)
        figure.update_xaxes(title="step", row=1, col=layer + 1)
    figure.update_yaxes(title="load / mean", row=1, col=1, rangemode="tozero")
    return figure


def inputs_figure(before: Tensor, after: Tensor) -> go.Figure:
    """Histograms of SiLU's inputs before and after some training."""
    figure = go.Figure()
    edges = np.linspace(-4, 4, 81)
    for values, name, color in ((before, "at the start", "gold"), (after, "after the run", "blue")):
        share = np.histogram(values.numpy(), edges, density=True)[0]
        figure.add_scatter(x=(edges[1:] + edges[:-1]) / 2, y=share, name=name, fill="tozeroy", **_line(color))
    figure.add_vrect(x0=-BEND, x1=BEND, fillcolor=COLORS["grey"], opacity=0.25, line_width=0)
    figure.update_xaxes(title="input of SiLU in the gate z", range=[-4, 4])
    figure.update_yaxes(title="density", rangemode="tozero")
    return figure
