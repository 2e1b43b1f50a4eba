"""What does chapter 9 compute itself? A student that learns a teacher's unit rows, for every combination of the recipe's
switches, and the two numbers that its exercises need."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
import torch

from ngpt_core import sphere
from ngpt_core.nn.unit import unit_axes
from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.schedule import log_decay

from ..theme import COLORS

STEPS = 150


def toy(C: float, beta: float, tangent: str, cap: str) -> dict:
    """Mean angle to the teacher, in degrees, before each step and at the end; ``cap`` opens over the first tenth."""
    n, d = 16, 32
    draw = torch.Generator().manual_seed(0)
    teacher, start = sphere.random(n, d, generator=draw), sphere.random(n, d, generator=draw)
    W = torch.nn.Parameter(start)
    peak = None if cap == "off" else math.radians(float(cap.strip("°")))
    optimizer = GatedAdamW([W], lr=C / math.sqrt(d), betas=(beta, beta), unit_dim=-1, tangent=tangent == "on", cap=peak)
    group, angles = optimizer.param_groups[0], []
    for t in range(1, STEPS + 1):
        group["lr"] = C / math.sqrt(d) * log_decay(t / STEPS)
        if peak is not None:
            group["cap"] = peak * min(1.0, t / (0.1 * STEPS))
        x, noise = torch.randn(16, d, generator=draw), torch.randn(16, n, generator=draw)
        error = x @ (W.detach() - teacher).T + noise
        W.grad = 2 * error.T @ x / error.numel()  # of the mean squared error
        angles.append(math.degrees(sphere.angle(teacher, W.detach() - teacher).mean()))
        optimizer.step()
    end = math.degrees(sphere.angle(teacher, W.detach() - teacher).mean())
    return {"angle": np.array([*angles, end]), "end": end}


def toy_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(x=np.arange(STEPS + 1), y=v["angle"], mode="lines", line={"color": COLORS["blue"], "width": 2.5})
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="angle to the teacher, degrees", range=[0, 105])
    figure.update_layout(height=320, margin={"t": 12})
    return figure


def tokens_to_reach(target: float, tokens: Sequence[float], losses: Sequence[float]) -> float | None:
    """Tokens of the schedule that ends at ``target``; between two schedules the loss is a straight line over log(tokens).

    ``tokens`` increase; ``losses`` are the final losses of those schedules. None if no two of them enclose the target.
    """
    for (t0, l0), (t1, l1) in pairwise(zip(tokens, losses)):
        if l0 >= target >= l1:
            return t0 * (t1 / t0) ** (0.0 if l0 == l1 else (l0 - target) / (l0 - l1))
    return None


def share_on_sphere(model: torch.nn.Module) -> float:
    """The share of a model's coordinates that live on the sphere."""
    return sum(model.get_parameter(name).numel() for name in unit_axes(model)) / sum(p.numel() for p in model.parameters())
