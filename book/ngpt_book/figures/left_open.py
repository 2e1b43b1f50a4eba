"""What does chapter 13 draw? The places where the paper leaves a choice: the gate's threshold, q between 0 and 1, and the first
moment of a row that turns; and what the switches did in small runs (switches.json).

Symbols: s a coordinate's scale sqrt(v_hat); phi the angle of a step; b the factor that LGP puts on a logit's gradient.
"""

import math

import numpy as np
import plotly.graph_objects as go
import torch

import ngpt_core as ng
from ngpt_core.optim.algorithm import carried

from ..data import stored
from ..theme import COLORS, powers

RUNS = stored("switches")
DIFFERENCES: dict[str, tuple[float, float]] = {name: tuple(gap) for name, gap in RUNS["difference"].items() if gap}
"""Switch -> (mean, standard deviation) of its loss minus that of the same run without it, over the seeds."""
WORDS = {  # for the picture that opens the chapter
    "eps_gate: median": "gate: opens at the median",
    "transport: parallel": "momentum turns with the row",
    "q = 0.5, positive s_z": "half of LGP: q = 0.5",
    "PMEN: tau = 0": "noise only where v = 0",
    "dt unscaled": "dt without the Mamba scale",
    "vectors s_mamba and s_moe": "vectors instead of scalars",
    "warmup: one for all, then decay": "one warmup before the decay",
}


# ---- what the switches did -------------------------------------------------------------------------------------------
def switches_figure() -> go.Figure:
    """The change of the loss for every switch but the rules of others, with the deviation over the seeds."""
    found = {name: gap for name, gap in DIFFERENCES.items() if not name.startswith("rule")}
    names = sorted(found, key=lambda name: found[name][0])
    figure = go.Figure()
    figure.add_scatter(
        x=[found[name][0] for name in names], y=names, mode="markers", marker={"size": 9, "color": COLORS["blue"]},
        error_x={"type": "data", "array": [found[name][1] for name in names], "thickness": 1.5, "color": COLORS["grey"]},
    )  # fmt: skip
    figure.add_vline(x=0, line={"color": COLORS["grey"], "width": 1, "dash": "dot"})
    figure.update_xaxes(title="rise of the loss")
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_layout(height=110 + 24 * len(names), margin={"l": 210, "t": 12}, showlegend=False)
    return figure


# ---- the gate's threshold --------------------------------------------------------------------------------------------
SCALES = np.geomspace(1e-14, 1e-2, 121)  # sqrt(v_hat)
THRESHOLDS = {"1e-8": None, "25% quantile": 0.25, "median": 0.5, "90% quantile": 0.9}


def threshold(rule: str, median: float, a: float) -> dict:
    """A tensor whose scales spread over a few decades around their median, and the gate with one of the thresholds."""
    log = (np.log10(SCALES) - math.log10(median)) / 1.2  # one standard deviation is 1.2 decades
    density = np.exp(-(log**2) / 2)
    share, quantile = density / density.sum(), THRESHOLDS[rule]
    eps = 1e-8 if quantile is None else float(SCALES[np.searchsorted(share.cumsum(), quantile)])
    gate = ng.gate(torch.tensor(SCALES), a, eps).numpy()
    return {
        "density": density, "gate": gate, "eps_x": np.array([eps, eps]),
        "mean": float((share * gate).sum()), "open": 100 * float(share[gate > 0.9].sum()),
    }  # fmt: skip


def threshold_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(
        x=SCALES, y=v["density"], mode="lines", name="coordinates", fill="tozeroy", line={"color": COLORS["grey"], "width": 2}
    )
    figure.add_scatter(x=SCALES, y=v["gate"], mode="lines", name="gate", line={"color": COLORS["blue"], "width": 2.5})
    figure.add_scatter(
        x=v["eps_x"], y=[0, 1], mode="lines", name="threshold", line={"color": COLORS["red"], "width": 1.5, "dash": "dash"}
    )
    figure.update_xaxes(title="√v̂", type="log", range=[-14.2, -1.8], **powers(-14, -12, -10, -8, -6, -4, -2))
    figure.update_yaxes(title="gate; coordinates, relative", range=[0, 1.05])
    return figure


# ---- q between 0 and 1 -----------------------------------------------------------------------------------------------
TOKENS = 200


def factors(q: float, form: str, spread: float) -> torch.Tensor:
    """The factor on each logit's gradient, read off the backward pass: s_z spreads around 10 by a factor of ``spread``."""
    place = torch.special.ndtri((torch.arange(TOKENS, dtype=torch.float64) + 0.5) / TOKENS)
    s_z, u = 10 * torch.exp(math.log(spread) * place), torch.zeros(TOKENS, dtype=torch.float64, requires_grad=True)
    ng.logit_scale(u, s_z, q, form).sum().backward()
    assert u.grad is not None
    return u.grad


def powers_of_s_z(q: float, spread: float) -> dict:
    """Both forms of LGP for one q."""
    ratio, power = (factors(q, form, spread) for form in ("ratio", "power"))
    return {"ratio": ratio, "power": power, "mean_ratio": ratio.mean(), "mean_power": power.mean(), "most": power.max()}


def powers_figure(v: dict) -> go.Figure:
    figure, x = go.Figure(), (np.arange(TOKENS) + 0.5) / TOKENS * 100
    forms = (("ratio, then power", "ratio", "blue", "solid"), ("power, then mean", "power", "gold", "dash"))
    for name, key, color, dash in forms:
        figure.add_scatter(x=x, y=v[key], mode="lines", name=name, line={"color": COLORS[color], "width": 2.5, "dash": dash})
    figure.add_hline(y=1, line={"color": COLORS["grey"], "width": 1, "dash": "dot"})
    figure.update_xaxes(title="tokens, sorted by s<sub>z</sub>, percent")
    figure.update_yaxes(title="factor on the gradient", range=[0, 4])
    return figure


# ---- the first moment of a row that turns ----------------------------------------------------------------------------
STEPS = 240
WAYS = {"not transported": None, "projected": "project", "transported": "parallel"}


def turning(angle: float, beta: float) -> dict:
    """A row that turns by the same angle in the same direction at every step: how much of its first moment still points that
    way. The gradients all have length one and lie along the path."""
    phi, out = math.radians(angle), {}
    at = lambda t: torch.tensor([math.cos(phi * t), math.sin(phi * t)], dtype=torch.float64)  # noqa: E731
    along = lambda t: torch.tensor([-math.sin(phi * t), math.cos(phi * t)], dtype=torch.float64)  # noqa: E731
    for name, way in WAYS.items():
        m, share, lean = torch.zeros(2, dtype=torch.float64), [], 0.0
        for t in range(STEPS):
            m = beta * m + (1 - beta) * along(t)
            share.append(float(m @ along(t)) / (1 - beta ** (t + 1)))
            lean = math.degrees(math.atan2(float(m @ at(t)), float(m @ along(t))))
            if way is not None:
                w, new = at(t), at(t + 1)
                dot = lambda a, b: (a * b).sum(-1, keepdim=True)  # noqa: E731
                m = carried(m, w, new, dot(w, m), dot(new, m), dot(w, new), dot(w, w), way)
        out |= {name.replace(" ", "_"): np.array(share), f"lean_{name.replace(' ', '_')}": lean}
    return {**out, "left": 100 * out["not_transported"][-1]}


def turning_figure(v: dict) -> go.Figure:
    figure, t = go.Figure(), np.arange(1, STEPS + 1)
    for name, color, dash in zip(WAYS, ("red", "gold", "blue"), ("solid", "dash", "dot"), strict=True):
        figure.add_scatter(
            x=t, y=v[name.replace(" ", "_")], mode="lines", name=name, line={"color": COLORS[color], "width": 2.5, "dash": dash}
        )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="share of the moment along the path", range=[0, 1.08])
    return figure
