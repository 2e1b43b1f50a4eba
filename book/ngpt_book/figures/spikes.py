"""What does chapter 7 draw? A gradient spike with and without growth clipping, and noise for silent coordinates."""

import math

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from ngpt_core.optim import pmen
from ngpt_core.optim.algorithm import adaptive
from ngpt_core.optim.smgc import growth_clip

from ..theme import COLORS, powers


def _line(color: str, dash: str = "solid") -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 2.5, "dash": dash}}


# ---- one spike -------------------------------------------------------------------------------------------------------

STEPS, SPIKE = 240, 80


def _moments(g: np.ndarray, beta1: float, beta2: float, R: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v after every step, with gradients clipped by SMGC from the first step with a history, or not at all."""
    m, v = [0.0], [0.0]
    for k, gradient in enumerate(g.tolist()):
        if R is not None and k > 0:
            gradient, old = torch.tensor(gradient, dtype=torch.float64), torch.tensor(v[-1], dtype=torch.float64)
            gradient = growth_clip(gradient, old, k, beta2, R).item()
        m.append(beta1 * m[-1] + (1 - beta1) * gradient)  # alg. 1, line 4
        v.append(beta2 * v[-1] + (1 - beta2) * gradient**2)  # alg. 1, line 5
    return torch.tensor(m[1:], dtype=torch.float64), torch.tensor(v[1:], dtype=torch.float64)


def spike(size: float, R: float, beta: float) -> dict:
    """One coordinate with gradients 1 + N(0, 1/4), then one of ``size`` after 80: sqrt(v_hat), and steps in units of lr."""
    g = 1 + 0.5 * np.random.default_rng(3).standard_normal(STEPS)
    g[SPIKE] = size
    t = torch.arange(1, STEPS + 1, dtype=torch.float64)
    out = {}
    for name, limit in (("free", None), ("clipped", R)):
        m, v = _moments(g, beta, beta, limit)
        step, d = adaptive(m, v, t, beta, beta, 1e-8, 1e-14, 0.5)
        out |= {f"scale_{name}": d, f"step_{name}": step}
        lost = (step[SPIKE + 1 :] < 0.5).sum().item()
        out[f"lost_{name}"] = lost
    return out


def spike_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    t = np.arange(1, STEPS + 1)
    figure.add_scatter(x=t, y=v["scale_free"], name="no clipping", **_line("grey"), row=1, col=1)
    figure.add_scatter(x=t, y=v["scale_clipped"], name="SMGC", **_line("blue"), row=1, col=1)
    figure.add_scatter(x=t, y=v["step_free"], showlegend=False, **_line("grey"), row=2, col=1)
    figure.add_scatter(x=t, y=v["step_clipped"], showlegend=False, **_line("blue"), row=2, col=1)
    figure.update_yaxes(title="√v̂", type="log", range=[-0.3, 3.2], **powers(*range(4)), row=1, col=1)
    figure.update_yaxes(title="step / lr", range=[-0.1, 1.6], row=2, col=1)
    figure.update_xaxes(title="step", row=2, col=1)
    figure.update_layout(height=480)
    return figure


# ---- noise for silent coordinates ------------------------------------------------------------------------------------

ACTIVITY = np.geomspace(1e-14, 1e-6, 161)
SHARE = np.arange(1, 101) / 100  # not 0: the axis of angles is logarithmic


def noise(tau: float, b: float, strength: float, d: int) -> dict:
    """PMEN's two profiles over the activity, and the angle by which noise alone turns a row in R^d at C = 0.24's peak rate."""
    s = torch.tensor(ACTIVITY)
    step = pmen.profile(s, pmen.PMEN(tau=tau))
    smooth = pmen.profile(s, pmen.PMEN(tau=tau, profile="smooth", b=b))
    lr, out = 0.24 / math.sqrt(d), {"step": step, "smooth": smooth}
    for reference in ("row", "adam"):
        size = pmen.amplitude(pmen.PMEN(strength=strength, reference=reference), lr, d, beta1=0.975)
        out[reference] = np.degrees(np.arctan(size * np.sqrt(SHARE * d)))  # app. D, the norm for k_j = share * d
    return {**out, "all": out["row"][-1]}


def row_noise(v: torch.Tensor, lr: float, strength: float, tau: float, xi: torch.Tensor) -> torch.Tensor:
    """What PMEN adds to a row with the second moments ``v`` and the signs ``xi``: the step profile, c = 1/sqrt(d)."""
    setting = pmen.PMEN(strength=strength, tau=tau)
    return pmen.amplitude(setting, lr, len(v), beta1=0.975) * pmen.profile(v.sqrt(), setting) * xi


def noise_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.22)
    figure.add_scatter(x=ACTIVITY, y=v["step"], name="ψ, step", **_line("blue"), row=1, col=1)
    figure.add_scatter(x=ACTIVITY, y=v["smooth"], name="ψ, smooth", **_line("teal"), row=1, col=1)
    figure.add_scatter(x=SHARE, y=v["row"], name="c = 1/√d", **_line("red"), row=2, col=1)
    figure.add_scatter(x=SHARE, y=v["adam"], name="c of Adam", **_line("gold"), row=2, col=1)
    figure.add_scatter(x=[0, 1], y=[1, 1], name="cap, 1°", **_line("magenta", "dot"), row=2, col=1)
    figure.update_xaxes(type="log", title="activity √v", range=[-14.2, -5.6], **powers(-14, -12, -10, -8, -6), row=1, col=1)
    figure.update_xaxes(title="share of the row's coordinates that are silent", range=[0, 1], row=2, col=1)
    figure.update_yaxes(title="ψ", range=[-0.03, 1.05], row=1, col=1)
    figure.update_yaxes(title="degrees per step", type="log", range=[-2.1, 2.2], **powers(*range(-2, 3)), row=2, col=1)
    figure.update_layout(height=520)
    return figure


def two_faults_figure() -> go.Figure:
    """What each safeguard is for: one gradient far above all others, and a coordinate without any gradient."""
    g, t = 1 + 0.5 * np.random.default_rng(3).standard_normal(STEPS), np.arange(1, STEPS + 1)
    g[SPIKE] = 1000
    v = _moments(g, 0.975, 0.975, 100.0)[1]
    limit = math.sqrt((100 - 0.975) / (1 - 0.975)) * v.sqrt()  # app. C, C_R: what may pass at the next step
    signs = torch.cat([pmen.signs(pmen.key(0, "silent"), step, torch.arange(1)) for step in t.tolist()])
    walk = pmen.amplitude(pmen.PMEN(), 1.0, 1024, beta1=0.975) * signs.cumsum(0)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12)
    figure.add_scatter(x=t, y=abs(g), name="gradient with a spike", **_line("grey"), row=1, col=1)
    figure.add_scatter(x=t[1:], y=limit[:-1], name="the most that SMGC lets pass", **_line("magenta"), row=1, col=1)
    figure.add_scatter(x=t, y=0 * t, name="silent coordinate", **_line("grey", "dash"), row=2, col=1)
    figure.add_scatter(x=t, y=walk, name="the same with PMEN", **_line("blue"), row=2, col=1)
    figure.update_yaxes(title="|gradient|", type="log", range=[-2.2, 3.2], **powers(-2, -1, 0, 1, 2, 3), row=1, col=1)
    figure.update_yaxes(title="position / lr", tickvals=[0, 2, 4], row=2, col=1)
    figure.update_xaxes(range=[0, STEPS + 5])
    figure.update_xaxes(title="step", row=2, col=1)
    figure.update_layout(height=420)
    return figure


# ---- two figures of runs ---------------------------------------------------------------------------------------------


def recovery_figure(without: list[float], clipped: list[float]) -> go.Figure:
    """The error over the steps of a run with one bad batch, with and without clipping."""
    figure = go.Figure()
    steps = np.arange(1, len(without) + 1)
    figure.add_scatter(x=steps, y=without, name="no clipping", **_line("grey"))
    figure.add_scatter(x=steps, y=clipped, name="SMGC, R = 100", **_line("blue"))
    figure.update_xaxes(title="step", range=[0, 1.03 * len(without)])
    figure.update_yaxes(title="squared distance", type="log", **powers(*range(-5, 3)))
    return figure


def zeros_figure(counts: dict[int, tuple[list[float], list[float]]], window: int = 20) -> go.Figure:
    """Coordinates with a gradient of exactly zero, over d, for each number of units: without noise dashed, with it solid."""
    figure = go.Figure()
    for (n, pair), color in zip(counts.items(), ("teal", "blue", "gold"), strict=True):
        for zeros, dash, strength in zip(pair, ("dash", "solid"), (0, 10), strict=True):
            mean = np.convolve(zeros, np.ones(window) / window, mode="valid")
            t = np.arange(window, len(zeros) + 1)
            figure.add_scatter(x=t, y=mean, name=f"{n} units, λ = {strength}", **_line(color, dash))
    figure.update_xaxes(title="step", range=[0, 1.03 * len(zeros)], tickvals=np.linspace(0, len(zeros), 5))
    figure.update_yaxes(title=f"zero gradients / d, mean of {window} steps", rangemode="tozero")
    figure.update_layout(legend={"entrywidth": 0.5, "entrywidthmode": "fraction"})  # pairs side by side
    return figure
