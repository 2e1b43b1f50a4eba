"""What does chapter 6 draw? One optimizer step on the sphere, how large it is, and how well its angle can be computed."""

import math

import numpy as np
import plotly.graph_objects as go
import torch

from ngpt_core import sphere
from ngpt_core.optim.schedule import log_decay

from ..theme import COLORS, powers
from .hypersphere import add_points, globe, place

# ---- one step: projection, cap, Norm ---------------------------------------------------------------------------------


def one_update(radial: float, size: float, cap: float) -> dict:
    """A displacement of length ``size`` that leaves the tangent plane at w by ``radial`` degrees; a cap in degrees."""
    w = place(-45, 62)  # seen from the side: out of the sphere is up, the step goes to the right
    sideways = sphere.unit(sphere.tangent(place(136, 27), w))
    tilt = math.radians(radial)
    raw = size * (math.cos(tilt) * sideways + math.sin(tilt) * w)
    delta = sphere.tangent(raw, w)  # app. B
    capped = sphere.cap_angle(w, delta, math.radians(cap))  # section 2.3, ASC
    new = sphere.unit(capped)  # Norm, the retraction
    around = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)[:, None]
    other = torch.linalg.cross(w, sideways)
    circle = math.cos(math.radians(cap)) * w + math.sin(math.radians(cap)) * (around.cos() * sideways + around.sin() * other)
    turn = [math.degrees(sphere.angle(w, d)) for d in (raw, delta, new - w)]
    return {
        "w": w[None],
        "row": torch.stack([torch.zeros_like(w), w]),
        "raw": torch.stack([w, w + raw]),
        "delta": torch.stack([w, w + delta]),
        "circle": circle,
        "retract": torch.stack([capped, new]),
        "new": new[None],
        "angle_raw": turn[0],
        "angle_delta": turn[1],
        "angle_new": turn[2],
    }


def one_update_figure(v: dict) -> go.Figure:
    figure = globe()
    wide = {f"{axis}axis_range": [-1.7, 1.7] for axis in "xyz"}  # a line is cut where the box ends: steps leave the sphere
    figure.update_scenes(camera_eye={"x": 0.98, "y": 0.65, "z": 0.49}, **wide)
    add_points(figure, v["row"], "w before", "blue", mode="lines", width=4, showlegend=False)
    add_points(figure, v["circle"], "the cap", "magenta", mode="lines", width=4)
    add_points(figure, v["raw"], "unprojected step", "red", mode="lines", width=4)
    add_points(figure, v["delta"], "tangent step", "teal", mode="lines", width=6)
    add_points(figure, v["retract"], "Norm", "gold", mode="lines", width=4, showlegend=False)
    add_points(figure, v["w"], "w before", "blue")
    add_points(figure, v["new"], "w after", "gold", size=8)
    return figure


def section_figure() -> go.Figure:
    """The same three operations in the plane of one step: project, cap at 20 degrees, Norm."""
    figure, arc = go.Figure(), np.radians(np.linspace(-25, 50, 60))
    tilt, cap = math.radians(40), math.radians(20)
    raw = 0.7 * np.array([math.cos(tilt), math.sin(tilt)])
    line = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=np.sin(arc), y=np.cos(arc), **line, line={"color": COLORS["grey"], "width": 2})
    figure.add_scatter(x=[0, 0], y=[0.45, 1], **line, line={"color": COLORS["blue"], "width": 4})
    for color, x, y in (
        ("red", [0, raw[0]], [1, 1 + raw[1]]),
        ("teal", [0, raw[0]], [1, 1]),
        ("gold", [0.45 * math.sin(cap), math.sin(cap)], [0.45 * math.cos(cap), math.cos(cap)]),
    ):
        figure.add_scatter(x=x, y=y, **line, line={"color": COLORS[color], "width": 4})
    figure.add_scatter(x=[raw[0]] * 2, y=[1 + raw[1], 1], **line, line={"color": COLORS["grey"], "width": 1.5, "dash": "dot"})
    for x, y, text, anchor in (
        (-0.03, 0.62, "w before", "right"),
        (0.27, 0.62, "w after", "left"),
        (raw[0] / 2 - 0.05, 1 + raw[1] / 2 + 0.04, "step", "right"),
        (raw[0] + 0.03, 1 + raw[1] / 2, "1 project", "left"),
        (raw[0] + 0.03, 1, "2 cap", "left"),
        (-0.3, 0.87, "sphere", "center"),
    ):
        figure.add_annotation(x=x, y=y, text=text, showarrow=False, xanchor=anchor, font={"size": 13})
    figure.update_xaxes(range=[-0.5, 0.95], visible=False)
    figure.update_yaxes(range=[0.4, 1.5], visible=False, scaleanchor="x")
    figure.update_layout(height=380, margin={"l": 8, "r": 8, "t": 8, "b": 8})
    return figure


# ---- how large is a step? --------------------------------------------------------------------------------------------

PROGRESS = np.linspace(0.0005, 1, 400)


def step_angles(C: float, beta1: float, cap: float) -> dict:
    """Degrees turned per step over training, at the peak rate C/sqrt(d): coherent gradients, pure noise, and the cap.

    d coordinates that each move by lr turn the vector by atan(lr sqrt(d)) = atan(C eta). Under pure noise Adam's update has the
    root mean square sqrt((1-beta1)/(1+beta1)) in each coordinate (app. D, c_Adam).
    """
    eta = np.array([log_decay(r) for r in PROGRESS])
    noise = math.sqrt((1 - beta1) / (1 + beta1))
    limit = cap * np.minimum(1, PROGRESS / 0.1)
    coherent, random = np.degrees(np.arctan(C * eta)), np.degrees(np.arctan(C * eta * noise))
    return {
        "coherent": coherent,
        "random": random,
        "cap": limit,
        "peak": float(np.degrees(np.arctan(C))),
        "free": 100 * float(np.mean(random <= limit)),
    }


def step_angles_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for key, name, color, dash in (
        ("coherent", "all gradients agree", "blue", "solid"),
        ("random", "pure noise", "teal", "solid"),
        ("cap", "the cap", "magenta", "dash"),
    ):
        figure.add_scatter(
            x=PROGRESS, y=v[key], name=name, mode="lines", line={"color": COLORS[color], "width": 2.5, "dash": dash}
        )
    figure.update_xaxes(title="share of training done, r", range=[0, 1])
    figure.update_yaxes(title="degrees per step", type="log", range=[-2.2, 1.6], tickvals=[0.01, 0.1, 1, 10])
    return figure


# ---- two figures of a run --------------------------------------------------------------------------------------------


def cap_figure(free: list[float], capped: list[float], limit: list[float]) -> go.Figure:
    """The largest angle of a row in each step, without and with the cap, and the cap itself; in degrees."""
    figure = go.Figure()
    steps = np.arange(1, len(free) + 1)
    for y, name, color, dash in (
        (free, "no cap", "grey", "solid"),
        (capped, "capped", "blue", "solid"),
        (limit, "the cap", "magenta", "dash"),
    ):
        figure.add_scatter(x=steps, y=y, name=name, mode="lines", line={"color": COLORS[color], "width": 2.5, "dash": dash})
    figure.update_xaxes(title="step", range=[0, 1.03 * len(free)], tickvals=np.linspace(0, len(free), 4))
    figure.update_yaxes(title="largest angle, degrees", type="log", tickvals=[0.01, 0.1, 1, 10])
    return figure


def projection_figure(rates: list[float], runs: dict[str, list[float]]) -> go.Figure:
    """The final error of runs with and without tangent projection over the peak rate C (on the paper's way of comparing)."""
    figure = go.Figure()
    for (name, errors), color in zip(runs.items(), ("blue", "red"), strict=True):
        look = {"mode": "lines+markers", "line": {"color": COLORS[color], "width": 2.5}, "marker": {"size": 7}}
        figure.add_scatter(x=rates, y=errors, name=name, **look)
        best = int(np.argmin(errors))
        star = {"color": COLORS[color], "size": 15, "symbol": "star"}
        figure.add_scatter(x=[rates[best]], y=[errors[best]], mode="markers", marker=star, showlegend=False, hoverinfo="skip")
    figure.update_xaxes(title="C, peak rate × √d", type="log", tickvals=rates)
    figure.update_yaxes(title="final error, degrees", type="log", tickvals=[4, 5, 6, 7, 8, 10, 12, 15, 20])
    return figure


# ---- how well can its angle be computed? -----------------------------------------------------------------------------

ANGLES = np.geomspace(1e-8, 1e-1, 57)


def by_acos(w: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The angle as the arccosine of a dot product: the obvious formula."""
    return torch.acos((sphere.unit(w) * sphere.unit(w + delta)).sum(-1).clamp(-1, 1))


def by_candidate(w: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The paper's equation as written: u from the candidate w + delta."""
    u = sphere.tangent(w + delta, w)
    return torch.atan2(u.norm(dim=-1), (sphere.unit(w) * (w + delta)).sum(-1))


def angle_errors(d: int) -> dict:
    """Relative errors in float32 against the exact angle between the same float32 vectors, median of 32 draws."""
    draw = torch.Generator().manual_seed(d)
    w = sphere.random(32, 1, d, generator=draw)
    delta = torch.tensor(ANGLES, dtype=torch.float32)[:, None] * sphere.unit(
        sphere.tangent(sphere.random(32, 1, d, generator=draw), w)
    )
    w = w.expand_as(delta)
    truth = sphere.angle(w.double(), delta.double())

    def error(angle: torch.Tensor) -> np.ndarray:
        return ((angle.double() - truth) / truth).abs().median(0).values.clamp(1e-9, 1e2).numpy()

    found = {
        "acos": error(by_acos(w, delta)),
        "candidate": error(by_candidate(w, delta)),
        "displacement": error(sphere.angle(w, delta)),
    }
    small = int(abs(ANGLES / 1e-6 - 1).argmin())
    return found | {f"{name}_small": values[small] for name, values in found.items()}


def angle_errors_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for key, name, color in (
        ("acos", "acos of the cosine", "red"),
        ("candidate", "from the candidate", "gold"),
        ("displacement", "from the displacement", "blue"),
    ):
        figure.add_scatter(x=ANGLES, y=v[key], name=name, mode="lines", line={"color": COLORS[color], "width": 2.5})
    figure.update_xaxes(title="angle of the step, radians", type="log", range=[-8.1, -0.8], **powers(*range(-8, 0)))
    figure.update_yaxes(title="relative error in float32", type="log", range=[-9.2, 2.3], **powers(-8, -6, -4, -2, 0, 2))
    return figure
