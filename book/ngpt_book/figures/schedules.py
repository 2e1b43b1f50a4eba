"""What does chapter 4 draw? Schedules, how they spend their area, the recipe's warmups, and a noisy problem on the sphere.

eta    the schedule multiplier of section 2.2, a function of the progress r in [0, 1]
rho    the shape of logarithmic decay
area   the integral of eta over r; matched: scaled by a constant so that it has cosine's (figure 3)
"""

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from ngpt_core import sphere
from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.schedule import Schedule, cosine, linear, log_decay, match_auc, warmup_before, wsd

from ..theme import COLORS

NAMES = {"log": "blue", "cosine": "red", "linear": "teal", "WSD": "gold"}
R = np.linspace(0, 1, 161)
RHO = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]


def family(rho: float) -> dict[str, Callable]:
    """The four schedules of this chapter, each a function of r that starts at 1."""
    return {"log": partial(log_decay, rho=rho), "cosine": cosine, "linear": linear, "WSD": wsd}


def _line(name: str, width: float = 2.0, dash: str = "solid") -> dict:
    dash = {"cosine": "dash", "linear": "dashdot"}.get(name, dash)  # red beside gold, teal beside blue: the colors are not all
    return {"color": COLORS[NAMES[name]], "width": 3 if name == "log" else width, "dash": dash}


# ---- figure 3 ----------------------------------------------------------------------------------------------------------


@cache
def matched(name: str, rho: float, warmup: float) -> Callable:
    """A schedule after a warmup over ``warmup`` percent, scaled to the area of cosine after the same warmup."""
    return match_auc(*(warmup_before(eta, warmup / 100) for eta in (family(rho)[name], cosine)))


def compare(rho: float, warmup: float, area: str) -> dict:
    """The four schedules with a linear warmup, as they are ("own") or with cosine's area ("cosine's")."""
    out = {}
    for name in NAMES:
        eta = matched(name, rho if name == "log" else 1.0, warmup)
        scale = 1.0 if area == "cosine's" else 1 / eta.scale
        out[name], out[f"{name}_middle"] = scale * eta(R), scale * eta(0.5)
        out[f"{name}_peak"] = scale * eta(warmup / 100)
    return out


def compare_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for name in reversed(NAMES):
        figure.add_scatter(
            x=R, y=v[name], name=name, mode="lines", line=_line(name), hovertemplate=f"{name} %{{y:.2f}}<extra></extra>"
        )
    figure.update_xaxes(title="share of training", range=[0, 1])
    figure.update_yaxes(title="multiplier η", range=[0, 3.6])
    figure.update_layout(legend={"traceorder": "reversed"})
    return figure


# ---- how the area is spent ---------------------------------------------------------------------------------------------

FINE = np.append(0, np.geomspace(1e-7, 1, 1500))  # dense where a small rho is steep


def cumulative(eta: Callable) -> np.ndarray:
    """The share of a schedule's area that is spent by each r of ``FINE``."""
    y = eta(FINE)
    spent = np.append(0, np.cumsum((y[1:] + y[:-1]) / 2 * np.diff(FINE)))
    return spent / spent[-1]


def falls_below(eta: Callable, level: float) -> float:
    """The last r at which a falling schedule still has ``level`` times its value at 0."""
    return float(np.interp(-level * eta(0.0), -eta(FINE), FINE))


def spending(rho: float, r: float, level: float) -> dict:
    """The cumulative area of each schedule, its share at r, and when each falls below ``level`` percent of its peak."""
    out = {}
    for name, eta in family(rho).items():
        spent = cumulative(eta)
        out[name] = np.interp(R, FINE, spent)
        out[f"{name}_by"] = float(np.interp(r, FINE, spent))
        out[f"{name}_falls"] = falls_below(eta, level / 100)
        out[f"{name}_at_fall"] = float(np.interp(out[f"{name}_falls"], FINE, spent))
    by = np.array([[r, out[f"{name}_by"]] for name in NAMES])
    falls = np.array([[out[f"{name}_falls"], out[f"{name}_at_fall"]] for name in NAMES])
    return out | {"at": np.array([r, r]), "by": by, "falls": falls}


def spending_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    still = {"showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=v["at"], y=[0, 1], mode="lines", line={"color": COLORS["grey"], "dash": "dash"}, **still)
    for name in NAMES:
        label = f"{name} %{{y:.0%}}<extra></extra>"
        figure.add_scatter(x=R, y=v[name], name=name, mode="lines", line=_line(name), hovertemplate=label)
    marker = {"color": [COLORS[color] for color in NAMES.values()], "size": 10}
    figure.add_scatter(x=v["by"][:, 0], y=v["by"][:, 1], mode="markers", marker=marker, **still)
    cross = marker | {"symbol": "x", "size": 9}  # where the rate falls below the level
    figure.add_scatter(x=v["falls"][:, 0], y=v["falls"][:, 1], mode="markers", marker=cross, **still)
    figure.update_xaxes(title="share of training r", range=[0, 1])
    figure.update_yaxes(title="share of the area spent", range=[0, 1.02], tickformat=".0%")
    return figure


# ---- the recipe: decay from the first step, warmups of groups -------------------------------------------------------------

STEPS, FORMS = 200, ["the recipe's", "figure 3's"]


def groups_of_the_recipe(rho: float = 0.05, share: float = 0.1, form: str = FORMS[0], total_steps: int = STEPS) -> Schedule:
    """A Schedule over two groups with peak rate 1: rows (with a cap of 1 degree), and s_z or Mamba (with a warmup)."""
    zero = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": zero[:1], "peak_cap": math.radians(1.0)}, {"params": zero[1:], "warmup": share}], lr=1.0
    )
    warmup = "group" if form == FORMS[0] else "before"
    return Schedule(optimizer, total_steps, partial(log_decay, rho=rho), warmup, warmup_share=share, cap_warmup=share)


def recipe_rates(rho: float, share: float, form: str) -> dict:
    """lr and cap of both groups at every step, in units of their peaks (the cap in degrees)."""
    schedule = groups_of_the_recipe(rho, share / 100, form)
    values = [schedule.at(t) for t in range(1, STEPS + 1)]
    rows, warmed = np.array([v[0][0] for v in values]), np.array([v[1][0] for v in values])
    cap = np.degrees([v[0][1] for v in values])
    return {"rows": rows, "warmed": warmed, "cap": cap, "first": rows[0], "highest": warmed.max(), "sum": rows.mean()}


def recipe_rates_figure(v: dict) -> go.Figure:
    r = np.arange(1, STEPS + 1) / STEPS
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.12, row_heights=[0.68, 0.32], shared_xaxes=True)
    for key, name, color, dash in (
        ("rows", "all other groups", "blue", "solid"),
        ("warmed", "s<sub>z</sub> and Mamba", "magenta", "dash"),  # on top of the other where they agree
    ):
        line = {"color": COLORS[color], "width": 2.5, "dash": dash}
        figure.add_scatter(x=r, y=v[key], name=name, mode="lines", line=line, row=1, col=1)
    figure.add_scatter(x=r, y=v["cap"], name="cap", mode="lines", line={"color": COLORS["gold"], "width": 2.5}, row=2, col=1)
    figure.update_xaxes(range=[0, 1])
    figure.update_xaxes(title="share of training", row=2, col=1)
    figure.update_yaxes(title="lr / peak lr", range=[0, 1.03], row=1, col=1)
    figure.update_yaxes(title="cap, degrees", range=[0, 1.15], row=2, col=1)
    figure.update_layout(height=470)
    return figure


# ---- a noisy problem on the sphere ---------------------------------------------------------------------------------------

ROWS, D, T = 64, 64, 300
MEAN_RATES = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
NOISES = [0.1, 0.3, 1.0]
CURVATURE = torch.logspace(0, -2, D)  # coordinates differ by a factor of 100 in how much they matter


@cache
def noisy_run(name: str, mean_rate: float, noise: float, seed: int = 0) -> np.ndarray:
    """The loss [T] of ROWS unit vectors that GatedAdamW turns toward their targets, with noisy gradients.

    loss = 1/2 sum_i h_i (w_i - w*_i)^2; the gradient has noise of length ``noise`` added. All schedules have the same
    mean learning rate, see the same noise, and start at the same points.
    """
    eta = match_auc(family(0.05)[name], lambda r: mean_rate)
    generator = torch.Generator().manual_seed(seed)
    target, start = (sphere.random(ROWS, D, generator=generator) for _ in range(2))
    w = torch.nn.Parameter(start)
    optimizer = GatedAdamW([w], lr=1.0, unit_dim=-1)
    schedule = Schedule(optimizer, T, decay=eta)
    losses = np.empty(T)
    for t in range(T):
        w.grad = CURVATURE * (w.detach() - target) + noise / math.sqrt(D) * torch.randn(ROWS, D, generator=generator)
        optimizer.step()
        schedule.step()
        losses[t] = 0.5 * (CURVATURE * (w.detach() - target) ** 2).sum(-1).mean().item()
    return losses


def noisy(mean_rate: float, noise: float) -> dict:
    """Loss over time of the four schedules at one budget, and their final losses over all budgets."""
    out = {name: noisy_run(name, mean_rate, noise)[::3] for name in NAMES}
    ends = {name: np.array([noisy_run(name, rate, noise)[-1] for rate in MEAN_RATES]) for name in NAMES}
    i = MEAN_RATES.index(mean_rate)
    out |= {f"{name}_ends": end for name, end in ends.items()} | {f"{name}_end": end[i] for name, end in ends.items()}
    all_ends = np.concatenate(list(ends.values()))
    return out | {"here": np.full(2, mean_rate), "span": np.array([0.9 * all_ends.min(), 1.1 * all_ends.max()])}


def noisy_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2)
    t = np.arange(1, T + 1)[::3]
    for name in NAMES:
        label = f"{name} %{{y:.4f}}<extra></extra>"
        figure.add_scatter(x=t, y=v[name], name=name, mode="lines", line=_line(name), hovertemplate=label, row=1, col=1)
        ends = {"mode": "lines+markers", "line": _line(name), "showlegend": False, "hovertemplate": label}
        figure.add_scatter(x=MEAN_RATES, y=v[f"{name}_ends"], **ends, row=2, col=1)
    dashed = {"color": COLORS["grey"], "dash": "dash"}
    figure.add_scatter(x=v["here"], y=v["span"], mode="lines", line=dashed, showlegend=False, hoverinfo="skip", row=2, col=1)
    figure.update_xaxes(title="step", range=[0, T + 8], tickvals=[0, 100, 200, 300], row=1, col=1)
    figure.update_xaxes(title="mean learning rate", type="log", tickvals=MEAN_RATES, row=2, col=1)
    ticks = [m * 10.0**k for k in (-4, -3, -2, -1) for m in (1, 2, 5)]
    figure.update_yaxes(title="loss", type="log", tickvals=ticks, row=1, col=1)
    figure.update_yaxes(title="final loss", type="log", tickvals=ticks, row=2, col=1)
    figure.update_layout(height=560)
    return figure
