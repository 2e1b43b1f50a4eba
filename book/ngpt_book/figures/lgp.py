"""What does chapter 3 draw? The backward scale of LGP, the multiplier that it removes, and s_z in a small run.

Symbols: s_z the logit scales; b(s_z) what replaces them in the backward pass; q the strength; t step; r = t/T.
"""

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from ngpt_core.nn.head import backward_scale
from ngpt_core.optim.schedule import log_decay

from ..data import stored
from ..theme import COLORS, powers


def _line(color: str, dash: str = "solid") -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 2.5, "dash": dash}}


# ---- b(s_z), both formulations ---------------------------------------------------------------------------------------

TOKENS = 201


def scales(mean: float, spread: float) -> torch.Tensor:
    """[201] logit scales in ascending order: the quantiles of a log-normal distribution with this mean and std of log s_z."""
    p = (torch.arange(TOKENS, dtype=torch.float64) + 0.5) / TOKENS
    s_z = torch.exp(spread * torch.special.ndtri(p))
    return mean * s_z / s_z.mean()


def backward_scales(q: float, spread: float, mean: float) -> dict:
    """The multiplier of each token's gradient: ordinary, and LGP in both formulations; thirty-odd of the 201 tokens."""
    s_z = scales(mean, spread)
    b = {form: backward_scale(s_z, q, form) for form in ("ratio", "power")}  # section 2.1, LGP
    shown = torch.linspace(0, TOKENS - 1, 33).round().long()
    return {
        "s_z": s_z[shown],
        "ordinary": s_z[shown],
        "ratio": b["ratio"][shown],
        "power": b["power"][shown],
        "mean_ratio": b["ratio"].mean(),
        "mean_power": b["power"].mean(),
        "middle": torch.tensor([mean, mean]),
    }


def backward_scales_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(x=v["s_z"], y=v["ordinary"], name="ordinary, b = s<sub>z</sub>", **_line("grey", "dash"))
    figure.add_scatter(x=v["s_z"], y=v["ratio"], name="ratio, (s/mean)<sup>q</sup>", **_line("blue"))
    figure.add_scatter(x=v["s_z"], y=v["power"], name="power, s<sup>q</sup>/mean(s<sup>q</sup>)", **_line("gold", "dot"))
    figure.add_scatter(x=v["middle"], y=[0.01, 1000], name="mean(s<sub>z</sub>)", **_line("magenta", "dash"))
    half = v["s_z"].shape[0] // 2
    for name, color in (("ordinary", "grey"), ("ratio", "blue"), ("power", "gold")):  # the median token: seen at spread 0 too
        dot = {"size": 12 if name == "ratio" else 8, "color": COLORS[color]}
        figure.add_scatter(
            x=v["s_z"][half : half + 1], y=v[name][half : half + 1], mode="markers", marker=dot, showlegend=False
        )
    figure.update_xaxes(title="a token's logit scale", type="log", range=[-1.05, 2.7], **powers(-1, 0, 1, 2))
    figure.update_yaxes(title="multiplier of its gradient", type="log", range=[-2.4, 2.7], **powers(-2, -1, 0, 1, 2))
    return figure


# ---- the hidden multiplier over training -----------------------------------------------------------------------------

STEPS, FIRST = 1_000_000, 1000
PROGRESS = np.geomspace(FIRST, STEPS, 161) / STEPS


def hidden_multiplier(start: float, slope: float, rho: float) -> dict:
    """mean(s_z) = start + slope * ln(t / 1000) from step 1000 to a million, and the effective schedule under log decay."""
    mean = start + slope * np.log(PROGRESS * STEPS / FIRST)
    eta = log_decay(PROGRESS, rho)
    product = eta * mean

    def half(curve: np.ndarray) -> float:
        """Where a curve has fallen to half of its peak for the last time, in percent of training (it ends at 0)."""
        level, last = curve.max() / 2, np.flatnonzero(curve >= curve.max() / 2)[-1]
        return 100 * np.interp(-level, -curve[last : last + 2], PROGRESS[last : last + 2])

    return {
        "mean": mean,
        "lgp": np.ones_like(mean),
        "eta": eta / eta.max(),
        "product": product / product.max(),
        "growth": mean[-1] / mean[0],
        "half_eta": half(eta),
        "half_product": half(product),
    }


def hidden_multiplier_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2)
    t = PROGRESS * STEPS
    figure.add_scatter(x=t, y=v["mean"], name="without LGP", **_line("red"), row=1, col=1)
    figure.add_scatter(x=t, y=v["lgp"], name="with LGP", **_line("blue"), row=1, col=1)
    figure.add_scatter(x=PROGRESS, y=v["product"], showlegend=False, **_line("red"), row=2, col=1)
    figure.add_scatter(x=PROGRESS, y=v["eta"], showlegend=False, **_line("blue"), row=2, col=1)
    figure.update_xaxes(title="step t", type="log", range=[2.97, 6.08], **powers(3, 4, 5, 6), row=1, col=1)
    figure.update_xaxes(title="share of training done, r", range=[0, 1], row=2, col=1)
    figure.update_yaxes(title="mean factor", range=[-3, 80], row=1, col=1)
    figure.update_yaxes(title="product / its peak", range=[0, 1.05], row=2, col=1)
    figure.update_layout(height=520)
    return figure


# ---- s_z in a small run ----------------------------------------------------------------------------------------------


def log_fit(step: list[float], mean: list[float], start: float, of=np.log) -> tuple[float, float, float]:
    """(a, b, R^2) of the least-squares line a + b ln(t) through the points with t >= start; ``of`` replaces ln."""
    t, y = np.asarray(step, float), np.asarray(mean, float)
    x, y = of(t[t >= start]), y[t >= start]
    b, a = np.polyfit(x, y, 1)
    return a, b, 1 - np.sum((y - a - b * x) ** 2) / np.sum((y - y.mean()) ** 2)


def small_runs() -> dict[str, dict]:
    """The results of data/make_lgp.py: schedule -> step, mean (of s_z), seen (its mean over bytes that occurred), ..."""
    return stored("lgp")


def run_figure(runs: dict[str, dict], start: float) -> go.Figure:
    """Mean of s_z over the bytes that occurred, against the step on a logarithmic axis, and the fits from ``start`` on."""
    figure = go.Figure()
    for (name, run), color in zip(runs.items(), ("blue", "magenta"), strict=True):
        a, b, _ = log_fit(run["step"], run["seen"], start)
        t = np.geomspace(start, run["step"][-1], 30)
        figure.add_scatter(x=run["step"], y=run["seen"], name=name, **_line(color))
        fit = {"name": f"{name}, fit", "showlegend": False, **_line("gold", "dash")}
        figure.add_scatter(x=t, y=a + b * np.log(t), **fit)
    figure.data[1].update(name=f"fits from step {start:g}", showlegend=True)
    first = runs["log decay"]
    figure.add_scatter(x=first["step"], y=first["mean"], name="log decay, all bytes", **_line("grey", "dot"))
    figure.update_xaxes(title="step t", type="log", range=[0, 3.08], **powers(0, 1, 2, 3))
    figure.update_yaxes(title="mean of s<sub>z</sub>", rangemode="tozero")
    return figure


def gradient_figure(run: dict) -> go.Figure:
    """The gradient norm of everything except s_z: with LGP, and mean(s_z) times that, as in plain backpropagation."""
    figure = go.Figure()
    g, mean = np.array(run["gradient"]), np.array(run["mean"])
    figure.add_scatter(x=run["step"], y=g * mean, name="ordinary", **_line("red"))
    figure.add_scatter(x=run["step"], y=g, name="with LGP", **_line("blue"))
    figure.update_xaxes(title="step t", range=[-10, 1040], tickvals=[0, 200, 400, 600, 800, 1000])
    figure.update_yaxes(title="norm of the gradient", type="log", tickvals=[0.02, 0.05, 0.1, 0.2, 0.5, 1])
    return figure
