"""How do a run's numbers become the figures of a report? One function per figure, from ``LoggedRun`` to plotly.

s_z over time with its logarithmic fit        figure 2
histogram of sqrt(v_hat), and the gate        section 4
coordinates with zero gradient / d_model      appendix D
angle of a step against the cap               section 2.3
alpha of each block                           eqs. ATTNnew2, MLPnew2
load of the routers                           section 3.2
"""

import math

import numpy as np
import plotly.graph_objects as go
import torch

from ..optim.diagnostics import Diagnostics
from ..optim.gated_adamw import gate
from .report import LoggedRun, log_fit, smooth
from .theme import COLORS, TEMPLATE

__all__ = ["SECTIONS"]

GREY = COLORS["grey"]


def _figure(x: str, y: str, **layout: object) -> go.Figure:
    figure = go.Figure(layout={"template": TEMPLATE, "height": 420})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure.update_layout(**layout)


def _colors(runs: list[LoggedRun]) -> dict[str, str]:
    palette = [color for name, color in COLORS.items() if name != "grey"]
    return {run.name: palette[i % len(palette)] for i, run in enumerate(runs)}


def loss_figure(runs: list[LoggedRun], x: str) -> go.Figure:
    colors = _colors(runs)
    figure = _figure({"tokens": "training tokens", "time": "seconds of training"}[x], "loss (nats per token)")
    for run in runs:
        at, loss = run.series("loss", x)
        line = {"color": colors[run.name], "width": 1}
        figure.add_scatter(
            x=at, y=loss, name=f"{run.name}, training", line=line, opacity=0.25, legendgroup=run.name, showlegend=False
        )
        figure.add_scatter(x=at, y=smooth(loss), name=f"{run.name}, training", line={**line, "width": 2}, legendgroup=run.name)
        at, held_out = run.series("val_loss", x)
        if len(at):
            dots = {"color": colors[run.name], "symbol": "circle-open", "size": 8}
            dashes = {"color": colors[run.name], "dash": "dot"}
            figure.add_scatter(x=at, y=held_out, name=f"{run.name}, held out", mode="lines+markers", marker=dots, line=dashes)
    every = np.concatenate([run.series("loss")[1] for run in runs])
    low, high = float(every.min()), float(np.quantile(every, 0.98))
    return figure.update_yaxes(range=[low - 0.05 * (high - low), high])


def s_z_figure(runs: list[LoggedRun]) -> go.Figure:
    figure, colors = _figure("step (logarithmic)", "mean of s_z", xaxis={"type": "log"}), _colors(runs)
    for run in runs:
        t, s_z = run.series("s_z", "step")
        if len(t) < 4:
            continue
        start = 1000.0 if t[-1] > 2000 else max(2.0, 0.25 * t[-1])  # the paper fits from step 1000 on, after the transient
        figure.add_scatter(x=t, y=s_z, name=run.name, line={"color": colors[run.name]})
        a, b = log_fit(t, s_z, start)
        fit = np.geomspace(start, t[-1], 50)
        text = f"{run.name}: {a:.3f} + {b:.3f} ln t, from t = {start:.0f}"
        figure.add_scatter(x=fit, y=a + b * np.log(fit), name=text, line={"color": colors[run.name], "dash": "dash"})
    return figure


def _with_diagnostics(run: LoggedRun) -> list[dict]:
    return [r for r in run.records if r.get("diagnostics")]


def histogram_figure(runs: list[LoggedRun]) -> go.Figure:
    """log10 sqrt(v_hat) of all coordinates at the last diagnostics, and the gate over the same axis."""
    figure, colors = _figure("log10 sqrt(v_hat)", "coordinates"), _colors(runs)
    edges = np.array(Diagnostics().edges)
    centers = np.concatenate([[edges[0]], (edges[1:] + edges[:-1]) / 2, [edges[-1]]])
    for run in runs:
        if not (records := _with_diagnostics(run)):
            continue
        counts = np.sum([g["histogram"] for g in records[-1]["diagnostics"]], axis=0)
        name = f"{run.name}, step {records[-1]['step']}"
        figure.add_scatter(x=centers, y=counts, name=name, fill="tozeroy", line={"color": colors[run.name]})
    if not figure.data:  # without a run, the gate would be the only curve
        return figure
    x = np.linspace(-14, 0, 200)
    for a, dash in ((0.5, "dash"), (1.0, "dot")):
        y = gate(torch.tensor(10.0**x + 1e-14), a=a).numpy()
        figure.add_scatter(x=x, y=y, yaxis="y2", name=f"gate, a = {a:g}", line={"color": GREY, "dash": dash})
    figure.add_vline(x=-8, line={"color": GREY, "width": 1}, annotation_text="eps_gate")
    side = {"overlaying": "y", "side": "right", "range": [0, 1.02], "title": "gate", "showgrid": False}
    return figure.update_layout(yaxis2=side, xaxis={"range": [-14, 0]})


def zero_figure(runs: list[LoggedRun]) -> go.Figure:
    figure, colors = _figure("step", "coordinates with zero gradient / d_model"), _colors(runs)
    for run in runs:
        records, d = _with_diagnostics(run), run.config["model"]["d_model"]
        y = [sum(g["zero_gradient"] for g in r["diagnostics"]) / d for r in records]
        if records:
            figure.add_scatter(
                x=[r["step"] for r in records], y=y, name=run.name, mode="lines+markers", line={"color": colors[run.name]}
            )
    return figure


def angle_figure(runs: list[LoggedRun]) -> go.Figure:
    """The mean and the largest angle of the vectors under the cap, and the cap."""
    figure, colors = _figure("step", "degrees"), _colors(runs)
    for run in runs:
        lines = [(r["step"], [g for g in r["diagnostics"] if g["cap"] is not None]) for r in _with_diagnostics(run)]
        lines = [(t, groups) for t, groups in lines if groups]
        curves = {
            "mean angle": ("solid", [_mean([g["angle_mean"] for g in groups]) for _, groups in lines]),
            "largest angle": ("dot", [max(g["angle_max"] for g in groups) for _, groups in lines]),
            "cap": ("dash", [max(g["cap"] for g in groups) for _, groups in lines]),
        }
        for name, (dash, values) in curves.items():
            line = {"color": GREY if name == "cap" else colors[run.name], "dash": dash}
            if lines:
                figure.add_scatter(x=[t for t, _ in lines], y=np.degrees(values), name=f"{run.name}, {name}", line=line)
    return figure


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def alpha_figure(runs: list[LoggedRun]) -> go.Figure:
    figure = _figure("block", "mean |alpha|")
    for run in runs:
        records = [r for r in run.records if "alpha" in r]
        pattern = run.config["model"]["pattern"]
        names = [f"{i} {letter}" for i, letter in enumerate(pattern)]
        for r in {records[0]["step"]: records[0], records[-1]["step"]: records[-1]}.values() if records else ():
            figure.add_scatter(x=names, y=r["alpha"], name=f"{run.name}, step {r['step']}", mode="lines+markers")
    return figure


def router_figure(runs: list[LoggedRun]) -> go.Figure:
    """The largest load of an expert over the mean, by MoE layer; 1 is perfect balance."""
    figure = _figure("step", "largest load / mean load")
    for run in runs:
        lines = [r for r in run.records if r.get("load_max")]
        if not lines:
            continue
        t, load = np.array([r["step"] for r in lines]), np.array([r["load_max"] for r in lines])
        for layer in range(load.shape[1]):
            dead = lines[-1]["dead_experts"][layer]
            name = f"{run.name}, MoE layer {layer}" + (f" ({dead} experts idle at the end)" if dead else "")
            figure.add_scatter(x=t, y=smooth(load[:, layer]), name=name, line={"width": 1})
    return figure


def grad_figure(runs: list[LoggedRun]) -> go.Figure:
    figure, colors = _figure("step", "gradient norm", yaxis={"type": "log"}), _colors(runs)
    for run in runs:
        t, norm = run.series("grad_norm", "step")
        figure.add_scatter(x=t, y=norm, name=run.name, line={"color": colors[run.name], "width": 1})
    return figure


SECTIONS = (  # title, figure, description
    (
        "Loss over tokens",
        lambda runs: loss_figure(runs, "tokens"),
        "Thin: every step; thick: running mean; circles: held-out text.",
    ),
    (
        "Loss over time",
        lambda runs: loss_figure(runs, "time"),
        "The same over the seconds of training, without evaluation and saving.",
    ),
    (
        "The logit scale s_z",
        s_z_figure,
        "The paper's figure 2: after a transient the mean of s_z grows with the logarithm of the step.",
    ),
    (
        "Second moments and the gate",
        histogram_figure,
        "Coordinates left of eps_gate are held back; a = 0.5 lets more of them through than a = 1, Adam's gate.",
    ),
    ("Coordinates without a gradient", zero_figure, "Appendix D: exactly zero at that step, over all parameters."),
    (
        "Angle of a step",
        angle_figure,
        "How far the unit vectors under the Angular Step Cap turn in a step, and the cap itself.",
    ),
    (
        "Eigen learning rates",
        alpha_figure,
        "How far each block moves the hidden state toward its suggestion, at the first and the last diagnostics.",
    ),
    ("Routers", router_figure, "Load of the busiest expert; 1 is perfect balance."),
    ("Gradient norm", grad_figure, "Over all parameters, before clipping."),
)
