"""What does chapter 5 draw? The gate over the second-moment scale, one coordinate over time, and a real run under the gate."""

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from ngpt_core.optim.algorithm import adaptive, gate, gated

from ..theme import COLORS, powers

SCALES = np.geomspace(1e-16, 1e-2, 141)  # sqrt(v_hat)


def _curve(color: str, dash: str = "solid") -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 2.5, "dash": dash}}


def _thin(color: str) -> dict:
    return {"mode": "lines", "line": {"color": COLORS[color], "width": 1.3, "dash": "dot"}}


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate_curves(a: float, eps_gate: float, eps_num: float) -> dict:
    """The gate, and the step of a coordinate with m_hat = sqrt(v_hat), in units of the learning rate."""
    s = torch.tensor(SCALES)
    d = s + eps_num  # alg. 1, line 8
    return {
        "gate": gate(d, a, eps_gate),
        "adam": gate(s, 1.0, 1e-8),  # AdamW's own epsilon, seen as a gate
        "step": gated(s, d, a, eps_gate),
        "adam_step": gated(s, s, 1.0, 1e-8),
        "middle": gate(torch.tensor(1e-9 + eps_num, dtype=torch.float64), a, eps_gate),
        "threshold": torch.tensor([eps_gate, eps_gate]),
    }


def gate_curves_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    figure.add_scatter(x=SCALES, y=v["adam"], name="AdamW, ε = 1e-8", **_curve("grey", "dash"), row=1, col=1)
    figure.add_scatter(x=SCALES, y=v["gate"], name="GatedAdamW", **_curve("blue"), row=1, col=1)
    figure.add_scatter(x=v["threshold"], y=[0, 1.02], name="ε<sub>gate</sub>", **_curve("magenta", "dot"), row=1, col=1)
    figure.add_scatter(x=SCALES, y=v["adam_step"], showlegend=False, **_curve("grey", "dash"), row=2, col=1)
    figure.add_scatter(x=SCALES, y=v["step"], showlegend=False, **_curve("blue"), row=2, col=1)
    figure.update_xaxes(type="log", range=[-16.1, -1.6], **powers(-16, -14, -12, -10, -8, -6, -4, -2))
    figure.update_xaxes(title="√v̂, the scale of a coordinate's gradient", row=2, col=1)
    figure.update_yaxes(title="gate γ", range=[0, 1.03], row=1, col=1)
    figure.update_yaxes(title="step / lr", type="log", range=[-6.2, 0.3], **powers(-6, -4, -2, 0), row=2, col=1)
    figure.update_layout(height=520)
    return figure


MEDIANS = {"7B": 2.1e-9, "30B": 1.0e-9}  # of sqrt(v_hat) at the end of training: the paper, section 4.2


def hidden_gate_figure() -> go.Figure:
    """AdamW's epsilon, drawn as a gate, and where the paper's large models are under it at the end of training."""
    figure = go.Figure()
    shown = SCALES[(SCALES > 0.9e-14) & (SCALES < 1.1e-3)]
    hidden = gate(torch.tensor(shown), 1.0, 1e-8)
    figure.add_scatter(x=shown, y=hidden, name="AdamW's hidden gate, ε = 10<sup>−8</sup>", **_curve("blue"))
    for name, x in MEDIANS.items():
        dot = {"size": 11, "color": COLORS["magenta" if name == "30B" else "teal"]}
        y = gate(torch.tensor([x], dtype=torch.float64), 1.0, 1e-8)
        figure.add_scatter(x=[x], y=y, name=f"median coordinate, {name}", mode="markers", marker=dot)
    font = {"size": 13}
    for exponent, y, text in ((-11.6, 0.08, "shut"), (-5.2, 0.92, "open")):
        figure.add_annotation(x=exponent, y=y, text=text, font=font, showarrow=False)
    figure.update_xaxes(type="log", range=[-14.1, -2.9], **powers(-14, -12, -10, -8, -6, -4))
    figure.update_xaxes(title="√v̂, the size of a coordinate's gradients")
    figure.update_yaxes(title="share of the step", range=[-0.03, 1.06], tickvals=[0, 0.5, 1])
    figure.update_layout(height=340)
    return figure


# ---- one coordinate, sixty steps -------------------------------------------------------------------------------------

STEPS = 60


def coordinate_life(log_g: float, noise: float, a: float) -> dict:
    """Distance traveled in units of lr by one coordinate with gradients 10^log_g (1 + noise * N(0,1)), betas 0.975."""
    draw = torch.Generator().manual_seed(7)
    g = 10.0**log_g * (1 + noise * torch.randn(STEPS, generator=draw, dtype=torch.float64))
    beta, m, v = 0.975, [0.0], [0.0]
    for gradient in g.tolist():
        m.append(beta * m[-1] + (1 - beta) * gradient)  # alg. 1, line 4
        v.append(beta * v[-1] + (1 - beta) * gradient**2)  # alg. 1, line 5
    moments = torch.tensor(m[1:], dtype=torch.float64), torch.tensor(v[1:], dtype=torch.float64)
    t = torch.arange(1, STEPS + 1, dtype=torch.float64)
    steps = {
        "gated": adaptive(*moments, t, beta, beta, 1e-8, 1e-14, a)[0],
        "adam": adaptive(*moments, t, beta, beta, 1e-8, 0.0, 1.0)[0],
    }
    path = {name: np.append(0.0, step.cumsum(0).numpy()) for name, step in steps.items()}
    return {**path, "ratio": path["gated"][-1] / path["adam"][-1]}


def coordinate_life_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    t = np.arange(STEPS + 1)
    figure.add_scatter(x=t, y=v["adam"], name="AdamW, ε = 1e-8", **_curve("grey", "dash"))
    figure.add_scatter(x=t, y=v["gated"], name="GatedAdamW", **_curve("blue"))
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="distance / lr", range=[-3, 62])
    return figure


# ---- the gate over a real run's second moments -----------------------------------------------------------------------


def median(edges: list[float], counts: list[int]) -> float:
    """The median of sqrt(v_hat) from its histogram over log10, interpolated inside its bin."""
    below = np.cumsum(counts[:-1])  # what lies below each edge
    return float(10 ** np.interp(sum(counts) / 2, below, edges))


def histogram_figure(edges: list[float], runs: dict[str, list[int]]) -> go.Figure:
    """Counts of log10 sqrt(v_hat) from ``Diagnostics`` for some runs (left axis), and the gate for two a (right axis)."""
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    ends = 10 ** np.repeat(edges, 2)[1:-1]  # a bin is a level between its two edges
    for (name, counts), color in zip(runs.items(), ("teal", "blue", "gold"), strict=False):
        level = np.array(counts[1:-1], dtype=float)
        level[level == 0] = np.nan
        figure.add_scatter(x=ends, y=np.repeat(level, 2), name=name, **_curve(color))
        middle = median(edges, counts)
        figure.add_scatter(x=[middle] * 2, y=[0, 1.03], showlegend=False, hoverinfo="skip", **_thin(color), secondary_y=True)
    for a, color in ((0.5, "magenta"), (1.0, "red")):
        y = gate(torch.tensor(SCALES) + 1e-14, a, 1e-8)
        figure.add_scatter(x=SCALES, y=y, name=f"gate, a = {a:g}", **_curve(color, "dash"), secondary_y=True)
    marks = {"name": "ε<sub>num</sub>, ε<sub>gate</sub>", "hoverinfo": "x", **_thin("grey")}
    for x in (1e-14, 1e-8):
        figure.add_scatter(x=[x, x], y=[0, 1.03], showlegend=x == 1e-8, **marks, secondary_y=True)
    figure.update_xaxes(type="log", title="√v̂", range=[-15, -1], **powers(-14, -11, -8, -5, -2))
    figure.update_yaxes(type="log", title="coordinates", range=[-0.1, 5.2], **powers(*range(6)), secondary_y=False)
    figure.update_yaxes(title="gate γ", range=[0, 1.03], tickvals=[0, 0.25, 0.5, 0.75, 1], showgrid=False, secondary_y=True)
    return figure
