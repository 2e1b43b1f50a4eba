"""What does chapter 12 draw? One small problem, trained with AdamW and with GatedAdamW, and its rows on the sphere.

The problem: 96 points in 8 dimensions, 4 classes, softmax regression; the figures show the cross-entropy over all points. The
optimizers are the real ones, torch's AdamW and this package's GatedAdamW. Both treat each row separately, so runs that differ
only in their data are stacked in one tensor W [runs, classes, d] and trained together.

    scale    a factor on the loss before the backward pass, which does not move the minimum
    bad      the batch of step BAD has wrong classes and a gradient that is too large by this factor; 0: like the others
    cap      degrees that a row may turn in one step; 180: no cap
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from plotly.subplots import make_subplots
from torch import Tensor, nn

from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.smgc import SMGC
from ngpt_core.sphere import angle, unit

from ..theme import COLORS, powers

STEPS, LR = 100, 0.05
SCALES = (1.0, 1e-6, 1e-8, 1e-9, 1e-10)


@cache
def problem() -> tuple[Tensor, Tensor]:
    """96 points around 4 centers, overlapping a little, and their classes."""
    draw = torch.Generator().manual_seed(3)
    centres = torch.randn(4, 8, generator=draw)
    y = torch.arange(96) % 4
    return centres[y] + 0.7 * torch.randn(96, 8, generator=draw), y


def cross_entropy(W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[runs]: the mean loss of each run's W [runs, classes, d] on the points."""
    logits = torch.einsum("nd,rkd->rnk", x, W)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(W)), reduction="none").view(len(W), -1).mean(1)


# ---- the gate --------------------------------------------------------------------------------------------------------
def losses(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
    """[scales, STEPS]: the loss before each step, of weights that start at zero."""
    x, y = problem()
    W, scales, seen = nn.Parameter(torch.zeros(len(SCALES), 4, 8)), torch.tensor(SCALES), []
    optimizer = make([W])
    for _ in range(STEPS):
        loss = cross_entropy(W, x, y)
        seen.append(loss.detach())
        W.grad = None
        (scales * loss).sum().backward()
        optimizer.step()
    return torch.stack(seen, 1)


@cache
def _adamw() -> Tensor:
    return losses(lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.95), weight_decay=0.0))


@cache
def _gated(a: float, eps_gate: float) -> Tensor:
    return losses(lambda p: GatedAdamW(p, lr=LR, betas=(0.9, 0.95), a=a, eps_gate=eps_gate))


def swapped(scale: float, a: float, eps_gate: float) -> dict:
    """The same run with both optimizers: the same learning rate, betas and start."""
    i = SCALES.index(scale)
    gated, adamw = _gated(a, eps_gate)[i], _adamw()[i]
    return {"gated": gated, "adamw": adamw, "gated_end": gated[-1], "adamw_end": adamw[-1]}


def swapped_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    t = np.arange(STEPS)
    grey = {"color": COLORS["grey"], "width": 2.5, "dash": "dash"}
    figure.add_scatter(x=t, y=v["adamw"], name="AdamW, ε = 1e-8", mode="lines", line=grey)
    figure.add_scatter(x=t, y=v["gated"], name="GatedAdamW", mode="lines", line={"color": COLORS["blue"], "width": 2.5})
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss", range=[0, 1.5])
    return figure


# ---- rows on the sphere ----------------------------------------------------------------------------------------------
LENGTH = 10.0  # logits are this times a cosine
BAD = 40
FACTORS = (0, 1, 10, 100)
CLIP = SMGC(R=4.0, start=20)  # the paper's R = 100 and start = 500 are for long runs


@cache
def _sphere(lr: float, cap: float, clip: bool) -> tuple[Tensor, Tensor]:
    """[factors, STEPS] each: the loss before a step, and the largest turn of a row in it, in degrees."""
    x, y = LENGTH * unit(problem()[0]), problem()[1]
    W = nn.Parameter(torch.eye(4, 8).roll(1, 0).repeat(len(FACTORS), 1, 1))  # each row near another class: a wrong start
    factors, seen, turned = torch.tensor(FACTORS), [], []
    group = {"params": [W], "unit_dim": -1, "cap": math.radians(cap) if cap < 180 else None, "smgc": CLIP if clip else None}
    optimizer = GatedAdamW([group], lr=lr)
    for t in range(STEPS):
        rows = torch.arange(8 * t, 8 * t + 8) % len(x)
        loss = cross_entropy(W, x[rows], y[rows])
        if t == BAD:
            wrong = cross_entropy(W, x[rows], (y[rows] + 1) % 4)
            loss = torch.where(factors > 0, factors * wrong, loss)
        W.grad = None
        loss.sum().backward()
        before = W.detach().clone()
        optimizer.step()
        seen.append(cross_entropy(before, x, y))
        turned.append(torch.rad2deg(angle(before, W.detach() - before).amax(-1)))
    return torch.stack(seen, 1), torch.stack(turned, 1)


def on_the_sphere(lr: float, cap: float, bad: int, clip: str) -> dict:
    """Unit rows under GatedAdamW, on batches of 8 points of which one may be bad."""
    i = FACTORS.index(bad)
    loss, turned = (x[i] for x in _sphere(lr, cap, clip != "off"))
    return {"loss": loss, "angle": turned, "end": loss[-1], "worst": turned[BAD:].max(), "after": loss[BAD + 1 :].max()}


def on_the_sphere_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    t = np.arange(STEPS)
    for row, key, color in ((1, "loss", "blue"), (2, "angle", "red")):
        line = {"color": COLORS[color], "width": 2.5}
        figure.add_scatter(x=t, y=v[key], name=key, mode="lines", showlegend=False, line=line, row=row, col=1)
    figure.update_xaxes(title="step", row=2, col=1)
    figure.update_yaxes(title="loss", range=[0, 4], row=1, col=1)
    figure.update_yaxes(title="largest turn, °", type="log", range=[-1.5, 2.1], **powers(-1, 0, 1, 2), row=2, col=1)
    return figure.update_layout(height=460, margin={"t": 16})
